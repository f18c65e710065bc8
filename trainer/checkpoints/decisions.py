"""When a checkpoint is saved, which ones stay, and which one is selected."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.index import IndexEntry, none_below, read_checkpoint, read_index
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.report.wording import spell_metric

# So many checkpoints are kept for an evaluator that has not measured them; one that never does must
# not fill the disk.
MAX_AWAITED = 10
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Every so many global steps, and at the last one; 0 is never."""

    steps: int
    last_step: int

    def next_after(self, step: int) -> int:
        """Return the next global step at which it is due, at most the last one."""
        after = (step // self.steps + 1) * self.steps if self.steps else self.last_step
        return min(after, self.last_step)

    def is_due(self, before: int, after: int) -> bool:
        """Say whether it became due by the updates from one global step to another."""
        return bool(self.steps) and (
            after // self.steps > before // self.steps or after >= self.last_step > before
        )


@dataclass(frozen=True, kw_only=True)
class SaveInterval(Interval):
    """When a checkpoint is saved: also after so many seconds, of which 0 is never."""

    seconds: float = 0.0

    @classmethod
    def of(cls, training: TrainingConfig) -> SaveInterval:
        """Return that of a configuration."""
        return cls(
            steps=training.checkpoint_every,
            last_step=training.steps,
            seconds=training.checkpoint_seconds,
        )

    def is_late(self, seconds: float) -> bool:
        """Say whether it is due so many seconds after the last save."""
        return 0 < self.seconds <= seconds


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints stay: the newest, the best, and the newest of those not measured yet."""

    newest: int
    unmeasured: int = 0

    def outdated(self, found: Sequence[IndexEntry]) -> list[str]:
        """Return the URIs of those that may be deleted, of all that are published, oldest first."""
        unmeasured = [each for each in found if not each.validation] if self.unmeasured else []
        kept = [*found[-self.newest :], *best_first(found)[:1], *unmeasured[-self.unmeasured :]]
        stay = {each.uri for each in kept}
        return [each.uri for each in found if each.uri not in stay]


def best_first(found: Sequence[IndexEntry]) -> list[IndexEntry]:
    """Return the entries that were measured, the best first: see `MainMetric.order`.

    Of two that are equal in all the earlier one is first.
    """
    measured = [each for each in found if each.validation]
    return sorted(measured, key=lambda each: each.main.order(each.validation))


def _best_by(best: IndexEntry) -> tuple[str, str]:
    """Return by what the best one was selected, and why not by the main metric, or nothing."""
    by, main = best.by, best.main
    why = "" if by == main else f": a validation does not measure {spell_metric(main.name)}"
    return f"best by validation {spell_metric(by.name)}", why


@dataclass(frozen=True, kw_only=True)
class HandedOn:
    """The valid checkpoint of a run that evaluation, export and registration get.

    Attributes:
        trained: the global step of the last checkpoint.
        why: a few words.
        fields: of its manifest.
        validation: what a validation measured of it.
        best: the best by validation, valid or not; None where none was measured.
    """

    uri: str
    global_step: int
    trained: int
    why: str
    fields: Mapping[str, Any]
    validation: Mapping[str, float]
    best: IndexEntry | None


def select_checkpoint(uri: str, choice: str, main_metric: str = "") -> HandedOn:
    """Return the checkpoint below `uri` that training hands on, and emit which one it is.

    With `choice` "best" it is the best by the validation's main metric that is not damaged; else,
    or where none was measured after training began, the last. Raises `UserError` where there is
    none, or a last one that is damaged. `main_metric` is that of a run whose training was over
    when it was resumed with another one.
    """
    found = read_index(uri, main_metric)
    if not found:
        raise none_below(uri)
    ranked = best_first(found) if choice == "best" else []
    # An evaluator that fell behind may have measured only the weights of before training.
    if found[-1].global_step and not any(each.global_step for each in ranked):
        ranked = []
    damaged = ""
    for entry in ranked:
        by, instead = _best_by(entry)
        try:
            return _handed_on(entry, found, f"{by}{damaged}{instead}")
        except (storage.Corrupt, storage.Missing, storage.UnknownSchema) as error:
            log.warning("passed over %s: %s", entry.uri, error)
            events.emit(events.CheckpointPassedOver(uri=entry.uri, reason=str(error)))
            damaged = " that is not damaged"
    reason = "none that was validated is whole" if ranked else "none was validated"
    why = f"the last: {reason if choice == 'best' else 'training.hand_on'}"
    return _handed_on(found[-1], found, why)


def _handed_on(entry: IndexEntry, found: Sequence[IndexEntry], why: str) -> HandedOn:
    read_checkpoint(entry.uri)
    # It may have been damaged since it was published.
    fields = storage.verify(entry.uri).fields
    step, trained = entry.global_step, found[-1].global_step
    events.emit(events.HandedOn(uri=entry.uri, global_step=step, trained=trained, why=why))
    return HandedOn(
        uri=entry.uri,
        global_step=step,
        trained=trained,
        why=why,
        fields=fields,
        validation=entry.validation,
        best=next(iter(best_first(found)), None),
    )

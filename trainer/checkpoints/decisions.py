"""Decisions about checkpoints: when to save, which to keep, and which to select."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.index import IndexEntry, none_below, read_checkpoint, read_index
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.report.wording import spell_metric
from flotilla.trainer.runtime.errors import UserError

# Maximum number of unmeasured checkpoints to keep for an evaluator. Without a limit, an evaluator
# that never measures would fill the disk.
MAX_AWAITED = 10
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Interval:
    """An interval in global steps, which also ends at the last step. 0 steps disable it."""

    steps: int
    last_step: int

    def find_next(self, step: int) -> int:
        """Return the next global step at which the interval ends, at most the last step."""
        after = (step // self.steps + 1) * self.steps if self.steps else self.last_step
        return min(after, self.last_step)

    def is_due(self, before: int, after: int) -> bool:
        """Return whether the interval ended between two global steps."""
        return bool(self.steps) and (
            after // self.steps > before // self.steps or after >= self.last_step > before
        )


@dataclass(frozen=True, kw_only=True)
class SaveInterval(Interval):
    """The interval between checkpoints, in steps and in seconds. Either can be 0 (disabled)."""

    seconds: float = 0.0

    @classmethod
    def from_config(cls, training: TrainingConfig) -> SaveInterval:
        """Return the interval of a configuration."""
        return cls(
            steps=training.checkpoint_every,
            last_step=training.steps,
            seconds=training.checkpoint_seconds,
        )

    def is_late(self, seconds: float) -> bool:
        """Return whether a save is due `seconds` after the last one."""
        return 0 < self.seconds <= seconds


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The policy for keeping checkpoints: the newest, the best, and the newest unmeasured ones.

    Attributes:
        every_hours: minimum time between additional checkpoints, in hours. The first checkpoint
            is one of them. If 0, no additional checkpoints are kept.
    """

    newest: int
    unmeasured: int = 0
    every_hours: float = 0.0

    def list_outdated(self, found: Sequence[IndexEntry]) -> list[str]:
        """Return the URIs to delete. `found` lists all published checkpoints, oldest first."""
        unmeasured = [each for each in found if not each.validation] if self.unmeasured else []
        kept = [
            *found[-self.newest :],
            *best_first(found)[:1],
            *unmeasured[-self.unmeasured :],
            *self._list_periodic(found),
        ]
        stay = {each.uri for each in kept}
        return [each.uri for each in found if each.uri not in stay]

    def _list_periodic(self, found: Sequence[IndexEntry]) -> list[IndexEntry]:
        kept: list[IndexEntry] = []
        interval = timedelta(hours=self.every_hours)
        for each in found if self.every_hours else ():
            if not kept or each.created - kept[-1].created >= interval:
                kept.append(each)
        return kept


def best_first(found: Sequence[IndexEntry]) -> list[IndexEntry]:
    """Return the measured checkpoints, best first. See `MainMetric.order`.

    Of two equal checkpoints, the earlier one comes first.
    """
    measured = [each for each in found if each.validation]
    return sorted(measured, key=lambda each: each.main.order(each.validation))


def _explain_best(best: IndexEntry) -> tuple[str, str]:
    """Return the metric that selected the best checkpoint, and why it is not the main metric."""
    by, main = best.by, best.main
    why = "" if by == main else f", because validations do not measure {spell_metric(main.name)}"
    return f"best by validation {spell_metric(by.name)}", why


@dataclass(frozen=True, kw_only=True)
class SelectedCheckpoint:
    """The selected checkpoint of a run, which is evaluated, exported and registered.

    Attributes:
        trained: the global step of the last checkpoint.
        why: a short reason for the selection.
        fields: the fields of its manifest.
        validation: the metrics of its validation.
        best: the best checkpoint by validation, even if invalid, or None if none was measured.
    """

    uri: str
    global_step: int
    trained: int
    why: str
    fields: Mapping[str, Any]
    validation: Mapping[str, float]
    best: IndexEntry | None


def select_checkpoint(uri: str, choice: str, main_metric: str = "") -> SelectedCheckpoint:
    """Select a checkpoint of the run below `uri`, and emit an event about it.

    The choice "best" selects the best valid checkpoint by the main validation metric, or the last
    checkpoint if there is none, or none was measured after step 0. All other choices select the
    last one. A choice other than "best" and "last" is reported as the reason. Set `main_metric` if
    a finished run is resumed with another main metric.

    Raises `UserError` if there is no checkpoint, or if the last one is corrupted.
    """
    found = read_index(uri, main_metric)
    if not found:
        raise none_below(uri)
    ranked = best_first(found) if choice == "best" else []
    # Do not select the initial weights only because a slow evaluator has measured nothing else.
    if found[-1].global_step and not any(each.global_step for each in ranked):
        ranked = []
    damaged = ""
    for entry in ranked:
        by, instead = _explain_best(entry)
        try:
            return _select(entry, found, f"{by}{damaged}{instead}")
        except (storage.Corrupt, storage.Missing, storage.UnknownSchema) as error:
            log.warning("skipped %s: %s", entry.uri, error)
            events.emit(events.CheckpointPassedOver(uri=entry.uri, reason=str(error)))
            damaged = " among the intact checkpoints"
    reason = "no validated checkpoint is intact" if ranked else "no checkpoint was validated"
    asked = {"best": f"because {reason}", "last": "as set in training.hand_on"}.get(choice, choice)
    return _select(found[-1], found, f"the last, {asked}")


def select_program_checkpoint(uri: str, *, needs_model: bool) -> SelectedCheckpoint | None:
    """Select the last checkpoint of a user's program, and emit an event about it.

    With `needs_model`, select the last one that contains a model. Raises `UserError` if there is
    none. Without `needs_model`, return None if the program wrote no checkpoint.
    """
    found = read_index(uri)
    for entry in reversed(found):
        program = read_checkpoint(entry.uri).fields.get("program") or {}
        if not needs_model:
            return _select(entry, found, "the last")
        if program.get("model"):
            return _select(entry, found, "the last checkpoint with the program's model")
    if needs_model:
        raise UserError(
            f"no checkpoint below {uri} has a model: let the program write a SavedModel or a "
            ".keras file to FLOTILLA_MODEL, or set program.after_training: stop"
        )
    return None


def _select(entry: IndexEntry, found: Sequence[IndexEntry], why: str) -> SelectedCheckpoint:
    read_checkpoint(entry.uri)
    # Verify the files again, because they may have been corrupted since they were published.
    fields = storage.verify(entry.uri).fields
    step, trained = entry.global_step, found[-1].global_step
    events.emit(events.HandedOn(uri=entry.uri, global_step=step, trained=trained, why=why))
    return SelectedCheckpoint(
        uri=entry.uri,
        global_step=step,
        trained=trained,
        why=why,
        fields=fields,
        validation=entry.validation,
        best=next(iter(best_first(found)), None),
    )

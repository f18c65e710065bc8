"""Which checkpoints of a run are published, which retention keeps, and which one is handed on.

The newest ones are kept, and the best by validation loss.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import events, storage
from trainer.checkpoints.history import VALIDATION_LOSS, read_validations
from trainer.config.model import CHAMPION, KERAS, initial_weights
from trainer.errors import UserError
from trainer.json_records import is_number
from trainer.storage import Manifest

KIND = "checkpoint"
log = logging.getLogger(__name__)


def list_checkpoints(uri: str) -> list[tuple[str, int]]:
    """Return URI and global step of every published checkpoint below `uri`, oldest first."""
    return [(at, step) for at, step, _ in _readable(uri)]


def read_checkpoint(uri: str) -> Manifest:
    """Return the manifest of the checkpoint at `uri`.

    Raises:
        UserError: it is missing, damaged or no checkpoint, or has changed rows alone.
    """
    manifest = storage.read_manifest(uri)
    if manifest.kind != KIND:
        raise UserError(f"{uri} is of kind {manifest.kind!r} and not a checkpoint")
    if type(manifest.fields.get("global_step")) is not int:
        raise storage.Corrupt(f"the manifest of {uri} names no global step: take another one")
    if "base" in manifest.fields:
        raise storage.UnknownSchema(
            f"{uri} has only the rows that changed since another checkpoint, as versions before "
            "0.2 wrote them: take a checkpoint that is whole"
        )
    return manifest


def _readable(uri: str) -> list[tuple[str, int, Manifest]]:
    """Return the checkpoints below `uri` whose manifest names a global step, oldest first."""
    found = []
    for at, manifest in storage.published(uri, KIND):
        step = manifest.fields.get("global_step")
        if type(step) is int and step >= 0:
            found.append((at, step, manifest))
        else:
            log.warning("passed over: the manifest of %s names no global step", at)
    return sorted(found, key=lambda each: each[1])


def require_first_weights(value: str | Mapping[str, Any], uri: str) -> None:
    """Raise `UserError` where a run has to begin with weights that are not there.

    `value` is that of `training.warm_start`, and `uri` where the run has its checkpoints: one that
    has some already continues from those.
    """
    source = initial_weights(value).source
    if source in ("", CHAMPION) or list_checkpoints(uri):
        return
    try:
        if not source.endswith(KERAS):
            storage.read_manifest(source)
        elif storage.name_of(source) not in storage.names(storage.parent_of(source)):
            raise UserError(f"there is nothing at {source}")
    except UserError as error:
        raise UserError(f"training.warm_start: {error}") from None


def newest_checkpoint(uri: str) -> tuple[str, int]:
    """Return URI and global step of the newest published checkpoint; raises `UserError`."""
    found = list_checkpoints(uri)
    if not found:
        raise _none_below(uri)
    return found[-1]


def _none_below(uri: str) -> UserError:
    return UserError(f"no checkpoint is published below {uri}")


# So many checkpoints are kept for an evaluator that has not measured them; one that never does must
# not fill the disk.
MAX_AWAITED = 10


@dataclass(frozen=True, kw_only=True)
class IndexEntry:
    """One published checkpoint, and its validation loss where it was measured."""

    uri: str
    global_step: int
    loss: float | None


def index_of(uri: str) -> list[IndexEntry]:
    """Return the published checkpoints below `uri`, oldest first."""
    rows = {(row["global_step"], row["created"]): row for row in read_validations(uri)}
    found = []
    for at, step, manifest in _readable(uri):
        measured = rows.get((step, manifest.created)) or manifest.fields.get("metrics")
        loss = measured.get(VALIDATION_LOSS) if isinstance(measured, dict) else None
        loss = loss if is_number(loss) else None
        found.append(IndexEntry(uri=at, global_step=step, loss=loss))
    return found


def best_of(found: Sequence[IndexEntry]) -> IndexEntry | None:
    """Return the entry with the lowest validation loss, the earlier of two; None without a loss."""
    return next(iter(_best_first(found)), None)


def _best_first(found: Sequence[IndexEntry]) -> list[IndexEntry]:
    measured = [(each.loss, each) for each in found if each.loss is not None]
    return [each for _, each in sorted(measured, key=lambda pair: pair[0])]


def outdated(found: Sequence[IndexEntry], *, keep: int, awaited: bool) -> list[str]:
    """Return the URIs of the checkpoints that may be deleted.

    Args:
        found: the published ones, oldest first.
        keep: how many of the newest are kept, next to the best.
        awaited: whether an evaluator has yet to measure those without a loss.
    """
    stay = {each.uri for each in found[-keep:]}
    if lowest := best_of(found):
        stay.add(lowest.uri)
    if awaited:
        stay |= {each.uri for each in [each for each in found if each.loss is None][-MAX_AWAITED:]}
    return [each.uri for each in found if each.uri not in stay]


@dataclass(frozen=True, kw_only=True)
class HandedOn:
    """The valid checkpoint of a run that evaluation, export and registration get.

    Attributes:
        uri: where it is.
        global_step: its own.
        trained: the global step of the last checkpoint.
        why: a few words.
        fields: of its manifest.
        best: the best by validation loss, valid or not; None where none was measured.
    """

    uri: str
    global_step: int
    trained: int
    why: str
    fields: Mapping[str, Any]
    best: IndexEntry | None


def handed_on(uri: str, choice: str) -> HandedOn:
    """Return the checkpoint below `uri` that training hands on, and emit which one it is.

    With `choice` "best" it is the best by validation loss that is not damaged. With "last", or
    where no such one was measured, it is the last.

    Raises:
        UserError: no checkpoint is published, or it has to be the last and that one is damaged.
    """
    found = index_of(uri)
    if not found:
        raise _none_below(uri)
    ranked = _best_first(found) if choice == "best" else []
    why = "best by validation loss"
    for entry in ranked:
        try:
            return _handed_on(entry, found, why)
        except (storage.Corrupt, storage.Missing, storage.UnknownSchema) as error:
            log.warning("passed over %s: %s", entry.uri, error)
            events.emit(events.CheckpointPassedOver(uri=entry.uri, reason=str(error)))
            why = "best by validation loss that is not damaged"
    reason = "none that was validated is whole" if ranked else "none was validated"
    why = f"the last: {reason if choice == 'best' else 'training.hand_on'}"
    return _handed_on(found[-1], found, why)


def _handed_on(entry: IndexEntry, found: Sequence[IndexEntry], why: str) -> HandedOn:
    # It may have been damaged since it was published.
    read_checkpoint(entry.uri)
    fields = storage.verify(entry.uri).fields
    step, trained = entry.global_step, found[-1].global_step
    events.emit(events.HandedOn(uri=entry.uri, global_step=step, trained=trained, why=why))
    return HandedOn(
        uri=entry.uri,
        global_step=step,
        trained=trained,
        why=why,
        fields=fields,
        best=best_of(found),
    )


def publish_anew(folder: Path, uri: str, fields: Mapping[str, Any]) -> None:
    """Publish a checkpoint, in place of one at the same step that could not be read."""
    if storage.is_published(uri):
        # A valid one would have been resumed.
        storage.delete(uri)
    storage.publish(folder, uri, kind=KIND, fields=fields)

"""Which checkpoints of a run are kept: the newest ones, and the best by validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trainer import storage, validations
from trainer.checkpoint_listing import KIND

# So many that the evaluator has not come to are kept for it; an evaluator that never comes must not
# fill the disk.
AWAITED = 10


@dataclass(frozen=True, kw_only=True)
class Kept:
    """One published checkpoint and its validation loss, where it was measured."""

    uri: str
    global_step: int
    loss: float | None


def kept(uri: str) -> list[Kept]:
    """Return the published checkpoints below `uri`, oldest first."""
    rows = {(row["global_step"], row["created"]): row for row in validations.read(uri)}
    found = []
    for at, manifest in storage.published(uri, KIND):
        step = int(manifest.fields["global_step"])
        measured = rows.get((step, manifest.created)) or manifest.fields.get("metrics", {})
        found.append(Kept(uri=at, global_step=step, loss=measured.get(validations.LOSS)))
    return sorted(found, key=lambda each: each.global_step)


def best(found: Sequence[Kept]) -> Kept | None:
    """Return the one with the lowest validation loss, the earlier of two; None if none has one."""
    measured = [(each.loss, each) for each in found if each.loss is not None]
    return min(measured, key=lambda pair: pair[0])[1] if measured else None


def outdated(found: Sequence[Kept], *, keep: int, awaited: bool) -> list[str]:
    """Return the URIs of those that may go.

    Args:
        found: what there is, oldest first.
        keep: how many of the newest stay, beside the best.
        awaited: whether an evaluator has still to see those without a loss.
    """
    stay = {each.uri for each in found[-keep:]}
    if lowest := best(found):
        stay.add(lowest.uri)
    if awaited:
        stay |= {each.uri for each in [each for each in found if each.loss is None][-AWAITED:]}
    return [each.uri for each in found if each.uri not in stay]

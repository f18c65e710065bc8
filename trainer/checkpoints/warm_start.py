"""A warm start: a fresh run that begins with the weights of another checkpoint.

All weights and other state of the model are loaded. The global step and the optimizer are new; see
`docs/decisions/0027-a-warm-start-takes-the-model.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tensorflow as tf

from trainer import events
from trainer.checkpoints import checkpoints
from trainer.checkpoints.checkpoints import RestoredCheckpoint
from trainer.config.schema import CHAMPION
from trainer.errors import ConfigError, UserError

_KEY = "training.warm_start"
_MODEL = "model/"


def fetched(uri: str, scratch: Path) -> RestoredCheckpoint | None:
    """Fetch and verify the checkpoint to begin with; None where `uri` is empty.

    Raises:
        UserError: it is missing, damaged, or no checkpoint.
    """
    if not uri:
        return None
    if uri == CHAMPION:
        raise ConfigError(
            f"{_KEY}: the pipeline resolves the champion; give a task the URI of a checkpoint"
        )
    try:
        return checkpoints.fetch(uri, scratch / "warm")
    except UserError as error:
        raise UserError(f"{_KEY}: {error}") from None


def load(
    found: RestoredCheckpoint, variables: Mapping[str, tf.Variable], *, io_device: str | None
) -> None:
    """Assign the values of a checkpoint to the model among `variables`, and nothing else.

    Raises:
        UserError: the checkpoint is of another model; the line names the first difference.
    """
    own = {path: each for path, each in variables.items() if path.startswith(_MODEL)}
    _refuse_another(found, own)
    checkpoints.restore(found, own, io_device=io_device)
    events.emit(events.WarmStart(uri=found.uri))


def _refuse_another(found: RestoredCheckpoint, own: Mapping[str, tf.Variable]) -> None:
    there = {
        path: shape for path, shape in checkpoints.shapes(found).items() if path.startswith(_MODEL)
    }
    for path, variable in own.items():
        name, shape = path.removeprefix(_MODEL), variable.shape.as_list()
        if path not in there:
            _refuse(found, f"it has no {name} {shape}")
        if there[path] != shape:
            _refuse(found, f"{name} is {there[path]} there and {shape} in this model")
    for path in sorted(there.keys() - own.keys()):
        name = path.removeprefix(_MODEL)
        _refuse(found, f"it has {name} {there[path]}, which this model has not")


def _refuse(found: RestoredCheckpoint, what: str) -> None:
    raise UserError(
        f"{_KEY}: {found.uri} is the checkpoint of another model: {what}; name one of the same "
        "model section, or leave it empty"
    )

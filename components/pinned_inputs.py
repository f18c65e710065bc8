"""Inputs that a run looks up once, and pins for the time when it is resumed on this machine.

The newest version of a dataset and the champion may have changed by then. On a cluster nothing is
pinned: KFP passes the outputs of a finished step on to its successors, also when they are retried.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from components.locations import RUN_FOLDER
from trainer import events
from trainer.config.data import DataConfig
from trainer.config.initial_weights import CHAMPION, initial_weights
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.promotion.registry import champion_checkpoint

FILE = "pinned_inputs.json"


def with_champion(config: Config, root: str) -> Config:
    """Return the configuration with the champion's checkpoint for `champion` in its warm start.

    Without a champion the checkpoint is empty, and an event says that training begins from scratch.
    """
    training, name = config.training, config.name
    weights = initial_weights(training.warm_start)
    if weights.source != CHAMPION:
        return config
    uri = pin_once(f"champion of {name}", lambda: champion_checkpoint(root, name))
    if not uri:
        reason = f"{name} has no champion yet below {root}"
        events.emit(events.FromScratch(reason=reason))
    value = replace(weights, source=uri).value() if uri else ""
    return config.model_copy(update={"training": training.model_copy(update={"warm_start": value})})


def with_version(data: DataConfig) -> DataConfig:
    """Return the data section with the newest version if it names none.

    KFP's cache compares the section: with an empty version it would hide a newer dataset.
    """
    if data.version or data.source:
        return data
    from trainer.data import prepare

    with tempfile.TemporaryDirectory(prefix="flotilla-") as scratch:
        newest = prepare.newest_version(data, Path(scratch))
    events.emit(events.NewestVersion(dataset=data.name, version=newest))
    return data.model_copy(update={"version": newest})


def pinned(key: str) -> str:
    """Return the value that the run has pinned for `key`; empty if there is none."""
    return _read().get(key, "")


def pin(key: str, value: str) -> None:
    """Pin the value of `key` for this run; raises `UserError` if it cannot be written."""
    folder = os.environ.get(RUN_FOLDER)
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # An atomic commit: earlier values have to survive a full disk.
        part = Path(folder, f"{FILE}.part")
        part.write_text(json.dumps({**_read(), key: value}), encoding="utf-8")
        part.replace(Path(folder, FILE))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None


def pin_once(key: str, find: Callable[[], str]) -> str:
    """Return the value that the run has pinned for `key`; pin what `find` returns if none is."""
    values = _read()
    if key not in values:
        pin(key, values.setdefault(key, find()))
    return values[key]


def _read() -> dict[str, str]:
    folder = os.environ.get(RUN_FOLDER)
    if not folder:
        return {}
    try:
        tree = json.loads(Path(folder, FILE).read_text(encoding="utf-8"))
    # Nothing is pinned yet, or the file was damaged from outside.
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in tree.items()} if isinstance(tree, dict) else {}

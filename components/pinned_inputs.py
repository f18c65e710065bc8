"""Inputs that a run looks up once, and pins for the time when it is resumed on this machine.

The newest version of a dataset and the champion may have changed by then. On a cluster nothing is
pinned: KFP passes the outputs of a finished step on to its successors, also when they are retried.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from components.locations import RUN_FOLDER
from trainer import events
from trainer.config.data import SINCE_CHAMPION, DataConfig
from trainer.config.model import CHAMPION, initial_weights
from trainer.config.schema import Config
from trainer.data import listing
from trainer.errors import UserError
from trainer.promotion import trained
from trainer.promotion.registry import champion_checkpoint

FILE = "pinned_inputs.json"
#: Under which the digest of the listing is pinned.
FILES = "listing of data.source"
_log = logging.getLogger(__name__)


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


def with_listing(config: Config, root: str) -> Config:
    """Return the configuration with the digest of the chosen files as its `data.version`.

    The listing is kept below `root`, where preparing finds it: a file that comes meanwhile belongs
    to the next run.

    Raises:
        UserError: the source cannot be listed.
    """
    data = config.data
    if not data.source or data.version:
        return config
    version = pin_once(FILES, lambda: _listed(config, root))
    return config.model_copy(update={"data": data.model_copy(update={"version": version})})


def _listed(config: Config, root: str) -> str:
    data, before = config.data, trained.TrainedData(spans={})
    if data.spans == SINCE_CHAMPION:
        before = trained.of_champion(root, config.name)
    found = listing.list_source(data)
    taken = listing.chosen(found, data.spans, before.spans)
    spans = ", ".join(taken.spans)
    if before.version and found.spans and not spans:
        # What its files were is known, also where some are gone.
        _log.info("data.source: the champion was trained on all %d spans", len(found.spans))
        return before.version
    listing.publish(taken, root)
    events.emit(events.NewestVersion(dataset=data.source, version=taken.digest))
    _log.info(
        "data.source: %d files%s, listing %s",
        len(taken.files), f" of the spans {spans}" if spans else "", taken.digest,
    )  # fmt: skip
    return taken.digest


def finished_by(config: Config, root: str, run_id: str) -> str:
    """Return the earlier run that has finished with what this one would do; empty for none.

    Only files are compared: a dataset of TFDS changes with the image.
    """
    if not config.data.source:
        return ""
    trained.begin(config, root, run_id)
    if config.training.when_unchanged == "train":
        return ""
    return pin_once("run that has finished", lambda: trained.finished(config, root))


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

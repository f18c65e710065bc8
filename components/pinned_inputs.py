"""What a run settles once, and keeps when it is resumed on this machine.

The newest version of a dataset and the champion may be others by then. On a cluster nothing has to
be kept: the outputs of a step that is done are what its successors get, also when they are retried.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from components.locations import RUN_FOLDER
from trainer import events
from trainer.config.schema import CHAMPION, Config, DataConfig
from trainer.errors import UserError
from trainer.promotion.registry import champion_checkpoint

FILE = "settled.json"


def with_champion(config: Config, root: str) -> Config:
    """Return the configuration with the champion's checkpoint in place of the word for it.

    Without a champion it says in one line that training begins from scratch.
    """
    training, name = config.training, config.name
    if training.warm_start != CHAMPION:
        return config
    uri = once(f"champion of {name}", lambda: champion_checkpoint(root, name))
    if not uri:
        events.emit("from_scratch", reason=f"{name} has no champion yet below {root}")
    return config.model_copy(update={"training": training.model_copy(update={"warm_start": uri})})


def with_version(data: DataConfig) -> DataConfig:
    """Return the data section with the newest version where it names none.

    KFP reuses what was prepared from the same section: an empty version would hide a newer one.
    """
    if data.version:
        return data
    from trainer.data import prepare

    with tempfile.TemporaryDirectory(prefix="flotilla-") as scratch:
        newest = prepare.newest_version(data, Path(scratch))
    events.emit("newest_version", dataset=data.dataset, version=newest)
    return data.model_copy(update={"version": newest})


def known(key: str) -> str:
    """Return what the run has settled under `key`; empty where it has not."""
    return _read().get(key, "")


def keep(key: str, value: str) -> None:
    """Settle `key` for this run; raises `UserError` where that cannot be written."""
    folder = os.environ.get(RUN_FOLDER)
    if not folder:
        return
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        # In one piece: what was settled before has to outlive a full disk.
        part = Path(folder, f"{FILE}.part")
        part.write_text(json.dumps({**_read(), key: value}), encoding="utf-8")
        part.replace(Path(folder, FILE))
    except OSError as error:
        raise UserError(f"cannot write to {folder}: {error.strerror}") from None


def once(key: str, find: Callable[[], str]) -> str:
    """Return what the run has settled under `key`, and settle what `find` says where it has not."""
    settled = _read()
    if key not in settled:
        keep(key, settled.setdefault(key, find()))
    return settled[key]


def _read() -> dict[str, str]:
    folder = os.environ.get(RUN_FOLDER)
    if not folder:
        return {}
    try:
        tree = json.loads(Path(folder, FILE).read_text(encoding="utf-8"))
    # A run that died while it wrote has settled nothing.
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in tree.items()} if isinstance(tree, dict) else {}

"""Marks datasets and code bundles as in use, so that retention does not remove them.

A run writes `<root>/in_use/NAME/used.json` and then checks for a removal. A removal writes
`removing-*.json` and then checks for a use. Therefore at least one of the two detects the other.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.code import Bundle, publish
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.json_records import parse_mapping
from flotilla.trainer.storage.store import is_recent, wait_until

FOLDER = "in_use"
_USED, _REMOVING = "used.json", "removing"
# After this many seconds, an unfinished removal is considered abandoned.
_SECONDS = 600.0
_POLL_SECONDS = 0.5
# Rounding tolerance, in seconds, for timestamps that were converted to a `datetime` and back.
_ROUNDING = 1e-5


def use(uri: str) -> bool:
    """Mark the directory `<root>/<folder>/<name>` as used. Return whether it is still published."""
    folder = storage.parent_of(uri)
    root, path = storage.parent_of(folder), f"{storage.name_of(folder)}/{storage.name_of(uri)}"
    _write(root, path, _USED)
    # Wait for removals that started earlier. A removal that starts after this point finds the mark.
    wait_until(
        lambda: not any(_removals(root, path).values()),
        lambda: f"`flotilla gc`, which is about to remove {uri}, to end",
        _SECONDS,
        _POLL_SECONDS,
    )
    return storage.is_published(uri)


def publish_code(config: Config, folder: str | Path, root: str) -> tuple[Config, Bundle]:
    """Publish the user's code below `root`, mark it as used, and add it to the configuration."""
    bundle = publish(Path(folder), root)
    while not use(bundle.uri):
        # Publish the bundle again, because retention removed it in the meantime.
        bundle = publish(Path(folder), root)
    return config.model_copy(update={"code": bundle.uri}), bundle


def last_use(root: str, path: str) -> float:
    """Return the Unix time at which `path` below `root` was last used, or 0 if it never was.

    If the mark is unreadable or its time is in the future, the current time is returned.
    """
    now, at = time.time(), _mark_time(root, path, _USED)
    if isinstance(at, int | float):
        return min(float(at), now)
    return now if _USED in _marks(root, path) else 0.0


@contextmanager
def removing(root: str, path: str, seen: float) -> Iterator[bool]:
    """Announce a removal of `path`. Yield True if it was not used after the Unix time `seen`."""
    for mark, is_going_on in _removals(root, path).items():
        if not is_going_on:
            storage.delete(_place(root, path, mark))
    own = f"{_REMOVING}-{secrets.token_hex(8)}.json"
    _write(root, path, own)
    free = last_use(root, path) <= seen + _ROUNDING
    try:
        yield free
    finally:
        names = (_USED, own) if free else (own,)
        for name in names:
            storage.delete(_place(root, path, name))


def _removals(root: str, path: str) -> dict[str, bool]:
    removals = [mark for mark in _marks(root, path) if mark.startswith(_REMOVING)]
    return {mark: is_recent(_mark_time(root, path, mark), _SECONDS) for mark in removals}


def _marks(root: str, path: str) -> list[str]:
    return storage.names(storage.parent_of(_place(root, path, _USED)))


def _place(root: str, path: str, name: str) -> str:
    return storage.join(root, FOLDER, path.replace("/", "-"), name)


def _write(root: str, path: str, name: str) -> None:
    storage.write_bytes(_place(root, path, name), json.dumps({"at": time.time()}).encode())


def _mark_time(root: str, path: str, name: str) -> Any:
    try:
        return parse_mapping(storage.read_bytes(_place(root, path, name))).get("at")
    except (storage.Missing, storage.Corrupt, ValueError):
        return None

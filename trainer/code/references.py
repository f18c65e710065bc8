"""Which bundles are referred to: a note of each run and each schedule, for retention."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import suppress

from trainer import storage
from trainer.code.bundle import FOLDER
from trainer.errors import UserError
from trainer.storage.retry import in_parallel

#: The note of a run, in its folder, and the folder of those of schedules.
OF_RUN = "code.json"
OF_SCHEDULES = "code-of-schedules"


def of_run(root: str, run_id: str, bundle: str) -> None:
    """Note that a run uses a bundle, next to those before; raises `UserError`."""
    uri = storage.join(root, run_id, OF_RUN)
    with suppress(storage.Missing):
        if bundle in (noted := _bundles_in(storage.read_bytes(uri))):
            return
        storage.write_bytes(uri, _note([*noted, bundle]))
        return
    storage.write_bytes(uri, _note([bundle]))


def of_schedule(bundle: str, schedule: str) -> None:
    """Note that a schedule uses a bundle; `schedule` says which, on which instance."""
    storage.write_bytes(_place(bundle, schedule), _note([bundle]))


def forget_schedule(bundle: str, schedule: str) -> None:
    """Remove the note of a schedule; a store that refuses only keeps the bundle."""
    with suppress(UserError):
        storage.delete(_place(bundle, schedule))


def referred(root: str) -> set[str]:
    """Return the names of the bundles that a run or a schedule refers to; raises `UserError`."""
    found = in_parallel(_read, list(_notes(root)))
    return {storage.name_of(uri) for uris in found for uri in uris}


def _notes(root: str) -> Iterator[str]:
    for name in storage.names(root):
        if name == OF_SCHEDULES:
            above = storage.join(root, name)
            yield from (storage.join(above, each) for each in storage.names(above))
        elif name != FOLDER:
            yield storage.join(root, name, OF_RUN)


def _read(place: str) -> list[str]:
    with suppress(storage.Missing, storage.Corrupt):
        return _bundles_in(storage.read_bytes(place))
    return []


def _bundles_in(data: bytes) -> list[str]:
    try:
        tree = json.loads(data)
    except ValueError:
        return []
    found = tree.get("bundles", []) if isinstance(tree, dict) else []
    return [each for each in found if isinstance(each, str)]


def _note(bundles: list[str]) -> bytes:
    return json.dumps({"bundles": bundles}).encode()


def _place(bundle: str, schedule: str) -> str:
    root = storage.parent_of(storage.parent_of(bundle))
    name = hashlib.sha256(f"{schedule}\n{bundle}".encode()).hexdigest()[:24]
    return storage.join(root, OF_SCHEDULES, f"{name}.json")

"""The replay that this process belongs to: storage as it was at a time, and a folder to write to.

`FLOTILLA_REPLAY` names a folder with `replay.json`. Below it, in `storage`, is a mirror of the
storage root: what a replay writes goes there, and nothing at all to the root itself. Every process
of a replay inherits the variable. `trainer.storage.replays.overlay` is the store.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer.errors import UserError
from trainer.json_records import from_tree

VARIABLE = "FLOTILLA_REPLAY"
FILE = "replay.json"
STORAGE = "storage"


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What a replay sees of a storage root.

    Attributes:
        root: the URI of the root, as the run has known it.
        source: the URI by which this machine reads it, which may have another endpoint.
        until: the time of the step, as a manifest writes it: what was published later is not seen.
        hidden: patterns of paths below the root that are not seen either, as `fnmatch` has them.
        path: of a root in the file system its path, else empty.
    """

    root: str
    source: str
    until: str
    hidden: tuple[str, ...] = ()
    path: str = ""


@dataclass(frozen=True, kw_only=True)
class Replay:
    """The snapshot and the folder of a replay.

    With `in_process` training is one process, that of the step: for a debugger.
    """

    snapshot: Snapshot
    folder: Path
    in_process: bool = False

    @property
    def mirror(self) -> Path:
        """The folder that has what is written, and what was fetched."""
        return self.folder / STORAGE

    def placed(self, path: Path) -> Path:
        """Return where a path of this machine is: one below the root is in the mirror."""
        if not self.snapshot.path or path.is_relative_to(self.folder):
            return path
        root = Path(self.snapshot.path)
        return self.mirror / path.relative_to(root) if path.is_relative_to(root) else path


def current() -> Replay | None:
    """Return the replay of this process; None where it is none.

    Raises:
        UserError: the folder of the replay was damaged or removed.
    """
    folder = os.environ.get(VARIABLE)
    return _read(folder) if folder else None


def write(folder: Path, snapshot: Snapshot, more: Mapping[str, Any]) -> None:
    """Write `replay.json`; `more` are further keys for the process of the step."""
    text = json.dumps({**more, "snapshot": vars(snapshot)}, indent=2)
    (folder / FILE).write_text(text, encoding="utf-8")


@lru_cache(maxsize=4)
def _read(folder: str) -> Replay:
    try:
        tree = json.loads(Path(folder, FILE).read_text(encoding="utf-8"))
        snapshot = from_tree(Snapshot, tree.get("snapshot"))
    except (OSError, ValueError, AttributeError):
        snapshot = None
    if snapshot is None:
        raise UserError(f"{VARIABLE}: {folder} has no readable {FILE}; replay the step again")
    in_process = tree.get("in_process") is True
    return Replay(snapshot=snapshot, folder=Path(folder), in_process=in_process)


def moment(seconds: float) -> str:
    """Return seconds since 1970 as a manifest writes the time."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")

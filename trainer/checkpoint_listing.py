"""Which checkpoints of a run are published, without opening one."""

from __future__ import annotations

from trainer import storage
from trainer.errors import UserError

KIND = "checkpoint"


def listed(uri: str) -> list[tuple[str, int]]:
    """Return URI and global step of every published checkpoint below `uri`, oldest first."""
    found = [(at, int(m.fields["global_step"])) for at, m in storage.published(uri, KIND)]
    return sorted(found, key=lambda pair: pair[1])


def newest(uri: str) -> tuple[str, int]:
    """Return URI and global step of the newest published checkpoint; raises `UserError`."""
    found = listed(uri)
    if not found:
        raise UserError(f"no checkpoint is published below {uri}")
    return found[-1]

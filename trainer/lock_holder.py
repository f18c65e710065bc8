"""Who holds the lock of a checkpoint folder, as it stands in the store. Free of TensorFlow."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from trainer import storage
from trainer.errors import UserError
from trainer.storage.writer import is_gone, is_living

FOLDER = ".lock"
LASTS = 120.0
# A holder that is cut off from the store, or whose clock is wrong, may still train. An expired
# lock stands in nobody's way, and may wait.
ABANDONED = 24 * 3600.0
_SUFFIX = ".json"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds a lock.

    Attributes:
        token: of this holder alone.
        job: the job whose lives share the lock, or empty.
        run: the id of the run.
        host: the machine, for people.
        process: its number there.
        writer: the process, machine and beginning included; empty where the system does not tell.
        started: when the lock was taken, in seconds since 1970.
        renewed: when it was renewed last.
        released: whether it was given back.
    """

    token: str
    job: str
    run: str
    host: str
    process: int
    writer: str
    started: float
    renewed: float
    released: bool = False

    @property
    def until(self) -> float:
        """When the lock expires, unless it is renewed."""
        return self.renewed + LASTS

    @property
    def is_abandoned(self) -> bool:
        """Whether its file may go: what was given back stays as long as what nobody renews.

        Until then its number is in nobody else's hands, who could be taken for its holder.
        """
        if self.is_gone and not self.released:
            return True
        return time.time() >= self.until + ABANDONED

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended: a process of this machine."""
        with suppress(OSError):
            return bool(self.writer) and is_gone(self.writer)
        return False

    @property
    def is_living(self) -> bool:
        """Whether it is known to live: a process of this machine."""
        with suppress(OSError):
            return bool(self.writer) and is_living(self.writer)
        return False

    def __str__(self) -> str:
        """Say who it is."""
        return f"run {self.run} (process {self.process} on {self.host})"


class HeldError(UserError):
    """Another job writes to the folder `uri`."""

    def __init__(self, uri: str, holder: Holder) -> None:
        """Say who it is, and until when at least."""
        super().__init__(
            f"{holder} writes to {uri} since {clock(holder.started)}, and holds its lock until "
            f"{clock(holder.until)} at least: wait for its end, or stop it; if it is dead already, "
            "try again after that time"
        )
        self.uri = uri
        self.holder = holder


def holders(uri: str) -> dict[int, Holder | None]:
    """Return the holders below the folder `uri` by number; None for one that cannot be read."""
    found = {}
    for name in storage.names(storage.join(uri, FOLDER)):
        if name.removesuffix(_SUFFIX).isdigit():
            with suppress(storage.Missing):
                data = storage.read_bytes(storage.join(uri, FOLDER, name))
                found[int(name.removesuffix(_SUFFIX))] = _holder(data)
    return found


def remove_expired(uri: str) -> list[str]:
    """Remove what dead or unreadable holders left, or is a day old; return the URIs."""
    over = [
        place(uri, number)
        for number, holder in holders(uri).items()
        if holder is None or holder.is_abandoned
    ]
    for each in over:
        storage.delete(each)
    return over


def place(uri: str, number: int) -> str:
    """Return the URI of the lock with a number, of the folder `uri`."""
    return storage.join(uri, FOLDER, f"{number:06d}{_SUFFIX}")


def _holder(data: bytes) -> Holder | None:
    try:
        found = Holder(**json.loads(data))
        times = float(found.started), float(found.renewed)
        return replace(found, started=times[0], renewed=times[1])
    except (ValueError, TypeError):
        return None


def clock(seconds: float) -> str:
    """Return a time, in seconds since 1970, as people read it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

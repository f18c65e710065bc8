"""What containers have written, line by line with nanoseconds, each start of a container apart."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime


def stamp(nanoseconds: int) -> str:
    """Return a time as the kubelet writes it before a line."""
    whole = datetime.fromtimestamp(nanoseconds // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{nanoseconds % 10**9:09d}Z"


@dataclass(kw_only=True)
class ContainerLog:
    """The log of one start of a container; `ended` once nothing more comes."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    ended: bool = False


class Logs:
    """The logs by the uid of the pod and the number of the start."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._logs: dict[tuple[str, int], ContainerLog] = {}

    def of(self, uid: str, start: int) -> ContainerLog:
        with self._changed:
            return self._logs.setdefault((uid, start), ContainerLog())

    def write(self, uid: str, start: int, text: str, at: int | None = None) -> None:
        with self._changed:
            self.of(uid, start).lines.append((time.time_ns() if at is None else at, text))
            self._changed.notify_all()

    def end(self, uid: str, start: int) -> None:
        with self._changed:
            self.of(uid, start).ended = True
            self._changed.notify_all()

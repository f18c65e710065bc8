"""Container logs: lines with nanosecond timestamps, and a separate log after each restart."""

import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime


def stamp(nanoseconds: int) -> str:
    """Return a time in the format that the kubelet writes at the beginning of each line."""
    whole = datetime.fromtimestamp(nanoseconds // 10**9, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{whole}.{nanoseconds % 10**9:09d}Z"


@dataclass(kw_only=True)
class ContainerLog:
    """A container's log between two restarts; a `lost` log has been deleted from its node."""

    lines: list[tuple[int, str]] = field(default_factory=list)
    ended: bool = False
    lost: bool = False
    asked: bool = False


class Logs:
    """All logs, by the pod's UID and the container's restart count."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._logs: dict[tuple[str, int], ContainerLog] = {}

    def of(self, uid: str, restarts: int) -> ContainerLog:
        with self._changed:
            return self._logs.setdefault((uid, restarts), ContainerLog())

    def write(self, uid: str, restarts: int, text: str, at: int | None = None) -> None:
        with self._changed:
            self.of(uid, restarts).lines.append((time.time_ns() if at is None else at, text))
            self._changed.notify_all()

    def ask(self, uid: str, restarts: int) -> ContainerLog:
        with self._changed:
            found = self.of(uid, restarts)
            found.asked = True
            self._changed.notify_all()
            return found

    def is_asked(self, uid: str) -> bool:
        with self._changed:
            return any(log.asked for (pod, _), log in self._logs.items() if pod == uid)

    def end(self, uid: str, restarts: int) -> None:
        with self._changed:
            self.of(uid, restarts).ended = True
            self._changed.notify_all()

    def lose(self, uid: str, restarts: int) -> None:
        """Delete a log's file, as the node does when it garbage-collects a container."""
        with self._changed:
            self.of(uid, restarts).lost = True

"""Faults that a test injects into an API server, of Kubernetes or of KFP."""

import re
import threading
from dataclasses import dataclass, field

# Statuses of a fault that sends no response until the server stops, and of one that sends a byte
# from time to time (only from KFP).
SILENCE, TRICKLE = -1, -2


@dataclass(kw_only=True)
class Fault:
    """A faulty response, sent `times` times to requests that match `pattern`.

    The pattern is a regular expression that is searched in `METHOD /path?query`. Status 0 closes
    the connection without a response. A `late` fault first executes the request. If the fault
    `echoes`, Kubernetes' message contains the headers of the request. KFP responds with `body`.
    """

    pattern: str
    status: int
    times: int = 10**9
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    late: bool = False
    echoes: bool = False


class Faults:
    """All faults of a server; `hits` counts the requests that matched each pattern."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self._faults: list[Fault] = []
        self.hits: dict[str, int] = {}
        self.down = False

    def add(self, pattern: str, status: int, **more: object) -> Fault:
        fault = Fault(pattern=pattern, status=status, **more)  # type: ignore[arg-type]
        with self._changed:
            self._faults.append(fault)
        return fault

    def clear(self) -> None:
        with self._changed:
            self._faults.clear()
            self.down = False

    def of(self, request: str) -> Fault | None:
        with self._changed:
            if self.down:
                self._count("down")
                return Fault(pattern="down", status=0)
            for fault in self._faults:
                if fault.times > 0 and re.search(fault.pattern, request):
                    fault.times -= 1
                    self._count(fault.pattern)
                    return fault
        return None

    def _count(self, pattern: str) -> None:
        self.hits[pattern] = self.hits.get(pattern, 0) + 1
        self._changed.notify_all()

"""Faults that a test injects into an instance."""

import re
import threading
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class Fault:
    """A faulty response, sent `times` times to requests that match `pattern`.

    The pattern is a regular expression that is searched in `METHOD /path?query`. Status 0 closes
    the connection without a response, -1 sends nothing until the server ends, and -2 sends a byte
    from time to time. A `late` fault first executes the request.
    """

    pattern: str
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 10**9
    late: bool = False


class Faults:
    """All faults of a server; `met` counts the requests that matched each pattern."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self.met: dict[str, int] = {}

    def add(self, pattern: str, status: int, **more: object) -> None:
        with self._lock:
            self._faults.append(Fault(pattern=pattern, status=status, **more))  # type: ignore[arg-type]

    def clear(self) -> None:
        with self._lock:
            self._faults.clear()

    def of(self, request: str) -> Fault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times > 0 and re.search(fault.pattern, request):
                    fault.times -= 1
                    self.met[fault.pattern] = self.met.get(fault.pattern, 0) + 1
                    return fault
        return None

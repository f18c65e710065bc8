"""Threads of this process: how many libraries may start, and a thread that calls a function.

By default, libraries start one thread for each processor of the machine. In a container that is
limited to one CPU, these threads quickly use up the quota and are throttled. See "CFS Bandwidth
Control" in the Linux kernel documentation. The functions here respect CPU affinity and container
limits.
"""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Self

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# These variables limit TensorFlow's intra-op threads, and the threads of NumPy, SciPy and Arrow.
# Inter-op threads are not limited, because some of them only wait for others.
_THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
_LIMITED: dict[str, str] = {}


def affinity() -> list[int]:
    """Return the numbers of the processors that this process may run on, or [] if unknown."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def usable() -> int:
    """Return how many processors this process may use, rounded up and at least 1."""
    return max(1, min([present(), *(math.ceil(limit) for limit in _limits())]))


def present() -> int:
    """Return the number of processors that this process may run on, regardless of its quota."""
    return len(affinity()) or os.cpu_count() or 1


def limit_threads() -> None:
    """Make libraries that are loaded later start at most `usable` threads."""
    count = usable()
    if count == present():
        return
    for name in _THREADS:
        if os.environ.get(name) in (None, _LIMITED.get(name)):
            os.environ[name] = _LIMITED[name] = str(count)


def environment() -> dict[str, str]:
    """Return the environment for child processes, without the limits that `limit_threads` set."""
    return {name: value for name, value in os.environ.items() if _LIMITED.get(name) != value}


def _limits() -> Iterator[float]:
    for folder in _folders():
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            if quota != "max":
                yield int(quota) / int(period)
        # In cgroups v1, -1 means no limit.
        with suppress(OSError, ValueError, ZeroDivisionError):
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            quota, period = ((folder / name).read_text(encoding="ascii") for name in names)
            if int(quota) > 0:
                yield int(quota) / int(period)


def _folders() -> Iterator[Path]:
    """Yield the cgroup folder of this process and its parents, some of which may not exist."""
    with suppress(OSError):
        for line in os.fsdecode(_OWN.read_bytes()).split("\n"):
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            if controllers and "cpu" not in controllers.split(","):
                continue
            # In cgroups v1, the folder may be named after two controllers, as in `cpu,cpuacct`.
            for name in {controllers, "cpu"} if controllers else {""}:
                own = _ROOT / name / path.lstrip("/")
                yield from (each for each in (own, *own.parents) if each.is_relative_to(_ROOT))


log = logging.getLogger(__name__)


class Loop:
    """A loop that calls a function at an interval until it returns False or `stop` is called."""

    def __init__(
        self, work: Callable[[], object], seconds: float, *, name: str, failing: str
    ) -> None:
        """Store the arguments. The first of repeated errors is logged with the prefix `failing`."""
        self._work, self._seconds, self._failing = work, seconds, failing
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether the loop was stopped or has ended."""
        return self._over.is_set()

    def start(self) -> Self:
        """Start the thread. The first call follows after one interval."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Stop calling the function. A call in progress may finish."""
        self._over.set()

    def join(self) -> None:
        """After `stop`, wait for the call in progress to finish."""
        self._thread.join()

    def _run(self) -> None:
        is_said = False
        while not self._over.wait(self._seconds):
            try:
                if self._work() is False:
                    self._over.set()
                is_said = False
            except Exception as error:
                if not is_said and not self._over.is_set():
                    log.warning("%s: %s", self._failing, error)
                is_said = True

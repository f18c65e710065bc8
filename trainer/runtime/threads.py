"""The number of threads that libraries may start in this process.

By default, libraries start one thread for each processor of the machine. In a container that is
limited to one CPU, these threads quickly use up the quota and are throttled. See "CFS Bandwidth
Control" in the Linux kernel documentation. The functions here respect CPU affinity and container
limits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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

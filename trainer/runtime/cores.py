"""How many processors this process may use: those it may run on, and the limit of its container.

Libraries start a thread for each processor of a machine. A container with a limit of one uses that
up in a moment, and then stands still: see "CFS Bandwidth Control" in the documents of Linux.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# TensorFlow's threads for one operation, and those of NumPy, SciPy and Arrow. Threads between
# operations stay: some of them only wait for others.
_THREADS = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
# What `limit_threads` has set them to.
_LIMITED: dict[str, str] = {}


def affinity() -> list[int]:
    """Return the numbers of the processors that this process may run on; none where unknown."""
    # Not every system says it.
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def usable() -> int:
    """Return of how many processors this process may use the time, rounded up; at least 1."""
    return max(1, min([present(), *(math.ceil(limit) for limit in _limits())]))


def present() -> int:
    """Return on how many processors this process may run, whatever it may use of their time."""
    return len(affinity()) or os.cpu_count() or 1


def limit_threads() -> None:
    """Let libraries that are loaded later start no more threads than `usable`."""
    count = usable()
    if count == present():
        return
    for name in _THREADS:
        if os.environ.get(name) in (None, _LIMITED.get(name)):
            os.environ[name] = _LIMITED[name] = str(count)


def environment() -> dict[str, str]:
    """Return the environment for processes that share this one's processors: without its limits."""
    return {name: value for name, value in os.environ.items() if _LIMITED.get(name) != value}


def _limits() -> Iterator[float]:
    """Yield the limits of this process's control groups, in processors."""
    for folder in _folders():
        with suppress(OSError, ValueError, ZeroDivisionError):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            if quota != "max":
                yield int(quota) / int(period)
        # Version 1, where no limit is -1.
        with suppress(OSError, ValueError, ZeroDivisionError):
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            quota, period = ((folder / name).read_text(encoding="ascii") for name in names)
            if int(quota) > 0:
                yield int(quota) / int(period)


def _folders() -> Iterator[Path]:
    """Yield the folders of the groups and of those above; a container may see its own as `/`."""
    with suppress(OSError):
        for line in os.fsdecode(_OWN.read_bytes()).split("\n"):
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            if controllers and "cpu" not in controllers.split(","):
                continue
            # The folder of version 1 may have both names.
            for name in {controllers, "cpu"} if controllers else {""}:
                own = _ROOT / name / path.lstrip("/")
                yield from (each for each in (own, *own.parents) if each.is_relative_to(_ROOT))

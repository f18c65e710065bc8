"""How many processors this process may use: those it may run on, and the limit of its container.

TensorFlow and OpenBLAS start a thread for each processor that they may run on, which are all of a
machine. A container that is limited to the time of one (`limits.cpu` of a pod) uses that up in a
moment, with all threads at once, and then stands still for the rest of each tenth of a second: see
"CFS Bandwidth Control" in the documents of Linux.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# TensorFlow's threads for one operation, and those of NumPy and SciPy. Threads between operations
# stay: some of them only wait for others.
_THREADS = ("TF_NUM_INTRAOP_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
# Those that this process has set, and not whoever started it.
_LIMITED: set[str] = set()


def affinity() -> list[int]:
    """Return the numbers of the processors that this process may run on; none where unknown."""
    # Not every system says it.
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def usable() -> int:
    """Return of how many processors this process may use the time, rounded up; at least 1."""
    count = len(affinity()) or os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(limit) for limit in _limits())]))


def limit_threads() -> None:
    """Let libraries that are loaded later start no more threads than `usable`, where it is less.

    What the environment says already stays.
    """
    count = usable()
    if count < (len(affinity()) or os.cpu_count() or 1):
        _LIMITED.update(name for name in _THREADS if name not in os.environ)
        os.environ.update(dict.fromkeys(_LIMITED, str(count)))


def environment() -> dict[str, str]:
    """Return the environment for processes that share this one's processors: without its limits."""
    return {name: value for name, value in os.environ.items() if name not in _LIMITED}


def _limits() -> Iterator[float]:
    """Yield the limits of this process's control groups, in processors."""
    for folder in _folders():
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            if quota != "max":
                yield int(quota) / int(period)
        # Version 1, where no limit is -1.
        with suppress(OSError, ValueError):
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            quota, period = ((folder / name).read_text(encoding="ascii") for name in names)
            if int(quota) > 0:
                yield int(quota) / int(period)


def _folders() -> Iterator[Path]:
    """Yield the folders of the groups and of those above; a container may see its own as `/`."""
    with suppress(OSError):
        for line in _OWN.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            own = _ROOT / controllers / path.lstrip("/")
            yield from (each for each in (own, *own.parents) if each.is_relative_to(_ROOT))

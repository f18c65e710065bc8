"""The injection of faults into a run: signals, files, limits of the kernel."""

from __future__ import annotations

import random
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.chaos.plan import Fault

# The free space of a full disk, less than any checkpoint.
ROOM = 4096


class Target:
    """The processes and files of one run."""

    def __init__(self, cluster: Path, published: Path, draw: random.Random) -> None:
        """Use the folders of the tasks and of the published checkpoints, and a random generator."""
        self._cluster = cluster
        self._published = published
        self.draw = draw
        self.torn: set[Path] = set()
        self._timers: list[threading.Timer] = []

    def task(self, name: str) -> psutil.Process | None:
        """Return the process of a task, or None while it has none."""
        config = str(self._cluster / name / "config.json")
        for process in psutil.process_iter():
            try:
                if config in process.cmdline():
                    return process
            except psutil.Error:
                continue
        return None

    def checkpoints(self) -> list[Path]:
        """Return the data files of the published checkpoints, oldest first."""
        return sorted(self._published.glob("step-*/variables.data-*"))

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after some seconds, unless the run has ended before."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def cancel(self) -> None:
        """Cancel all calls that are still to come."""
        for timer in self._timers:
            timer.cancel()


def inject(fault: Fault, target: Target) -> str:
    """Inject a fault; return what came of it, in a few words."""
    try:
        return FAULTS[fault.kind](fault, target)
    except psutil.NoSuchProcess:
        return "it was gone before"


def _kill(fault: Fault, target: Target) -> str:
    return _signal(fault, target, signal.SIGKILL)


def _stop(fault: Fault, target: Target) -> str:
    return _signal(fault, target, signal.SIGSTOP)


def _pause(fault: Fault, target: Target) -> str:
    process = target.task(fault.task)
    if process is None:
        return "it was not there"
    process.send_signal(signal.SIGSTOP)

    def go_on() -> None:
        if process.is_running():
            process.send_signal(signal.SIGCONT)

    target.later(fault.seconds, go_on)
    return "done"


def _signal(fault: Fault, target: Target, number: signal.Signals) -> str:
    process = target.task(fault.task)
    if process is None:
        return "it was not there"
    process.send_signal(number)
    return "done"


def _full_disk(_fault: Fault, target: Target) -> str:
    """Limit the size of the leader's files; a later process has no such limit."""
    process = target.task("chief-0") or target.task("worker-0")
    if process is None:
        return "nobody was there to write"
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, hard))
    return "done"


def _torn_file(_fault: Fault, target: Target) -> str:
    """Damage the newest checkpoint, and kill the leader, which has to find another one."""
    published = target.checkpoints()
    if not published:
        return "there was no checkpoint"
    path = published[-1]
    data = bytearray(path.read_bytes())
    if target.draw.random() < 0.5:
        del data[len(data) // 2 :]
    else:
        data[target.draw.randrange(len(data))] ^= 1 << target.draw.randrange(8)
    path.write_bytes(data)
    target.torn.add(path.parent)
    leader = target.task("chief-0") or target.task("worker-0")
    if leader:
        leader.kill()
    return path.parent.name


FAULTS: dict[str, Callable[[Fault, Target], str]] = {
    "kill": _kill,
    "stop": _stop,
    "pause": _pause,
    "full disk": _full_disk,
    "torn file": _torn_file,
}

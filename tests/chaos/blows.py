"""What can be done to a run, and is really done: signals, files, limits of the kernel."""

from __future__ import annotations

import random
import resource
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.chaos.plan import Blow

# Less than any checkpoint: what the disk has left.
ROOM = 4096


class Ground:
    """Where blows fall: the processes and files of one run."""

    def __init__(self, cluster: Path, published: Path, draw: random.Random) -> None:
        """Know the folders of the tasks and of the checkpoints; `draw` where there is a choice."""
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
        """Do something after a while, unless the run has ended before."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def leave(self) -> None:
        """Do nothing of it any more."""
        for timer in self._timers:
            timer.cancel()


def strike(blow: Blow, ground: Ground) -> str:
    """Do it; return what came of it, in a few words."""
    try:
        return BLOWS[blow.kind](blow, ground)
    except psutil.NoSuchProcess:
        return "it was gone before"


def _kill(blow: Blow, ground: Ground) -> str:
    return _signal(blow, ground, signal.SIGKILL)


def _stop(blow: Blow, ground: Ground) -> str:
    return _signal(blow, ground, signal.SIGSTOP)


def _pause(blow: Blow, ground: Ground) -> str:
    process = ground.task(blow.task)
    if process is None:
        return "it was not there"
    process.send_signal(signal.SIGSTOP)

    def go_on() -> None:
        if process.is_running():
            process.send_signal(signal.SIGCONT)

    ground.later(blow.seconds, go_on)
    return "done"


def _signal(blow: Blow, ground: Ground, number: signal.Signals) -> str:
    process = ground.task(blow.task)
    if process is None:
        return "it was not there"
    process.send_signal(number)
    return "done"


def _full_disk(_blow: Blow, ground: Ground) -> str:
    """Let no file of the leader grow any more; a later process has room again."""
    process = ground.task("chief-0") or ground.task("worker-0")
    if process is None:
        return "nobody was there to write"
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, hard))
    return "done"


def _torn_file(_blow: Blow, ground: Ground) -> str:
    """Tear the newest checkpoint, and kill the leader, which has to find another one."""
    published = ground.checkpoints()
    if not published:
        return "there was no checkpoint"
    path = published[-1]
    data = bytearray(path.read_bytes())
    if ground.draw.random() < 0.5:
        del data[len(data) // 2 :]
    else:
        data[ground.draw.randrange(len(data))] ^= 1 << ground.draw.randrange(8)
    path.write_bytes(data)
    ground.torn.add(path.parent)
    leader = ground.task("chief-0") or ground.task("worker-0")
    if leader:
        leader.kill()
    return path.parent.name


BLOWS: dict[str, Callable[[Blow, Ground], str]] = {
    "kill": _kill,
    "stop": _stop,
    "pause": _pause,
    "full disk": _full_disk,
    "torn file": _torn_file,
}

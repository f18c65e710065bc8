"""The injection of faults into a run: signals, files, limits of the kernel."""

from __future__ import annotations

import random
import resource
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.plan import OUTAGES, Fault
from tests.chaos.stores import Store
from trainer import storage

# The free space of a full disk, less than any checkpoint.
ROOM = 4096


class MissedError(Exception):
    """What a fault was to hit is not there."""


class Target:
    """The processes and files of one run."""

    def __init__(
        self,
        folder: Path,
        store: Store,
        draw: random.Random,
        launcher: subprocess.Popen[bytes],
    ) -> None:
        """Use the folder of the run, its store, a random generator, and the command line."""
        self._cluster = folder / "cluster"
        self._run_id = folder.name
        self.lie = lie_of(folder.parent)
        self.store = store
        self.draw = draw
        self.launcher = launcher
        self.torn: set[str] = set()
        self._timers: list[threading.Timer] = []

    def task(self, name: str) -> psutil.Process:
        """Return the process of a task."""
        config = str(self._cluster / name / "config.json")
        for process in psutil.process_iter():
            try:
                if config in process.cmdline():
                    return process
            except psutil.Error:
                continue
        raise MissedError(f"{name} was not there")

    def leader(self) -> psutil.Process:
        """Return the process of the task that leads."""
        try:
            return self.task("chief-0")
        except MissedError:
            return self.task("worker-0")

    def checkpoints(self) -> list[str]:
        """Return the data files of the published checkpoints, oldest first."""
        names = self.store.names(f"{self._run_id}/checkpoints")
        return [name for name in names if "/variables.data-" in name]

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


def lie_of(workdir: Path) -> Path:
    """Return the file by which a process is told to lie."""
    return workdir / "lie"


def inject(fault: Fault, target: Target) -> str:
    """Inject a fault; return what came of it, in a few words; raises `MissedError`."""
    try:
        return FAULTS[fault.kind](fault, target) or "done"
    except psutil.NoSuchProcess:
        raise MissedError("it was gone before") from None


def _kill(fault: Fault, target: Target) -> None:
    """Kill a task, or two at once."""
    for process in [target.task(name) for name in fault.tasks()]:
        process.kill()


def _stop(fault: Fault, target: Target) -> None:
    target.task(fault.task).suspend()


def _pause(fault: Fault, target: Target) -> None:
    process = target.task(fault.task)
    process.suspend()

    def go_on() -> None:
        if process.is_running():
            process.resume()

    target.later(fault.seconds, go_on)


def _full_disk(_fault: Fault, target: Target) -> None:
    """Limit the size of the leader's files; a later process has no such limit."""
    process = target.leader()
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, hard))


def _torn_file(_fault: Fault, target: Target) -> str:
    """Damage the newest checkpoint, and kill the leader, which has to find another one."""
    published = target.checkpoints()
    if not published:
        raise MissedError("there was no checkpoint")
    name = published[-1]
    data = bytearray(target.store.read(name))
    if target.draw.random() < 0.5:
        del data[len(data) // 2 :]
    else:
        data[target.draw.randrange(len(data))] ^= 1 << target.draw.randrange(8)
    target.store.write(name, bytes(data))
    checkpoint = name.rpartition("/")[0]
    target.torn.add(storage.join(target.store.root, *checkpoint.split("/")))
    with suppress(MissedError):
        target.leader().kill()
    return checkpoint.rpartition("/")[2]


def _kill_launcher(_fault: Fault, target: Target) -> None:
    target.launcher.kill()


def _lie(_fault: Fault, target: Target) -> None:
    """Have the leader end with exit code 0."""
    written = target.lie.with_suffix(".part")
    written.write_text(str(target.leader().pid), encoding="utf-8")
    written.rename(target.lie)


def _outage(fault: Fault, target: Target) -> None:
    target.store.close_for(fault.seconds, silent=fault.silent)


FAULTS: dict[str, Callable[[Fault, Target], str | None]] = {
    "kill": _kill,
    "kill pair": _kill,
    "stop": _stop,
    "pause": _pause,
    "full disk": _full_disk,
    "torn file": _torn_file,
    "kill launcher": _kill_launcher,
    "lie": _lie,
    **dict.fromkeys(OUTAGES, _outage),
}

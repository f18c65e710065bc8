"""Injects faults into a run: signals, damaged files, and kernel limits."""

import random
import resource
import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import is_data
from flotilla.trainer.storage.manifest import MANIFEST, Manifest
from tests.chaos.plan import OUTAGES, Fault
from tests.chaos.stores import Store

# Maximum size of a file on a full disk, in bytes; too small for any checkpoint.
ROOM = 4096


class MissedError(Exception):
    """The target of a fault does not exist."""


class Target:
    """The processes and files of one run."""

    def __init__(
        self, folder: Path, store: Store, draw: random.Random, launcher: subprocess.Popen[bytes]
    ) -> None:
        self._cluster = folder / "cluster"
        self._run_id = folder.name
        self.lie = lie_of(folder.parent)
        self.store = store
        self.draw = draw
        self.launcher = launcher
        self.torn: set[str] = set()
        self._timers: list[threading.Timer] = []

    def task(self, name: str) -> psutil.Process:
        config = str(self._cluster / name / "config.json")
        for process in psutil.process_iter():
            try:
                if config in process.cmdline():
                    return process
            except psutil.Error:
                continue
        raise MissedError(f"{name} was not there")

    def leader(self) -> psutil.Process:
        try:
            return self.task("chief-0")
        except MissedError:
            return self.task("worker-0")

    def checkpoints(self) -> list[str]:
        """Return the URIs of the published checkpoints, oldest first."""
        names = self.store.names(f"{self._run_id}/checkpoints")
        folders = [name.rpartition("/")[0] for name in names if name.endswith(f"/{MANIFEST}")]
        # In a file system, the names include those of unpublished checkpoints in hidden folders.
        published = [each for each in folders if not each.rpartition("/")[2].startswith(".")]
        return [storage.join(self.store.root, *each.split("/")) for each in published]

    def manifest_of(self, checkpoint: str) -> Manifest:
        """Return the manifest of a published checkpoint, even while runs cannot reach the store."""
        return Manifest.from_json(self.store.read(self.name_of(checkpoint, MANIFEST)), checkpoint)

    def name_of(self, checkpoint: str, path: str) -> str:
        return f"{self._run_id}/checkpoints/{storage.name_of(checkpoint)}/{path}"

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after some seconds, unless the run has ended by then."""
        timer = threading.Timer(seconds, action)
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def cancel(self) -> None:
        for timer in self._timers:
            timer.cancel()


def lie_of(workdir: Path) -> Path:
    """Return the file that names the process that is to exit early with code 0."""
    return workdir / "lie"


def inject(fault: Fault, target: Target) -> str:
    """Inject a fault and return a short description of its effect; raises `MissedError`."""
    try:
        return FAULTS[fault.kind](fault, target) or "done"
    except psutil.NoSuchProcess:
        raise MissedError("it was gone before") from None


def _kill(fault: Fault, target: Target) -> None:
    for process in [target.task(name) for name in fault.tasks()]:
        process.kill()


def _stop(fault: Fault, target: Target) -> None:
    target.task(fault.task).suspend()


def _pause(fault: Fault, target: Target) -> None:
    process = target.task(fault.task)
    process.suspend()

    def go_on() -> None:
        with suppress(psutil.NoSuchProcess):
            process.resume()

    target.later(fault.seconds, go_on)


def _full_disk(fault: Fault, target: Target) -> None:
    """Limit the size of files that a task or the leader writes, until that process restarts."""
    process = target.task(fault.task) if fault.task else target.leader()
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (ROOM, hard))


def _torn_file(_fault: Fault, target: Target) -> str:
    """Damage the newest checkpoint and kill the leader. The next attempt must use an older one."""
    published = target.checkpoints()
    if not published:
        raise MissedError("there was no checkpoint")
    checkpoint = published[-1]
    files = [each for each in target.manifest_of(checkpoint).files if is_data(each.path)]
    name = target.name_of(checkpoint, target.draw.choice(files).stored_at)
    data = bytearray(target.store.read(name))
    if target.draw.random() < 0.5:
        del data[len(data) // 2 :]
    else:
        data[target.draw.randrange(len(data))] ^= 1 << target.draw.randrange(8)
    target.store.write(name, bytes(data))
    target.torn.add(checkpoint)
    with suppress(MissedError):
        target.leader().kill()
    return storage.name_of(checkpoint)


def _kill_launcher(_fault: Fault, target: Target) -> None:
    target.launcher.kill()


def _lie(_fault: Fault, target: Target) -> None:
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

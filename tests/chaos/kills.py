"""A local run whose tasks are killed (SIGKILL); subclasses decide when."""

import random
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.index import newest_checkpoint
from flotilla.trainer.events import AttemptBegin, Progress, Restart, ServersLost
from tests.chaos.followed import FLOTILLA, events_of, say

# Exit codes of a run that finished and of one that was terminated.
ENDS = (0, 130)


@dataclass(kw_only=True)
class Course:
    """The result of a run.

    Attributes:
        progress: Unix timestamp and global step of each progress report.
        returns: by role, the seconds from each kill until the global step increased again.
        memory: samples of the total memory of its processes, in MB.
    """

    checkpoint: str = ""
    step: int = 0
    seconds: float = 0.0
    progress: list[tuple[float, int]] = field(default_factory=list)
    returns: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    restarts: int = 0
    losses: list[ServersLost] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


class Kills:
    def __init__(  # noqa: PLR0913
        self, config: Path, settings: Sequence[str], folder: Path, *, root: str, seed: int,
        limit: float,
    ) -> None:  # fmt: skip
        """Prepare to train below the new `folder`, for at most `limit` seconds."""
        self.workdir = folder / "runs"
        self.found = Course()
        self.draw = random.Random(seed)
        #: Newest global step that the run reported.
        self.step = 0
        self._command = [*FLOTILLA, "train", str(config), "--workdir", str(self.workdir)]
        self._command += [f"--set={each}" for each in [*settings, f"storage.root={root}"]]
        self._folder, self._root, self._limit = folder, root, limit
        # Role of the last killed task, time of the kill, and the run's step at that time.
        self._awaited: tuple[str, float, int] | None = None
        self._has_begun = False
        self._lock = threading.Lock()

    def progressed(self, process: subprocess.Popen[bytes]) -> None:
        """Handle a progress event of the run."""

    def ended(self) -> None:
        """Handle the end of the run."""

    def course(self) -> Course:
        """Wait until the run ends, and return its result."""
        self._folder.mkdir(parents=True)
        with (self._folder / "output.txt").open("w") as output:
            process = subprocess.Popen(self._command, stdout=output, stderr=output)
        for event in events_of(process, self.workdir, {}, self._limit):
            if isinstance(event, Restart):
                self.found.restarts += 1
            elif isinstance(event, ServersLost):
                self.found.losses.append(event)
            elif isinstance(event, AttemptBegin):
                self._has_begun = True
            elif isinstance(event, Progress):
                self.found.seconds = event.seconds
                self.found.progress.append((event.time, event.global_step))
                self._reached(event.global_step)
                self.progressed(process)
        self.ended()
        if process.wait() not in ENDS:
            raise SystemExit(f"exit code {process.returncode}; see {self._folder}/output.txt")
        checkpoints = storage.join(self._root, self.config.parent.name, "checkpoints")
        self.found.checkpoint, self.found.step = newest_checkpoint(checkpoints)
        return self.found

    @property
    def config(self) -> Path:
        (found,) = self.workdir.glob("*/config.json")
        return found

    @property
    def is_awaited(self) -> bool:
        return self._awaited is not None

    def kill(self, role: str) -> bool:
        """Kill a random task of a role; return whether there was one."""
        tasks = self._tasks()
        self.weigh(tasks)
        names = sorted(name for name in tasks if name.startswith(f"{role}-"))
        if not names:
            say(f"no {role} was there to be killed")
            return False
        name = self.draw.choice(names)
        with self._lock:
            if self._awaited:
                say(f"{self._awaited[0]} was not back before the next kill")
            self._has_begun = False
            with suppress(psutil.NoSuchProcess):
                tasks[name].kill()
            self._awaited = (role, time.monotonic(), self.step)
        return True

    def weigh(self, tasks: dict[str, psutil.Process] | None = None) -> None:
        found = self._tasks() if tasks is None else tasks
        self.found.memory.append(_megabytes(found))

    def _reached(self, step: int) -> None:
        with self._lock:
            self.step = step
            if not self._awaited:
                return
            role, at, before = self._awaited
            # Progress that was reported before the loss of a server may be read after it.
            if step > before and (role == "worker" or self._has_begun):
                self.found.returns[role].append(time.monotonic() - at)
                self._awaited = None

    def _tasks(self) -> dict[str, psutil.Process]:
        found = {}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            for word in words:
                path = Path(word)
                if path.name == "config.json" and self.workdir in path.parents:
                    found[path.parent.name] = process
        return found


def _megabytes(tasks: dict[str, psutil.Process]) -> int:
    total = 0
    for process in tasks.values():
        try:
            total += process.memory_info().rss
        except psutil.Error:
            continue
    return total >> 20

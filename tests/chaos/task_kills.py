"""How much of its speed a run on this machine keeps of which a task is killed again and again.

    python -m tests.chaos.task_kills configs/clicks_large.yaml --seconds 1800 --every 60 --seed 1

Two runs train at the same time, so that whatever else the machine does meets both: an undisturbed
one, and one of which a task is killed (SIGKILL) every so many seconds, each role in turn, the task
of a role drawn by the seed. The goodput is the step of the newest checkpoint of the second over
that of the first: what is trained twice, or is not published, does not count. While the killed run
starts its task again the other one has more of the machine, so the goodput is rather too low.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tests.chaos.goodput import say
from tests.chaos.run import FLOTILLA, events_of
from trainer import storage
from trainer.checkpoints.index import newest_checkpoint
from trainer.events import Progress, Restart, ServersLost

ROLES = ("worker", "ps", "chief")
SETTINGS = {"training.steps": 10**8, "training.validate_every": 0, "cluster.max_restarts": 10**4}
# Before the first progress, and after the end.
AROUND_SECONDS = 600.0


@dataclass(kw_only=True)
class Course:
    """What came of a run.

    Attributes:
        step: of its newest checkpoint.
        returns: by role, the seconds from each kill until the global step was higher again.
        restarts: of tasks.
        recoveries: of lost servers, each with how many steps their values went back.
        memory: of all its processes together, in MB, at each kill.
    """

    step: int = 0
    returns: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    restarts: int = 0
    recoveries: list[tuple[str, int]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)


def main(arguments: list[str] | None = None) -> int:
    """Print both runs, what each role's loss cost, and the goodput."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.task_kills", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--seconds", type=float, default=1800, help="of training in each run")
    parser.add_argument("--every", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--role", choices=ROLES, action="append", help="default: each in turn")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; kept")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="flotilla-kills-"))
    say(f"seed {options.seed}, in {folder}")
    with ThreadPoolExecutor(2) as pool:
        both = [
            pool.submit(Kills(options, folder / name, every).course)
            for name, every in (("quiet", math.inf), ("killed", options.every))
        ]
        quiet, killed = (each.result() for each in both)
    say(f"undisturbed: {quiet.step} steps in {options.seconds:g} s, load {os.getloadavg()}")
    count = sum(map(len, killed.returns.values()))
    say(f"killed: {killed.step} steps, {count} kills survived, {killed.restarts} restarts")
    for role, seconds in killed.returns.items():
        mean = statistics.mean(seconds)
        share = max(0.0, 1 - mean / options.every)
        every = ", ".join(f"{each:.1f}" for each in seconds)
        say(f"{role}: {mean:.1f} s without progress (share {share:.3f}): {every}")
    say(f"servers lost, and the steps their values went back: {killed.recoveries}")
    say(f"MB of all processes: {quiet.memory} undisturbed, {killed.memory} killed")
    say(f"goodput: {killed.step / quiet.step:.3f}")
    return 0


class Kills:
    """One run, and the kills in it."""

    def __init__(self, options: argparse.Namespace, folder: Path, every: float) -> None:
        """Train below `folder`; kill a task every so many seconds."""
        self._options, self._folder, self._every = options, folder, every
        self._draw = random.Random(options.seed)
        self._found = Course()
        # The role that was killed last, when, and the step that the run had reached.
        self._awaited: tuple[str, float, int] | None = None
        self._step = 0
        self._lock = threading.Lock()

    def course(self) -> Course:
        """Run it to the end of its time, and return what came of it."""
        self._folder.mkdir(parents=True)
        settings = {**SETTINGS, "storage.root": storage.uri_of(self._folder / "store")}
        words = [f"{name}={value}" for name, value in settings.items()]
        options = [f"--set={each}" for each in [*words, *self._options.set]]
        workdir = self._folder / "runs"
        with (self._folder / "output.txt").open("w") as output:
            process = subprocess.Popen(
                [
                    *FLOTILLA,
                    "train",
                    str(self._options.config),
                    "--workdir",
                    str(workdir),
                    *options,
                ],
                stdout=output,
                stderr=output,
            )
        self._follow(process, workdir)
        process.wait()
        (config,) = workdir.glob("*/config.json")
        root = storage.uri_of(self._folder / "store")
        checkpoints = storage.join(root, config.parent.name, "checkpoints")
        self._found.step = newest_checkpoint(checkpoints)[1]
        return self._found

    def _follow(self, process: subprocess.Popen[bytes], workdir: Path) -> None:
        over, clock = threading.Event(), None
        limit = self._options.seconds + AROUND_SECONDS
        for event in events_of(process, workdir, {}, limit):
            self._found.restarts += isinstance(event, Restart)
            if isinstance(event, ServersLost):
                back = event.global_step - event.back_to
                self._found.recoveries.append((f"{event.recovery} {event.reason}".strip(), back))
            if isinstance(event, Progress):
                self._progressed(event.global_step)
                if clock is None:
                    clock = threading.Thread(target=self._strike, args=(process, over), daemon=True)
                    clock.start()
        over.set()
        assert clock, f"training has not begun; see {self._folder}"
        clock.join()

    def _progressed(self, step: int) -> None:
        with self._lock:
            self._step = step
            if self._awaited and step > self._awaited[2]:
                role, at, _ = self._awaited
                self._found.returns[role].append(time.monotonic() - at)
                self._awaited = None

    def _strike(self, process: subprocess.Popen[bytes], over: threading.Event) -> None:
        """Kill a task at each multiple of `every`, and end the run after its seconds."""
        began, seconds = time.monotonic(), self._options.seconds
        every = min(self._every, seconds)
        roles = itertools.cycle(self._options.role or ROLES)
        for number in itertools.count(1):
            at = number * every
            if over.wait(min(at, seconds) - (time.monotonic() - began)) or at >= seconds:
                break
            tasks = _tasks_of(self._folder / "runs")
            self._found.memory.append(_megabytes(tasks))
            self._kill(next(roles), tasks)
        self._found.memory.append(_megabytes(_tasks_of(self._folder / "runs")))
        process.send_signal(signal.SIGTERM)

    def _kill(self, role: str, tasks: dict[str, psutil.Process]) -> None:
        names = sorted(name for name in tasks if name.startswith(f"{role}-"))
        if not names:
            say(f"no {role} was there to be killed")
            return
        name = self._draw.choice(names)
        with self._lock:
            if self._awaited:
                say(f"{self._awaited[0]} was not back before the next kill")
            tasks[name].kill()
            self._awaited = (role, time.monotonic(), self._step)


def _tasks_of(workdir: Path) -> dict[str, psutil.Process]:
    """Return the processes of the tasks of a run, by name."""
    found = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        for word in words:
            path = Path(word)
            if path.name == "config.json" and workdir in path.parents:
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


if __name__ == "__main__":
    sys.exit(main())

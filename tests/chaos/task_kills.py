"""Measures how much of its speed a local run keeps while tasks are repeatedly killed.

    export PYTHONPATH=examples/clicks_large
    python -m tests.chaos.task_kills $PYTHONPATH/clicks_large.yaml --seconds 1800 --every 60

Three runs train one after the other, so that each has the whole machine. The first and the third
are undisturbed and take half of the seconds each, because the speed of a machine drifts. In the
second, a task is killed (SIGKILL) at intervals: each role in turn, with a random task of that role.
The goodput is the newest checkpoint step of the second run, divided by the sum of the other two:
repeated or unpublished steps do not count. If the speed of the machine changes by more than the
losses cost, the second run alone gives the cost: the steps that are missing between a kill and the
next one, converted to seconds at the speed before and after. This speed excludes the first
`RECOVERY_SECONDS` after a kill.
"""

import argparse
import itertools
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from flotilla.trainer import storage
from tests.chaos.followed import say
from tests.chaos.kills import Kills

ROLES = ("worker", "ps", "chief")
SETTINGS = {"training.steps": 10**8, "training.validate_every": 0, "cluster.max_restarts": 10**4}
# Time after a kill that is excluded from the usual speed, in seconds; at most half of the interval
# between two kills.
RECOVERY_SECONDS = 15.0
# Time before a kill that is excluded from the usual speed, in seconds. It is longer than the
# interval between two progress events, so no such interval contains a kill.
PROGRESS_SECONDS = 2.0
# Additional time limit for the start and the end of a run, in seconds.
AROUND_SECONDS = 600.0


def main(arguments: list[str] | None = None) -> int:
    """Print the runs, the cost of a loss by role, and the goodput."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.task_kills", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--seconds", type=float, default=1800, help="of training, with kills and without"
    )
    parser.add_argument("--every", type=float, default=60, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--role", choices=ROLES, action="append", help="default: each in turn")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; kept")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="flotilla-kills-"))
    say(f"seed {options.seed}, in {folder}")
    half = options.seconds / 2
    before, killed, after = (
        TimedKills(options, folder / name, seconds, every).course()
        for name, seconds, every in (
            ("before", half, math.inf),
            ("killed", options.seconds, options.every),
            ("after", half, math.inf),
        )
    )
    steps = before.step + after.step
    say(f"undisturbed: {before.step} and {after.step} steps, {half:g} s each, {os.getloadavg()}")
    count = sum(map(len, killed.returns.values()))
    say(f"killed: {killed.step} steps, {count} kills survived, {killed.restarts} restarts")
    for role, seconds in killed.returns.items():
        mean = statistics.mean(seconds)
        share = max(0.0, 1 - mean / options.every)
        every = ", ".join(f"{each:.1f}" for each in seconds)
        say(f"{role}: {mean:.1f} s without progress (share {share:.3f}): {every}")
    back = [
        (f"{each.recovery} {each.reason}".strip(), each.global_step - each.back_to)
        for each in killed.losses
    ]
    say(f"servers lost, and the steps their values went back: {back}")
    if costs := lost_seconds(killed.progress, options.every):
        say(f"seconds of training that losses cost: {[round(each, 1) for each in costs]}")
        share = 1 - statistics.mean(costs) / options.every
        say(f"goodput by the speed of the same run without a loss: {share:.3f}")
    memory = before.memory + after.memory
    say(f"MB of all processes: {memory} undisturbed, {killed.memory} killed")
    say(f"goodput: {killed.step / steps:.3f}")
    return 0


def lost_seconds(progress: Sequence[tuple[float, int]], every: float) -> list[float]:
    """Return the seconds of training that each kill of a run cost, in order.

    The first kill is `every` seconds after the first progress. The time after the last complete
    interval is excluded, and so is a kill if the interval before or after it has no steps after the
    recovery.
    """
    times, steps = zip(*progress, strict=True)
    recovery = min(RECOVERY_SECONDS, every / 2)

    def speed(begin: float, end: float) -> float:
        first, last = np.interp([begin, end], times, steps)
        return float(last - first) / (end - begin)

    lost = []
    for number in range(1, int((times[-1] - times[0]) / every)):
        at = times[0] + number * every
        rests = [(begin + recovery, begin + every - PROGRESS_SECONDS) for begin in (at - every, at)]
        # The usual speed is interpolated, because the speed of the machine may drift steadily.
        speeds = [speed(*rest) for rest in rests]
        if min(speeds) > 0:
            usual = float(np.interp(at + every / 2, np.mean(rests, axis=1), speeds))
            lost.append(every * (1 - speed(at, at + every) / usual))
    return lost


class TimedKills(Kills):
    """Kills a task at intervals, and ends the run after its time."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, seconds: float, every: float
    ) -> None:
        """Train below `folder` for `seconds`, and kill a task every `every` seconds."""
        settings = [f"{name}={value}" for name, value in SETTINGS.items()]
        super().__init__(
            options.config,
            [*settings, *options.set],
            folder,
            root=storage.uri_of(folder / "store"),
            seed=options.seed,
            limit=seconds + AROUND_SECONDS,
        )
        self._seconds, self._every = seconds, min(every, seconds)
        self._roles = itertools.cycle(options.role or ROLES)
        self._over = threading.Event()
        self._clock: threading.Thread | None = None

    def progressed(self, process: subprocess.Popen[bytes]) -> None:
        """Start counting the seconds at the first progress."""
        if self._clock is None:
            self._clock = threading.Thread(target=self._strike, args=(process,), daemon=True)
            self._clock.start()

    def ended(self) -> None:
        self._over.set()
        assert self._clock, f"training has not begun; see {self.workdir.parent}"
        self._clock.join()

    def _strike(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a task at each multiple of `every`, and end the run after its time."""
        began = time.monotonic()
        for number in itertools.count(1):
            at = number * self._every
            wait = min(at, self._seconds) - (time.monotonic() - began)
            if self._over.wait(wait) or at >= self._seconds:
                break
            self.kill(next(self._roles))
        self.weigh()
        process.send_signal(signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())

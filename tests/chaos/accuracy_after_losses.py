"""The cost of lost parameter servers in accuracy, not in time.

    export PYTHONPATH=examples/clicks_large
    python -m tests.chaos.accuracy_after_losses $PYTHONPATH/clicks_large.yaml --steps 4000 \
        --losses 20 --set training.checkpoint_seconds=10 --seed 1 --seed 2 --seed 3

For each seed, two runs train the same number of steps, one after the other: an undisturbed run, and
a run whose parameter servers are killed (SIGKILL) `--losses` times. The kills divide the steps into
equal parts. Progress is reported about once a second. Therefore each kill is delayed by a random
time of up to a second, which depends on the seed. A kill waits until the run has recovered from the
previous kill.

The last checkpoints of both runs are evaluated on the same test split. Their difference includes
the randomness of asynchronous training, so the differences between undisturbed runs of several
seeds are also printed. The same seed may be given twice.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from flotilla.trainer import storage
from flotilla.trainer.config.load import load_config
from flotilla.trainer.evaluation.evaluate import evaluate
from tests.chaos.followed import say
from tests.chaos.kills import Course, Kills

METRICS = ("auc", "query_auc")
SETTINGS = {"training.validate_every": 0, "cluster.max_restarts": 10**4}
# Maximum random delay of a kill, in seconds. Progress is reported about once per second.
SPREAD_SECONDS = 1.0
Measured = Mapping[str, float]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos.accuracy_after_losses", description=__doc__
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--steps", type=int, default=4000, help="of each run")
    parser.add_argument("--losses", type=int, default=20, help="of servers, in the second run")
    parser.add_argument("--seed", type=int, action="append", help="default: 1; again for more")
    parser.add_argument("--limit", type=float, default=3600, help="seconds of a run")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; kept")
    options = parser.parse_args(arguments)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="flotilla-losses-"))
    say(f"in {folder}")
    pairs = [
        _pair(options, folder, f"{number}-seed-{seed}", seed)
        for number, seed in enumerate(options.seed or [1])
    ]
    for name in sorted(pairs[0][0]):
        quiet, lossy = zip(*((one[name], other[name]) for one, other in pairs), strict=True)
        differences = [other - one for one, other in zip(quiet, lossy, strict=True)]
        say(f"{name} undisturbed: {_spread(quiet)}")
        say(f"{name}, killed less undisturbed: {_spread(differences)}")
    return 0


def _spread(values: Sequence[float]) -> str:
    mean = f"mean {statistics.mean(values):+.5f}"
    if len(values) == 1:
        return mean
    deviation = statistics.stdev(values)
    error = deviation / math.sqrt(len(values))
    return f"{mean} (standard deviation {deviation:.5f}, standard error of the mean {error:.5f})"


def _pair(
    options: argparse.Namespace, folder: Path, name: str, seed: int
) -> tuple[Measured, Measured]:
    """Return the metrics of a seed's undisturbed run and of its run that loses servers."""
    quiet, lossy = (
        _measured(options, folder, f"{name}-{kind}", seed, losses)
        for kind, losses in (("quiet", 0), ("killed", options.losses))
    )
    differ = ", ".join(f"{each} {lossy[each] - quiet[each]:+.5f}" for each in quiet)
    say(f"seed {seed}, killed less undisturbed: {differ}")
    return quiet, lossy


def _measured(
    options: argparse.Namespace, folder: Path, name: str, seed: int, losses: int
) -> Measured:
    kills = EvenKills(options, folder, name, seed, losses)
    began = time.monotonic()
    course = kills.course()
    if course.step < options.steps:
        sys.exit(f"{name} ended at step {course.step}; see {folder / name}")
    seconds = time.monotonic() - began
    config = load_config(kills.config)
    (dataset,) = (folder / "store" / "datasets").iterdir()
    with tempfile.TemporaryDirectory() as scratch:
        found = evaluate(
            config,
            storage.uri_of(dataset),
            course.checkpoint,
            storage.uri_of(folder / name / "evaluation"),
            Path(scratch),
        )
    metrics = {each: found.metrics[each] for each in METRICS if each in found.metrics}
    text = ", ".join(f"{each} {value:.5f}" for each, value in metrics.items())
    say(
        f"{name}: {text}; {course.step} steps, {course.seconds:.0f} s of training, "
        f"{seconds:.0f} s in all"
    )
    if losses:
        _say_losses(course, kills.struck)
    return metrics


def _say_losses(course: Course, struck: int) -> None:
    back = [each.global_step - each.back_to for each in course.losses]
    partial = sum(each.recovery == "partial" for each in course.losses)
    reasons = sorted({each.reason for each in course.losses if each.reason})
    say(
        f"  {struck} servers killed; {len(back)} losses: {partial} recovered in part, "
        f"{len(back) - partial} in full{f' ({reasons})' if reasons else ''}; "
        f"{course.restarts} restarts"
    )
    say(f"  of {[','.join(each.servers) for each in course.losses]}")
    say(f"  steps that their values went back, {sum(back)} in all: {back}")
    waits = course.returns.get("ps", [])
    say(f"  seconds without progress: {[round(each, 1) for each in waits]}")


class EvenKills(Kills):
    """Kills servers at evenly spaced steps of the run."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, name: str, seed: int, losses: int
    ) -> None:
        """Train in a new folder below `folder`; all runs share one store and one dataset."""
        settings = {**SETTINGS, "training.steps": options.steps, "training.seed": seed}
        super().__init__(
            options.config,
            [*(f"{key}={value}" for key, value in settings.items()), *options.set],
            folder / name,
            root=storage.uri_of(folder / "store"),
            seed=seed,
            limit=options.limit,
        )
        #: Number of servers that were killed.
        self.struck = 0
        self._due = [options.steps * each / (losses + 1) for each in range(1, losses + 1)]

    def progressed(self, process: subprocess.Popen[bytes]) -> None:
        """Kill a server if a kill is due and the run has recovered from the previous kill."""
        if self.struck == len(self._due) or self.step < self._due[self.struck] or self.is_awaited:
            return
        time.sleep(self.draw.uniform(0, SPREAD_SECONDS))
        if process.poll() is None:
            self.struck += self.kill("ps")


if __name__ == "__main__":
    sys.exit(main())

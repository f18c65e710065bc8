"""Measures whether speed costs accuracy: compares each fast path with Keras's `model.fit`.

Both sides compute gradients for the same number of examples, with the same optimizer. The learning
rate decays to zero, which reduces noise. Each round has another seed. A baseline that several paths
share is trained only once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import launched
from benchmarks.accuracy import accuracy_of
from benchmarks.baselines.plain import Settings
from benchmarks.comparisons import Comparison, alternating
from flotilla.trainer.checkpoints.index import read_index

SEEDS = 3
# This factor allows the accuracy to fall by 0.3 percentage points from 98 %.
AT_LEAST = 0.997
ADAM = Settings(optimizer="Adam", rate=0.003, batch=100, steps=5000)
LOCAL_STEPS = 10


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """A fast way to train, and the plain Keras training that it is compared with.

    Attributes:
        own: settings of the fast path.
        plain: settings of Keras.
        gradients: number of gradients per update, each of one batch of `plain`.
    """

    own: Mapping[str, Any]
    plain: Settings = ADAM
    gradients: int = 1


PATHS = {
    "single": FastPath(own={"training.strategy": "single"}),
    "xla": FastPath(own={"training.strategy": "single", "training.jit_compile": True}),
    "mixed": FastPath(own={"training.strategy": "single", "training.mixed_precision": True}),
    "async": FastPath(own={"training.strategy": "async_parameter_server"}),
    "local": FastPath(
        own={"training.strategy": "async_parameter_server", "training.pull_every": LOCAL_STEPS},
        plain=replace(ADAM, optimizer="SGD", rate=0.1),
        gradients=LOCAL_STEPS,
    ),
    # An update of two workers has as many examples as a batch of Keras.
    "sync": FastPath(
        own={"training.strategy": "sync_parameter_server", "training.batch_size": 100},
        plain=replace(ADAM, batch=200, steps=2500),
    ),
}


def same_accuracy(name: str) -> Comparison:
    """Return the test accuracy of a fast path relative to `model.fit`, for each seed."""
    path = PATHS[name]
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as folder:
        home = Path(folder)
        own, plain = iter(range(SEEDS)), iter(range(SEEDS))
        pairs = alternating(
            SEEDS,
            lambda: _own(path, next(own), home),
            lambda: _plain(replace(path.plain, seed=next(plain))),
        )
    return Comparison(
        name=f"{name}: test accuracy on MNIST, compared with Keras's fit",
        rounds=tuple(fast / slow for fast, slow in pairs),
        at_least=AT_LEAST,
        more={"accuracy": [[round(each, 4) for each in pair] for pair in pairs]},
    )


def settings_of(path: FastPath, seed: int) -> dict[str, Any]:
    """Return the settings for a run of a path."""
    plain = path.plain
    return {
        "training.optimizer.name": plain.optimizer.lower(),
        "training.optimizer.learning_rate": plain.rate,
        "training.schedule.name": "cosine",
        "training.batch_size": plain.batch,
        "training.steps": plain.steps // path.gradients,
        "training.seed": seed,
        **path.own,
    }


def _own(path: FastPath, seed: int, home: Path) -> float:
    settings = {key.replace(".", "__"): each for key, each in settings_of(path, seed).items()}
    trained = launched.train(home / f"{seed}", launched.mnist(), **settings)
    return accuracy_of(read_index(trained.checkpoints)[-1].uri)


@cache
def _plain(settings: Settings) -> float:
    command = [sys.executable, "-m", "benchmarks.baselines.plain", settings.words()]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["accuracy"])

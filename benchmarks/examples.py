"""Compares training input on MNIST: Flotilla's shards, and TFDS, which decodes single examples.

`python -m benchmarks.examples WHICH FOLDER` measures one input in its own process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import tensorflow as tf

from benchmarks import launched
from benchmarks.baselines import tfds_input
from benchmarks.baselines.mnist import VALIDATION
from benchmarks.comparisons import Comparison, alternating
from flotilla.trainer import storage
from flotilla.trainer.data.read import stage_shards, training_batches
from flotilla.trainer.features.dataset_spec import DatasetSpec

ROUNDS = 3
BATCH = 100
EXAMPLES = 60_000 - VALIDATION
# The first epoch reads and parses the files; later ones may use data in memory.
EPOCHS = 4
FLOTILLA, TFDS, TFDS_CACHED = "flotilla", "tfds", "tfds-cached"


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Examples per second in the first epoch, and the median of the later ones."""

    first: float
    later: float


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The speeds of Flotilla and TFDS in each round, and of TFDS with decoded examples cached."""

    pairs: list[tuple[Speeds, Speeds]]
    cached: Speeds


def first_epoch() -> Comparison:
    """Compare examples per second in the first epoch, shuffled and without a cache.

    The time of Flotilla includes fetching its shards; TFDS reads its files in place.
    """
    pairs = [(own.first, other.first) for own, other in _rounds().pairs]
    return _compared("first epoch of MNIST, shuffled: examples/s, compared with TFDS", 4, pairs)


def later_epochs() -> Comparison:
    """Compare examples per second in later epochs, in which TFDS decodes again."""
    rounds = _rounds()
    pairs = [(own.later, other.later) for own, other in rounds.pairs]
    name = "later epochs of MNIST, shuffled: examples/s, compared with TFDS"
    return _compared(name, 10, pairs, tfds_with_a_cache=round(rounds.cached.later))


def _compared(
    name: str, at_least: float, pairs: list[tuple[float, float]], **more: Any
) -> Comparison:
    return Comparison(
        name=name,
        rounds=tuple(own / other for own, other in pairs),
        at_least=at_least,
        more={"examples_per_second": [[round(each) for each in pair] for pair in pairs], **more},
    )


@cache
def _rounds() -> Rounds:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        folder = Path(name)
        tfds_input.prepare(folder / "tfds")
        # Use a new folder in each round, because existing files would not be fetched again.
        count = iter(range(ROUNDS))
        places = {
            TFDS: [str(folder / "tfds")],
            TFDS_CACHED: [str(folder / "tfds")],
        }

        def own() -> Speeds:
            places[FLOTILLA] = [launched.mnist(), str(folder / f"shards-{next(count)}")]
            return measured(FLOTILLA)

        def measured(which: str) -> Speeds:
            command = [sys.executable, "-m", "benchmarks.examples", which, *places[which]]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            return Speeds(**json.loads(done.stdout.splitlines()[-1]))

        pairs = alternating(ROUNDS, own, lambda: measured(TFDS))
        return Rounds(pairs=pairs, cached=measured(TFDS_CACHED))


def speeds_of(
    batches: tf.data.Dataset, examples: int, batch_size: int, staging: float = 0.0
) -> Speeds:
    """Read batches in a graph, as training does, and return the speeds."""

    def taken(iterator: Any, count: tf.Tensor) -> tf.Tensor:
        labels = tf.constant(0, tf.int64)
        for _ in tf.range(count):
            _, label = next(iterator)
            labels += tf.reduce_sum(tf.cast(label, tf.int64))
        return labels

    iterator, count = iter(batches), tf.constant(examples // batch_size)
    epoch = tf.function(taken).get_concrete_function(iterator, count)
    found = []
    for number in range(EPOCHS):
        began = time.perf_counter()
        epoch(iterator, count)
        seconds = time.perf_counter() - began + (0 if number else staging)
        found.append(int(count) * batch_size / seconds)
    return Speeds(first=found[0], later=median(found[1:]))


def shards_of(dataset: str, folder: Path) -> tf.data.Dataset:
    """Return the batches of a worker that reads all shards."""
    spec = DatasetSpec.from_manifest(storage.read_manifest(dataset))
    files = stage_shards(dataset, folder, "train")
    return training_batches(spec, files, batch_size=BATCH, seed=0)


def main() -> None:
    """Measure one input, and print its speeds as a JSON object."""
    which, *places = sys.argv[1:]
    staging = 0.0
    if which == FLOTILLA:
        dataset, folder = places[0], Path(places[1])
        began = time.perf_counter()
        stage_shards(dataset, folder, "train")
        staging = time.perf_counter() - began
        batches = shards_of(dataset, folder)
    else:
        builder = tfds_input.builder(Path(places[0]))
        batches = tfds_input.batches(builder, batch_size=BATCH, cached=which == TFDS_CACHED)
    found = speeds_of(batches, EXAMPLES, BATCH, staging)
    sys.stdout.write(f"{json.dumps(asdict(found))}\n")


if __name__ == "__main__":
    main()

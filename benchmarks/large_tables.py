"""Compares a training step with a large embedding table to the same step with a small table.

Each optimizer that has a lazy implementation is measured with tables of 10,000,000 and 1,000 rows:
the whole step of `single`, and the update alone. `python -m benchmarks.large_tables NAME DIMENSION`
measures one optimizer in its own process, which needs up to 10 GB, and prints a line of JSON.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from benchmarks.comparisons import Comparison, alternating

SMALL, LARGE = 1_000, 10_000_000
# A batch looks up each row of the small table once, and some twice.
BATCH, DISTINCT = 1_024, 1_000
DIMENSIONS = (16, 64)
ROUNDS, STEPS = 5, 50
# The Keras optimizer, its arguments, and its number of slots.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any], int]] = {
    "adam": ("adam", {}, 2),
    "adamw": ("adamw", {}, 2),
    "adagrad": ("adagrad", {}, 1),
    "ftrl": ("ftrl", {}, 2),
    "sgd": ("sgd", {}, 0),
    "momentum": ("sgd", {"momentum": 0.9, "nesterov": True}, 1),
}
# Additional memory in bytes, for TensorFlow and the initialization of a table.
BESIDES = 2 << 30


def large_tables() -> list[Comparison]:
    """Compare the CPU seconds of a step and of an update, for each optimizer and dimension."""
    return [
        comparison
        for name in OPTIMIZERS
        for dimension in DIMENSIONS
        for comparison in _measured(name, dimension)
    ]


def _measured(name: str, dimension: int) -> list[Comparison]:
    slots = OPTIMIZERS[name][2]
    needed = LARGE * dimension * 4 * (1 + slots) + BESIDES
    free = psutil.virtual_memory().available
    if free < needed:
        raise RuntimeError(f"{name} needs {needed >> 20:,} MB of memory; {free >> 20:,} are free")
    words = [sys.executable, "-m", "benchmarks.large_tables", name, f"{dimension}"]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, list[tuple[float, float]]] = json.loads(done.stdout.splitlines()[-1])
    return [
        Comparison(
            name=f"{name}, {dimension} numbers per row: CPU seconds per {what} with {LARGE:,} "
            f"rows, compared with {SMALL:,} rows",
            rounds=tuple(large / small for large, small in pairs),
            at_most=1.3,
            more={"milliseconds": [[round(1e3 * each, 3) for each in pair] for pair in pairs]},
        )
        for what, pairs in found.items()
    ]


@dataclass(frozen=True, kw_only=True)
class _Built:
    """Functions that run a given number of steps or updates with one table."""

    step: Callable[[int], Any]
    update: Callable[[int], Any]


def _built(name: str, dimension: int, rows: int) -> _Built:
    import keras  # noqa: PLC0415
    import tensorflow as tf  # noqa: PLC0415

    from flotilla.trainer.config.load import parse_config  # noqa: PLC0415
    from flotilla.trainer.config.topology import Cluster, Task  # noqa: PLC0415
    from flotilla.trainer.optimizers.optimizers import build_optimizer  # noqa: PLC0415
    from flotilla.trainer.strategies.strategy import Problem, create  # noqa: PLC0415

    kind, args, _ = OPTIMIZERS[name]
    optimizer = {"name": kind, "args": args}
    config = parse_config({"training": {"strategy": "single", "optimizer": optimizer}})

    def build_model() -> keras.Model:
        ids = keras.Input((), dtype="int64")
        found = keras.layers.Embedding(rows, dimension, name="table")(ids)
        # The same hidden layers as in the `tabular` model.
        for number, units in enumerate((64, 32)):
            found = keras.layers.Dense(units, activation="relu", name=f"hidden_{number}")(found)
        return keras.Model(ids, keras.layers.Dense(1, name="out")(found))

    def example(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # The prime divides neither table size, so both tables get equally many distinct rows.
        ids = (number * DISTINCT + tf.range(BATCH, dtype=tf.int64) % DISTINCT) * 7_919_993 % rows
        return ids, tf.cast(ids % 2, tf.float32)[:, tf.newaxis]

    strategy: Any = create(config, Cluster(addresses={}), Task(role="chief", index=0))
    strategy.build(
        Problem(
            build_model=build_model,
            build_optimizer=lambda: build_optimizer(config.training),
            loss=lambda _model, batch, found: tf.reduce_mean(tf.square(found - batch[1])),
            chance_loss=1.0,
            batches=lambda: tf.data.Dataset.counter().map(example),
        )
    )
    table, *others = strategy.model.trainable_variables
    numbers = tf.Variable(0, dtype=tf.int64)

    def update(updates: tf.Tensor) -> None:
        for _ in tf.range(updates):
            ids, _label = example(numbers.assign_add(1))
            values = tf.fill([BATCH, dimension], 0.1)
            gradient = tf.IndexedSlices(values, ids, tf.constant([rows, dimension], tf.int64))
            rest = [tf.zeros(each.shape) for each in others]
            strategy.optimizer.apply([gradient, *rest], [table, *others])

    graph = tf.function(update)
    return _Built(step=strategy.run, update=lambda count: graph(tf.constant(count)))


def _seconds(steps: Callable[[int], Any]) -> float:
    """Return the CPU seconds of one step, summed over all threads."""
    begin = time.process_time()
    steps(STEPS)
    return (time.process_time() - begin) / STEPS


def main() -> None:
    """Measure one optimizer with one dimension, and print the seconds as JSON."""
    name, dimension = sys.argv[1], int(sys.argv[2])
    large, small = (_built(name, dimension, rows) for rows in (LARGE, SMALL))
    found = {}
    for what in ("step", "update"):
        big, little = getattr(large, what), getattr(small, what)
        # Warm up: the first calls trace, and copy the table once.
        big(STEPS)
        little(STEPS)
        found[what] = alternating(ROUNDS, partial(_seconds, big), partial(_seconds, little))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

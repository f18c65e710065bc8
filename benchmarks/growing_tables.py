"""Measures how many rows a growing table looks up and updates per second of CPU time.

Everything runs in one process, which also deduplicates and partitions the ids. In a cluster, the
workers do that, so a server does less than is measured here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from benchmarks.comparisons import Comparison, alternating
from flotilla.trainer.embeddings.embedding_table import EmbeddingTable
from flotilla.trainer.models.classifiers import outputs
from flotilla.trainer.models.spec import InputSpec, scaled_input

ROUNDS = 5
ROWS, DIMENSION, BATCH, STEPS = 1_000_000, 16, 8192, 100
RATE = 0.01
# For drifting ids: the number of ids per example, of new ids per step, and of ids that a step draws
# from. With the batches of `benchmarks.memory`, each id occurs eight times on average, and then
# never again.
IDS, NEW_IDS, LIVE_IDS = 4, 8, 8_000
# The table has fewer rows than a step draws from, and its maximum age is shorter than the time in
# which an id occurs. Rows are therefore evicted for lack of space, and because of their age.
DRIFTING_ROWS, OLDEST = 6_000, 500
Step = Callable[[tf.Tensor], tf.Tensor]


def table_rows() -> Comparison:
    """Compare the rows per CPU second of a growing table and of a plain variable."""
    random = np.random.default_rng(0)
    ids = random.integers(-(2**62), 2**62, ROWS)
    numbers = [random.integers(0, ROWS, BATCH) for _ in range(STEPS)]
    table = EmbeddingTable(round(ROWS * 1.1), DIMENSION, shards=2, name="table")
    table.build((None,))
    for begin in range(0, ROWS, BATCH):
        table(tf.constant(ids[begin : begin + BATCH]), training=True)
    of_table, plain = _grown(table), _plain()
    asked = [tf.constant(ids[each]) for each in numbers]
    places = [tf.constant(each) for each in numbers]
    new = [_new(random, min_count) for min_count in (1, 2)]
    found = alternating(
        ROUNDS, lambda: _rows_per_second(of_table, asked), lambda: _rows_per_second(plain, places)
    )
    return Comparison(
        name=f"growing table with rows of {DIMENSION} numbers: rows/s looked up and updated, "
        "compared with a plain variable",
        rounds=tuple(own / other for own, other in found),
        at_least=0.3,
        more={
            "million_rows_per_second_of_a_core": [round(own / 1e6, 3) for own, _ in found],
            "by_place": [round(other / 1e6, 3) for _, other in found],
            "new_rows": round(new[0] / 1e6, 3),
            "turned_away": round(new[1] / 1e6, 3),
        },
    )


def _new(random: np.random.Generator, min_count: int) -> float:
    """Return the rows per second if all ids are new.

    With a `min_count` of 1, the table is full during half of the steps.
    """
    table = EmbeddingTable(
        STEPS * BATCH // 2, DIMENSION, shards=2, min_count=min_count, min_age=1, name="new"
    )
    table.build((None,))
    asked = [tf.constant(random.integers(-(2**62), 2**62, BATCH)) for _ in range(STEPS)]
    return _rows_per_second(_grown(table), asked)


class _Drifting(EmbeddingTable):
    """A table that draws its ids from a window that moves with the global step."""

    def call(self, examples: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """Return the rows of random ids for each example, regardless of its values."""
        step = self._step(examples)
        shape = [tf.shape(examples)[0], IDS]
        ids = tf.random.uniform(shape, maxval=LIVE_IDS, dtype=tf.int64)
        return super().call(ids if step is None else ids + step * NEW_IDS, training)

    def compute_output_spec(self, examples: Any, training: bool | None = None) -> keras.KerasTensor:
        """Return the type and shape of the rows."""
        del training
        return keras.KerasTensor((examples.shape[0], IDS, self.dimension), self.compute_dtype)


def drifting(spec: InputSpec) -> keras.Model:
    """Return a linear model of the input and of the rows of drifting ids."""
    given, pixels = scaled_input(spec)
    table = _Drifting(DRIFTING_ROWS, DIMENSION, min_count=2, max_age=OLDEST, shards=2, name="table")
    rows = keras.layers.Flatten()(table(given))
    features = keras.layers.Concatenate()([keras.layers.Flatten()(pixels), rows])
    return keras.Model(given, outputs(spec, features))


def _grown(table: EmbeddingTable) -> Step:
    rows = [each.value for each in table.trainable_variables]

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            found = table(ids, training=True)
            loss = tf.reduce_sum(found * found)
        for variable, gradient in zip(rows, tape.gradient(loss, rows), strict=True):
            variable.scatter_sub(tf.IndexedSlices(RATE * gradient.values, gradient.indices))
        return loss

    graph: Step = tf.function(step)
    return graph


def _plain() -> Step:
    rows = tf.Variable(tf.random.uniform([ROWS, DIMENSION]))

    def step(places: tf.Tensor) -> tf.Tensor:
        found = tf.gather(rows, places)
        loss = tf.reduce_sum(found * found)
        rows.scatter_sub(tf.IndexedSlices(2 * RATE * found, places))
        return loss

    graph: Step = tf.function(step)
    return graph


def _rows_per_second(step: Step, batches: list[tf.Tensor]) -> float:
    step(batches[0])
    began = _seconds()
    for each in batches:
        step(each)
    return len(batches) * BATCH / (_seconds() - began)


def _seconds() -> float:
    used = os.times()
    return used.user + used.system

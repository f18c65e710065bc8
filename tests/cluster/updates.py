"""Problems for what makes one update: accumulated gradients, averages, a scaled loss."""

from __future__ import annotations

from dataclasses import replace

import keras
import tensorflow as tf

from tests.cluster.problems import dealt, problem, two_layers
from tests.cluster.stateful import ROWS, embedded
from trainer.strategies.strategy import Problem

EXAMPLES = 192
# In float16 a gradient times the first scale is infinite.
LARGE = 64.0


def dense(batch_size: int, workers: int = 1) -> Problem:
    """The same examples in the same order, however they are dealt."""
    each = EXAMPLES // (batch_size * workers)
    return dealt(batch_size, workers, each, model=two_layers, optimizer="adam", learning_rate=0.01)


def rows(batch_size: int, workers: int = 1) -> Problem:
    """Rows of a table are looked up where it is."""
    floats = dense(batch_size, workers).batches

    def batches() -> tf.data.Dataset:
        return floats().map(lambda x, y: (tf.cast(tf.abs(x[:, :4]) * 4, tf.int64) % ROWS, y))

    return replace(embedded(), batches=batches)


def exact(batch_size: int, workers: int = 1) -> Problem:
    """The same in float32."""
    return large(batch_size, workers, "")


def large(batch_size: int, workers: int = 1, precision: str = "float16") -> Problem:
    """A loss whose gradient overflows in float16 with the first scale."""

    def model() -> keras.Model:
        keras.mixed_precision.set_global_policy(f"mixed_{precision}" if precision else "float32")
        network = two_layers()
        keras.mixed_precision.set_global_policy("float32")
        return network

    batches = dense(batch_size, workers).batches
    plain = problem(batches, model, learning_rate=0.1 / LARGE)
    return replace(plain, loss=lambda *args: plain.loss(*args) * LARGE)

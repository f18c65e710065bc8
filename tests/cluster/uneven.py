"""Problems with unequal workers: one of them is slow, or one fails."""

from __future__ import annotations

from dataclasses import replace

import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep

from tests.cluster.problems import equal, number
from trainer.strategies.strategy import Problem

FAILURE = "the well is dry"


def slowed(worker: int, times: int, microseconds: int) -> Problem:
    """Every batch of one worker takes `times` as long as the `microseconds` of the others."""
    usual = equal()

    def batches() -> tf.data.Dataset:
        factor = tf.where(number() == worker, tf.constant(times, tf.int64), 1)
        return usual.batches().apply(sleep(factor * microseconds))

    return replace(usual, batches=batches)


def failing(worker: int, after: int) -> Problem:
    """One worker's input fails for good after some batches."""
    usual = equal()

    def checked(index: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> object:
        fine = (index < after) | (number() != worker)
        with tf.control_dependencies([tf.debugging.Assert(fine, [FAILURE])]):
            return tf.nest.map_structure(tf.identity, batch)

    return replace(usual, batches=lambda: usual.batches().enumerate().map(checked))

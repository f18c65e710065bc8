"""Problems with unequal workers: one of them is slow, or one fails."""

from __future__ import annotations

from dataclasses import replace

import tensorflow as tf
from tensorflow.python.data.experimental.ops.testing import sleep

from tests.cluster.problems import equal, examples, number
from trainer.strategies.strategy import Problem
from trainer.strategies.visits import Stream

FAILURE = "the well is dry"


def slowed(worker: int, times: int, microseconds: int) -> Problem:
    """Every batch of one worker takes `times` as long as the `microseconds` of the others."""
    usual = equal()

    def batches() -> tf.data.Dataset:
        return usual.batches().apply(sleep(_factor(worker, times) * microseconds))

    return replace(usual, batches=batches)


def lent(worker: int, times: int, microseconds: int) -> Problem:
    """The same, of examples that are handed out."""
    data = examples(800)

    def read(held: tuple[tf.Tensor, tf.Tensor], numbers: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        # It is asked twice: for an element, and whether that was the last one.
        delay = sleep(_factor(worker, times) * microseconds // 2)
        wanted = tf.data.Dataset.from_tensors(numbers).apply(delay).get_single_element()
        inputs, labels = held
        return tf.gather(inputs, wanted), tf.gather(labels, wanted)

    stream = Stream(
        examples=len(data[1]), seed=0, held=lambda: tf.data.Dataset.from_tensors(data), read=read
    )
    return replace(equal(), stream=stream)


def _factor(worker: int, times: int) -> tf.Tensor:
    return tf.where(number() == worker, tf.constant(times, tf.int64), 1)


def failing(worker: int, after: int) -> Problem:
    """One worker's input fails for good after some batches."""
    usual = equal()

    def checked(index: tf.Tensor, batch: tuple[tf.Tensor, tf.Tensor]) -> object:
        fine = (index < after) | (number() != worker)
        with tf.control_dependencies([tf.debugging.Assert(fine, [FAILURE])]):
            return tf.nest.map_structure(tf.identity, batch)

    return replace(usual, batches=lambda: usual.batches().enumerate().map(checked))

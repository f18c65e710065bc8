"""Small problems with known answers for strategies under test.

Their batches run in graphs on the workers: a worker knows itself by `number.txt` in its folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.utils.naming import reset_uids

from tests.trainer.objectives import of_classes
from trainer.config.schema import Config
from trainer.strategies.strategy import Problem
from trainer.training.optimizers import build_optimizer

FEATURES = 6
CLASSES = 3


def examples(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels, the same ones everywhere."""
    random = np.random.default_rng(seed)
    inputs = random.normal(size=(count, FEATURES)).astype("float32")
    return inputs, random.integers(0, CLASSES, size=count)


def number() -> tf.Tensor:
    """Return the number of the task that runs this graph."""
    return tf.strings.to_number(tf.io.read_file("number.txt"), tf.int64)


def two_layers() -> keras.Model:
    """A small network with fixed weights."""
    # `clear_session` would break a strategy's scope that is entered.
    reset_uids()
    keras.utils.set_random_seed(7)
    return keras.Sequential(
        [
            keras.layers.Input((FEATURES,)),
            keras.layers.Dense(5, activation="tanh", name="hidden"),
            keras.layers.Dense(CLASSES, name="logits"),
        ]
    )


def problem(
    batches: Callable[[], tf.data.Dataset],
    model: Callable[[], keras.Model] = two_layers,
    optimizer: str = "sgd",
    learning_rate: float = 0.1,
) -> Problem:
    """Return a problem on some batches."""
    objective = of_classes(CLASSES)
    return Problem(
        build_model=lambda: objective.attach(model()),
        build_optimizer=lambda: keras.optimizers.get(
            {"class_name": optimizer, "config": {"learning_rate": learning_rate}}
        ),
        # Models that take the place of this one have no loss yet.
        loss=lambda model, batch, outputs: objective.loss(objective.attach(model), batch, outputs),
        chance_loss=objective.task.chance_loss(),
        batches=batches,
    )


def equal(batch_size: int = 8, **named: object) -> Problem:
    """Every worker gets the same batches in the same order."""

    def batches() -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(examples(10 * batch_size))
        return data.batch(batch_size, drop_remainder=True).repeat()

    return problem(batches, **named)


def located() -> Problem:
    """The loss is that of `equal`, and 100 for each of the numbers below that of its task."""
    known = equal()

    def loss(*of_batch: object) -> tf.Tensor:
        return known.loss(*of_batch) + 100 * tf.cast(number(), tf.float32)

    return replace(known, loss=loss)


def measured() -> Problem:
    """Equal batches, and sums over 23 examples in six batches: examples, loss, hits, where."""
    objective = of_classes(CLASSES)

    def totals(model: keras.Model, part: tf.Tensor, of: int) -> tf.Tensor:
        batches = tf.data.Dataset.from_tensor_slices(examples(23, seed=1)).batch(4)
        mine = batches.shard(of, tf.cast(part, tf.int64))
        # A decimal for each worker: who has measured how many parts.
        where = tf.cast([10 ** number()], tf.float64)
        return tf.concat([objective.totals(model, mine), where], 0)

    return replace(equal(), totals=totals)


def dealt(
    batch_size: int = 8, workers: int = 2, batches_each: int = 12, **named: object
) -> Problem:
    """Worker i of n gets the i-th of each n batches: together, one batch n times as large."""
    data = examples(batches_each * batch_size * workers)
    return problem(lambda: in_turn(data, batch_size, workers), **named)


def in_turn(data: object, batch_size: int, workers: int) -> tf.data.Dataset:
    """Return every `workers`-th batch of some examples, from that of this worker on."""
    batches = tf.data.Dataset.from_tensor_slices(data).batch(batch_size, drop_remainder=True)
    mine = batches.enumerate().filter(lambda i, _: i % workers == number())
    return mine.map(lambda _, batch: batch).repeat()


def of_ids(
    config: Config, looked_up: Callable[[Any], Any], example: Callable[[tf.Tensor], Any], batch: int
) -> Problem:
    """Return one of two classes, with the optimizer of a configuration and without end.

    `looked_up` makes of ids what a layer of logits gets; `example` makes an example of its number.
    """

    def build_model() -> keras.Model:
        keras.utils.set_random_seed(0)
        given = keras.Input((), dtype="int64")
        return keras.Model(given, keras.layers.Dense(2, name="logits")(looked_up(given)))

    objective = of_classes(2)
    return Problem(
        build_model=lambda: objective.attach(build_model()),
        build_optimizer=lambda: build_optimizer(config.training),
        loss=objective.loss,
        chance_loss=1.0,
        batches=lambda: tf.data.Dataset.counter().map(example).batch(batch),
    )

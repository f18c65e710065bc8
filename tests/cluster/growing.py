"""A problem with a table that grows, for `tests.cluster.lead`."""

from __future__ import annotations

import keras
import tensorflow as tf

from tests.trainer.objectives import of_classes
from trainer.config.load import parse_config
from trainer.models.embedding_table import EmbeddingTable
from trainer.strategies.strategy import Problem
from trainer.training.optimizers import build_optimizer

BATCH = 16
TABLE = "table"


def ids_of(numbers: tf.Tensor) -> tf.Tensor:
    """Return raw ids of 64 bits, which are far apart."""
    return numbers * (2**55 + 12345) - 2**62


def problem(ids: int, capacity: int, **training: object) -> Problem:
    """Return one whose examples have so many ids, in turn."""
    config = parse_config({"training": training})

    def build_model() -> keras.Model:
        keras.utils.set_random_seed(0)
        given = keras.Input((), dtype="int64")
        found = EmbeddingTable(capacity, 4, shards=3, name=TABLE)(given)
        return keras.Model(given, keras.layers.Dense(2, name="logits")(found))

    def example(number: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return ids_of(number % ids), number % ids % 2

    objective = of_classes(2)
    return Problem(
        build_model=lambda: objective.attach(build_model()),
        build_optimizer=lambda: build_optimizer(config.training),
        loss=objective.loss,
        chance_loss=1.0,
        batches=lambda: tf.data.Dataset.counter().map(example).batch(BATCH),
    )

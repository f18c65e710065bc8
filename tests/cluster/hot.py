"""A problem with an answer that does not depend on who updates when: a gradient that never changes.

The loss is linear in the rows and all batches are the same, so that each update of SGD moves a row
by as often as the batch has it.
"""

from __future__ import annotations

import keras
import tensorflow as tf

from trainer.config.load import parse_config
from trainer.models.registry import reset_uids
from trainer.models.sharded_embedding import ShardedEmbedding
from trainer.strategies.strategy import Problem
from trainer.training.optimizers import build_optimizer

ROWS, RATE = 12, 0.5
# Of a batch, for each of the tables.
IDS = {"split": [1, 1, 5, 7, 10, 10], "whole": [0, 3, 3, 9, 9, 9]}


def linear(**_named: object) -> Problem:
    """Return the problem; all workers take the same batches in the same order."""

    def model() -> keras.Model:
        reset_uids()
        keras.utils.set_random_seed(7)
        given = [keras.Input((), dtype="int64") for _ in IDS]
        rows = [
            ShardedEmbedding(ROWS, 2, name="split")(given[0]),
            keras.layers.Embedding(ROWS, 2, name="whole")(given[1]),
        ]
        return keras.Model(given, keras.layers.Add()(rows))

    def batches() -> tf.data.Dataset:
        ids = tuple(tf.constant(each, tf.int64) for each in IDS.values())
        return tf.data.Dataset.from_tensors((ids, tf.zeros([6]))).repeat()

    # The update with a momentum is atomic, unlike that without.
    optimizer = {"name": "sgd", "learning_rate": RATE, "args": {"momentum": 1e-30}}
    training = parse_config({"training": {"optimizer": optimizer}}).training
    return Problem(
        build_model=model,
        build_optimizer=lambda: build_optimizer(training),
        loss=lambda _model, _batch, rows: tf.reduce_sum(rows),
        chance_loss=1e9,
        batches=batches,
    )

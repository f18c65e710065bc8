"""A problem whose examples differ in length: batches of buckets, padded to their longest."""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf
from keras.src.utils.naming import reset_uids

from tests.cluster.problems import CLASSES, problem
from trainer.data.examples.lengths import bucketed, with_lengths
from trainer.data.records import encode, parse
from trainer.data.spec import DatasetSpec, FeatureSpec
from trainer.strategies.strategy import Problem

EXAMPLES, LONGEST, VOCABULARY = 60, 9, 12
FEATURES = {
    "tokens": FeatureSpec(shape=(None,), dtype="int64", stored="sequence"),
    "tokens_length": FeatureSpec(shape=(), dtype="int64", stored="int"),
    "label": FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=CLASSES),
}


def recurrent() -> keras.Model:
    """Return a small network that masks the padding, with fixed weights."""
    reset_uids()
    keras.utils.set_random_seed(7)
    given = keras.Input((None,), dtype="int64")
    x = keras.layers.Embedding(VOCABULARY, 4, mask_zero=True, name="tokens")(given)
    x = keras.layers.GRU(5, name="gru")(x)
    return keras.Model(given, keras.layers.Dense(CLASSES, name="logits")(x))


def sequences(batch_size: int = 8) -> Problem:
    """Every worker gets the same batches in the same order."""
    draw = np.random.RandomState(3)
    tokens = [draw.randint(1, VOCABULARY, draw.randint(0, LONGEST)) for _ in range(EXAMPLES)]
    columns = with_lengths(
        FEATURES, {"tokens": tokens, "label": draw.randint(0, CLASSES, EXAMPLES)}
    )
    records = list(encode(FEATURES, columns))
    spec = DatasetSpec(
        features=FEATURES, inputs=("tokens",), targets=("label",), shards={"train": (EXAMPLES,)}
    )

    def batches() -> tf.data.Dataset:
        data = tf.data.Dataset.from_tensor_slices(records).repeat()
        found = bucketed(spec, data, (3, 6), batch_size).map(lambda each: parse(FEATURES, each))
        return found.map(lambda each: (each["tokens"], each["label"]))

    return problem(batches, model=recurrent)

"""Tests texts as weighted bags of words and word pairs, in any script and in the Keras file."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf

from flotilla.trainer.config.schema import ModelConfig
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.accumulator import Accumulator
from flotilla.trainer.features.statistics.statistics import Learnt, Statistics
from flotilla.trainer.models import keras_file, registry
from flotilla.trainer.models.spec import InputSpec

TEXT = {"said": FeatureSpec(shape=(), dtype="string", stored="bytes")}
PARTS = ("good", "not good", "bad", "not bad")
ENGLISH = [f"it is {part} number{n}" for n in range(30) for part in PARTS]
CHINESE = [
    f"第{n}天的饭菜{part}。" for n in range(30) for part in ("好吃", "不好吃", "难吃", "不难吃")
]
IS_BAD = [0, 1, 1, 0] * 30


def built(texts, **args):
    found = Accumulator(TEXT, ["said"], [], vocabulary=1000)
    found.add({"said": pa.array([text.encode() for text in texts], pa.large_binary())})
    known = Statistics(splits={"train": found.result()})
    learnt = Learnt(lambda: (statistics.to_bytes(known), "file:///d"))
    spec = InputSpec.of(TEXT, ["said"], (2,), learnt=learnt)
    return registry.build(ModelConfig(name="text", args=args), spec, 0)


@pytest.mark.parametrize("texts", [ENGLISH, CHINESE])
def test_a_word_that_is_negated_is_learnt(texts):
    model = built(texts, hidden_units=[])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.optimizer.learning_rate = 0.03
    model.fit(tf.constant(texts), tf.constant(IS_BAD), epochs=20, batch_size=40, verbose=0)
    # From single words alone, at most three of four texts can be classified correctly.
    answers = model(tf.constant(texts)).numpy().argmax(axis=1)
    assert np.mean(answers == IS_BAD) > 0.9


@pytest.mark.parametrize("texts", [["one two", "three four"], ["one two", "two one"]])
def test_few_texts_that_share_no_pair_or_no_word_are_no_error(texts):
    assert np.isfinite(built(texts)(tf.constant(texts)).numpy()).all()


def test_what_a_text_repeats_counts_once_and_what_is_unknown_never():
    once, twice, unknown, nothing = built(ENGLISH)(
        tf.constant(["good", "Good, good!", "zebra", ""])
    ).numpy()
    first, second = built(ENGLISH)(tf.constant(["good good good", "bad"])).numpy()
    np.testing.assert_allclose(once, twice, rtol=1e-5)
    np.testing.assert_allclose(once, first, rtol=1e-5)
    np.testing.assert_allclose(unknown, nothing)
    assert not np.allclose(first, second)
    assert np.isfinite(nothing).all()


@pytest.mark.parametrize(("texts", "is_plain"), [(ENGLISH, True), (CHINESE, False)])
def test_a_file_answers_as_the_model(tmp_path, texts, is_plain):
    model = built(texts)
    given = tf.constant([*texts[:5], "", "不好 not good", "one"])
    keras_file.plain_model(model).save(tmp_path / "model.keras")
    assert (keras_file.list_modules(tmp_path / "model.keras") == []) == is_plain
    again = keras_file.read(tmp_path / "model.keras")
    np.testing.assert_allclose(again(given), model(given), rtol=1e-5, atol=1e-6)

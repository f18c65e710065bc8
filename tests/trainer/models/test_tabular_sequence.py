"""Tests the sequence model: its inputs, which positions count, and that order matters."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.schema import ModelConfig
from flotilla.trainer.features.dataset_spec import FeatureSpec
from flotilla.trainer.features.statistics.statistics import FeatureStatistics
from flotilla.trainer.models import registry
from flotilla.trainer.models.keras_file import plain_model
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.models.known import learnt

COLUMNS = {
    "prices": FeatureSpec(shape=(None,), dtype="float32", stored="sequence"),
    "moves": FeatureSpec(shape=(None, 2), dtype="float32", stored="sequence"),
    "visits": FeatureSpec(shape=(None,), dtype="int64", stored="sequence"),
    "pages": FeatureSpec(shape=(None,), dtype="string", stored="sequence"),
    "days": FeatureSpec(shape=(7,), dtype="float32", stored="raw"),
    "cube": FeatureSpec(shape=(2, 2, 2), dtype="float32", stored="raw"),
    "age": FeatureSpec(shape=(), dtype="float32", stored="float"),
    "visits_length": FeatureSpec(shape=(), dtype="int64", stored="int"),
}
NUMBERS = {"kind": "tensor", "examples": 9, "mean": 1.0, "std": 2.0}
KNOWN = {
    "prices": FeatureStatistics(**NUMBERS, missing=1),
    "moves": FeatureStatistics(**NUMBERS, means=(0.0, 100.0), stds=(1.0, 50.0)),
    "visits": FeatureStatistics(**NUMBERS, least=0.0, most=9.0),
    "pages": FeatureStatistics(kind="text", examples=9, counts={"home": 5, "cart": 4, "once": 1}),
    "days": FeatureStatistics(**NUMBERS),
    "cube": FeatureStatistics(**NUMBERS),
    "age": FeatureStatistics(kind="number", examples=9, mean=30.0, std=5.0),
    "visits_length": FeatureStatistics(kind="number", examples=9, mean=3.0, std=1.0),
}
EXAMPLES = {
    "prices": np.array([[1.0, 2.0, np.nan], [3.0, 0.0, 0.0]], np.float32),
    "moves": np.arange(12, dtype=np.float32).reshape(2, 3, 2),
    "visits": np.array([[1, 2, 70_000], [3, 0, 0]]),
    "pages": np.array([["home", "cart", "never"], ["cart", "", ""]], object),
    "days": np.ones((2, 7), np.float32),
    "age": np.array([20.0, np.nan], np.float32),
}


def built(*names, output=(2,), **args):
    spec = InputSpec.of(COLUMNS, names, output, learnt=learnt(KNOWN))
    return registry.build(ModelConfig(name="sequence", args={"dimension": 8, **args}), spec, 0)


def given(*names):
    tensors = {name: tf.constant(EXAMPLES[name]) for name in names}
    return tensors if len(names) > 1 else tensors[names[0]]


def padded(x):
    fill = "" if x.dtype == tf.string else 0
    return tf.pad(x, [(0, 0), (0, 5), *[(0, 0)] * (len(x.shape) - 2)], constant_values=fill)


def test_every_kind_of_input_gives_finite_outputs():
    names = tuple(EXAMPLES)
    found = built(*names)(given(*names)).numpy()
    assert found.shape == (2, 2)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("name", ["prices", "moves", "visits", "pages"])
def test_padding_changes_nothing_and_a_plain_file_is_equal(name):
    model = built(name)
    x = given(name)
    expected = model(x).numpy()
    np.testing.assert_allclose(model(padded(x)).numpy(), expected, atol=1e-5)
    plain = plain_model(model)
    assert not [each for each in plain.layers if "flotilla" in type(each).__module__]
    np.testing.assert_allclose(plain(x).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["prices", "visits", "pages"])
def test_the_order_makes_a_difference(name):
    model, x = built(name), given(name)[:1]
    turned = tf.reverse(x, [1])
    assert np.abs(model(x).numpy() - model(turned).numpy()).max() > 1e-4


def test_texts_that_are_not_known_are_places_and_empty_ones_at_the_end_are_none():
    model = built("pages")
    never, once, none, nothing = model(
        tf.constant([["never", ""], ["once", ""], ["", ""], ["", ""]])
    ).numpy()
    # A text that occurs in only one training example is treated as unknown.
    np.testing.assert_allclose(never, once, atol=1e-6)
    np.testing.assert_allclose(none, nothing)
    assert np.abs(never - none).max() > 1e-4


def test_lengths_tell_zeros_from_padding():
    model = built("visits", "visits_length")
    visits = tf.constant([[1, 0, 0], [1, 0, 0]])
    short, long = model({"visits": visits, "visits_length": tf.constant([1, 3])}).numpy()
    assert np.abs(short - long).max() > 1e-4


def test_a_sequence_of_no_place_gives_finite_outputs():
    assert np.isfinite(built("prices")(tf.zeros((2, 1))).numpy()).all()


@pytest.mark.parametrize(
    ("names", "args", "words"),
    [
        (("cube",), {}, "'cube'"),
        (("prices",), {"blocks": 0}, "blocks: 0 is not allowed"),
        (("prices",), {"dropout": 1}, "dropout: 1 is not allowed"),
    ],
)
def test_what_it_does_not_take_is_said_by_one_line(names, args, words):
    with pytest.raises(ConfigError, match=words):
        built(*names, **args)


def test_half_precision_gives_finite_outputs():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert np.isfinite(built("prices")(given("prices")).numpy()).all()
    finally:
        keras.config.set_dtype_policy(policy)

"""Tests that numbers of any magnitude are normalized to mean 0 and variance 1."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.models import registry
from flotilla.trainer.models.normalization import Normalization
from flotilla.trainer.runtime.errors import ConfigError

STEPS = np.array([-2, -1, 0, 1, 2])


def test_small_numbers_of_any_type():
    layer = Normalization(100.0, 0.5)
    for dtype in ("int64", "float64", "float32", "int32", "uint32", "uint8"):
        found = layer(tf.constant(STEPS + 100, dtype))
        assert found.dtype == tf.float32
        np.testing.assert_array_equal(found, STEPS * 2.0, err_msg=dtype)


@pytest.mark.parametrize(
    ("dtype", "mean"), [("int64", 1.7e18), ("float64", 1.7e9), ("int64", -1e15), ("uint64", 1e15)]
)
def test_what_is_left_of_large_numbers_has_all_digits(dtype, mean):
    given = np.array([int(mean)] * 5, object) + STEPS
    found = Normalization(mean, 4.0)(tf.constant(given.tolist(), dtype))
    np.testing.assert_array_equal(found, STEPS / 4)


def test_the_ends_of_64_bits_do_not_wrap():
    ends = tf.constant([-(2**63), 2**63 - 1], tf.int64)
    for mean in (0.0, 9e18, -9.2e18):
        low, high = Normalization(mean, 1.0)(ends).numpy()
        assert low < high
        assert low <= 0 <= high


def test_a_vector_has_a_mean_for_each_element_and_a_gap_stays():
    layer = Normalization((1.0, 1e6), (1.0, 1e3))
    found = layer(tf.constant([[2.0, 1e6 + 1e3], [np.nan, 1e6]]))
    np.testing.assert_array_equal(found, [[1, 1], [np.nan, 0]])
    whole = layer(tf.constant([[2, 10**6 + 10**3]], tf.int64))
    np.testing.assert_array_equal(whole, [[1, 1]])


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_a_model_has_the_same_digits_and_is_saved(policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    try:
        given = keras.Input((), dtype="float64")
        model = keras.Model(given, Normalization(1.7e9, 2.0)(given))
    finally:
        keras.config.set_dtype_policy("float32")
    moments = tf.constant(STEPS + 1.7e9, tf.float64)
    np.testing.assert_array_equal(tf.cast(model(moments), tf.float32), STEPS / 2)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(tf.cast(again(moments), tf.float32), STEPS / 2)


def test_what_lite_cannot_compute_is_refused_before_training():
    given = keras.Input((), dtype="float64"), keras.Input((), dtype="int64")
    layers = Normalization(0.0, 1.0, name="at"), Normalization(0.0, 1.0, name="count")
    both = [layer(each) for layer, each in zip(layers, given, strict=True)]
    with pytest.raises(ConfigError, match=r"export.formats: .* float64 arithmetic, which at needs"):
        registry.require_lite(keras.Model(given, both))
    registry.require_lite(keras.Model(given[1], both[1]))

"""Tests that strings are looked up and numbers of any magnitude are normalized in the graph."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import tensorflow as tf

from flotilla.trainer.embeddings.hashes import strip_spaces
from flotilla.trainer.models import registry
from flotilla.trainer.models.preprocessing import Normalization, Vocabulary, Words
from flotilla.trainer.runtime.errors import ConfigError

CITIES = ["Rome", "Köln", "São Paulo", "x\ny"]


def test_known_values_have_their_place_and_others_none():
    layer = Vocabulary(CITIES)
    assert layer.size == 5
    assert layer(tf.constant([*CITIES, "rome", ""])).numpy().tolist() == [1, 2, 3, 4, 0, 0]
    assert layer(tf.constant([["Rome"], ["?"]])).numpy().tolist() == [[1], [0]]


def test_every_value_of_a_large_vocabulary_is_found():
    values = [f"value {number}" for number in range(50_000)]
    found = Vocabulary(values)(tf.constant(values)).numpy()
    assert found.tolist() == list(range(1, 50_001))


def test_an_empty_vocabulary_knows_nothing():
    assert Vocabulary([])(tf.constant(["a", ""])).numpy().tolist() == [0, 0]
    assert Words([], 2)(tf.constant(["a b c", ""])).numpy().tolist() == [[1, 1], [0, 0]]


def test_words_are_those_of_keras():
    values = ["good", "film", "bad"]
    texts = tf.constant(["Good, GOOD film!!", "a bad-film", "", "  bad\tgood\n"])
    theirs = keras.layers.TextVectorization(vocabulary=values, output_sequence_length=4)
    found = Words(values, 4)(texts).numpy()
    np.testing.assert_array_equal(found, theirs(texts).numpy())
    assert found[0].tolist() == [2, 2, 3, 0]


def test_a_text_is_cut_to_a_length_of_at_least_one():
    assert Words(["a"], 2)(tf.constant(["a b a a"])).numpy().tolist() == [[2, 1]]
    for length in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            Words(["a"], length)


@pytest.mark.parametrize("layer", [Vocabulary(CITIES), Words(["good", "bad"], 3)])
def test_they_are_saved_with_the_model(layer, tmp_path):
    given = keras.Input((), dtype="string")
    model = keras.Model(given, layer(given))
    texts = tf.constant(["Köln", "good bad", "?"])
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(again(texts), model(texts))


def test_a_graph_needs_no_table():
    layer = Vocabulary(CITIES)
    graph = tf.function(layer).get_concrete_function(tf.TensorSpec([None], tf.string))
    assert not {op.type for op in graph.graph.get_operations() if "Table" in op.type}
    assert graph(tf.constant(["Köln"])).numpy().tolist() == [2]


def test_spaces_around_a_text_are_those_that_are_left_out_of_files():
    spaces = [chr(each) for each in range(0x3001) if chr(each).isspace()]
    cut = pc.utf8_trim_whitespace(pa.array([f"{each}Köln{each}" for each in spaces])).to_pylist()
    assert cut == ["Köln"] * len(spaces)
    texts = tf.constant([f"{each}Köln{each} " for each in spaces])
    assert Vocabulary(CITIES)(texts).numpy().tolist() == [2] * len(spaces)
    assert Vocabulary([" Rome\t"])(tf.constant(["Rome", "R ome"])).numpy().tolist() == [1, 0]
    assert Words(["köln"], 1)(texts).numpy().tolist() == [[2]] * len(spaces)
    assert strip_spaces(tf.constant([b"\xff ", b" a\x00"])).numpy().tolist() == [b"\xff", b"a\x00"]


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

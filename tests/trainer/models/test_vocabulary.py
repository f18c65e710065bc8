"""Tests that a vocabulary is constant in the graph and is saved with the model."""

from __future__ import annotations

import keras
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import tensorflow as tf

from flotilla.trainer.embeddings.fingerprints import strip_spaces
from flotilla.trainer.models.vocabulary import Vocabulary, Words

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


def test_a_text_is_cut_to_its_length():
    assert Words(["a"], 2)(tf.constant(["a b a a"])).numpy().tolist() == [[2, 1]]


@pytest.mark.parametrize("length", [0, -1])
def test_a_length_that_cannot_be_is_refused(length):
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

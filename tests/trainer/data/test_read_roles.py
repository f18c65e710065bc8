"""Batches of prepared datasets of every supervised kind: inputs, labels and weights."""

import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.data import made_builders as builders
from trainer import storage
from trainer.data.read import evaluation_batches, training_batches
from trainer.data.spec import DatasetSpec


@pytest.fixture
def batches(prepared):
    """All training examples of a builder as one batch, read in both ways."""

    def read(name, **section):
        dataset = prepared(name, validation=0, **section)
        spec = DatasetSpec.from_manifest(dataset.manifest)
        folder = storage.local_path(dataset.uri)
        files = [folder / each for each in spec.files("train")]
        trained = training_batches(spec, files, batch_size=40, seed=0)
        evaluated = evaluation_batches(spec, files, batch_size=40)
        # With drop_remainder the size of a batch is known.
        known = tf.nest.map_structure(lambda each: each.shape[1:], trained.element_spec)
        assert known == tf.nest.map_structure(lambda each: each.shape[1:], evaluated.element_spec)
        return [next(iter(each.as_numpy_iterator())) for each in (trained, evaluated)]

    return read


def test_several_labels_and_weights(batches):
    section = {"inputs": "x", "label": ("price", "sizes", "sold"), "weight": "times"}
    for inputs, labels, weights in batches("Weighted", **section):
        number = inputs[:, 0]
        assert sorted(number) == list(range(40))
        np.testing.assert_array_equal(labels["price"], number / 8)
        assert labels["price"].dtype == np.float64
        np.testing.assert_array_equal(labels["sizes"], np.stack([number, number / 2, -number], 1))
        np.testing.assert_array_equal(labels["sold"], number % 2 == 0)
        np.testing.assert_array_equal(weights, number % 4)
        assert weights.dtype == np.float32


def test_one_label_of_several_numbers_is_a_tensor(batches):
    for inputs, labels in batches("Weighted", inputs=("x", "times"), label="sizes"):
        assert labels.shape == (40, 3)
        np.testing.assert_array_equal(labels[:, 0], inputs["x"][:, 0])


def test_a_weight_may_be_an_input_and_of_any_type(batches):
    for inputs, _, weights in batches(
        "Weighted", inputs=("sold", "x"), label="price", weight="sold"
    ):
        np.testing.assert_array_equal(weights, inputs["sold"].astype(np.float32))


def test_sequences_to_labels(batches):
    section = {
        "inputs": ("sound", "words"),
        "label": ("kinds", "tags"),
        "shapes": {"sound": (4,), "words": (4,), "kinds": (4,)},
    }
    for inputs, labels in batches("Ragged", **section):
        lengths = (inputs["sound"] > 0).sum(axis=1)
        np.testing.assert_array_equal((labels["kinds"] >= 0).sum(axis=1), lengths)
        np.testing.assert_array_equal((inputs["words"] != b"").sum(axis=1), lengths)
        assert labels["tags"].shape == (40, 3)
        sets = sorted(tuple(np.flatnonzero(each)) for each in labels["tags"])
        assert sets == sorted(tuple(builders.ragged(number)["tags"]) for number in range(40))


def test_a_set_of_labels_may_be_a_sequence(batches):
    shapes = {"sound": (4,), "tags": (2,)}
    for _, labels in batches("Ragged", inputs="sound", label="tags", shapes=shapes):
        expected = [[*builders.ragged(number)["tags"], -1, -1][:2] for number in range(40)]
        assert sorted(labels.tolist()) == sorted(expected)


def test_images_to_masks(batches):
    shapes = {"picture": (6, 6, 3), "mask": (6, 6, 1)}
    for images, masks in batches("Ragged", inputs="picture", label="mask", shapes=shapes):
        assert (images.shape, images.dtype) == ((40, 6, 6, 3), np.uint8)
        assert np.bincount(masks[:, 0, 0, 0]).tolist() == [14, 13, 13]
        assert (masks == masks[:, :1, :1]).all()

"""The examples with the highest losses."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from trainer.data.spec import DatasetSpec, FeatureSpec
from trainer.evaluation.predictions import MOST_WORST, Worst
from trainer.tasks.base import Part, Target
from trainer.tasks.classification import Classification
from trainer.tasks.metrics import losses


def spec_of(**features):
    specs = {
        name: FeatureSpec(shape=shape, dtype=dtype, stored="raw")
        for name, (shape, dtype) in features.items()
    }
    return DatasetSpec(features=specs, inputs=tuple(specs), targets=("l",), shards={})


def looked(tmp_path, spec, inputs, logits, size=7):
    target = Target(name="l", shape=(), dtype="int64", num_classes=3, labels=tuple("abc"))
    worst, labels = Worst(spec, Classification(target)), np.zeros(len(logits), int)
    for start in range(0, len(logits), size):
        batch = slice(start, start + size)
        part = Part(labels[batch], logits[batch], None, {})
        worst.look({n: v[batch] for n, v in inputs.items()}, part)
    return worst.write(tmp_path)


@pytest.fixture
def logits():
    return np.random.default_rng(1).normal(size=(100, 3)).astype(np.float32)


@pytest.mark.parametrize("size", [1, 7, 100])
def test_the_worst_of_all_batches_worst_first(tmp_path, logits, size):
    images = np.arange(100, dtype=np.uint8).reshape(100, 1, 1, 1).repeat(4, 1).repeat(5, 2)
    rows = looked(tmp_path, spec_of(image=((4, 5, 1), "uint8")), {"image": images}, logits, size)
    each = losses(np.zeros(100, int), logits)
    expected = np.argsort(-each)[:MOST_WORST]
    assert [row["index"] for row in rows] == expected.tolist()
    for row in rows:
        assert row["loss"] == pytest.approx(each[row["index"]])
        assert row["probability"] == pytest.approx(np.exp(-row["loss"]), rel=1e-5)
        assert (row["label"], row["predicted"]) == ("a", "abc"[logits[row["index"]].argmax()])
        picture = tf.io.decode_png((tmp_path / row["picture"]).read_bytes()).numpy()
        np.testing.assert_array_equal(picture, images[row["index"]])


def test_an_image_of_floats_is_stretched(tmp_path):
    images = tf.constant([[[[-1.0], [0.0]], [[3.0], [np.nan]]], np.zeros((2, 2, 1))])
    logits = np.zeros((2, 3), np.float32)
    rows = looked(tmp_path, spec_of(image=((2, 2, 1), "float32")), {"image": images}, logits)
    pictures = [
        tf.io.decode_png((tmp_path / row["picture"]).read_bytes()).numpy().ravel() for row in rows
    ]
    assert [picture.tolist() for picture in pictures] == [[0, 64, 255, 64], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("shape", "dtype", "pictured"),
    [
        ((8, 8), "uint8", True), ((8, 8, 3), "uint8", True), ((8, 8, 4), "float32", True),
        ((8, 8, 2), "uint8", False), ((8, 8), "float32", False), ((1, 8, 1), "uint8", False),
        ((64,), "float32", False), ((), "int64", False),
    ],
)  # fmt: skip
def test_what_is_a_picture(tmp_path, shape, dtype, pictured):
    values = {"x": np.zeros((2, *shape), dtype)}
    rows = looked(tmp_path, spec_of(x=(shape, dtype)), values, np.zeros((2, 3), np.float32))
    assert [("picture" in row, "inputs" in row) for row in rows] == [(pictured, not pictured)] * 2


def test_what_is_no_picture_is_described_in_words(tmp_path):
    spec = spec_of(user=((), "int64"), name=((), "string"), row=((20,), "float32"))
    inputs = {
        "user": tf.constant([7]),
        "name": tf.constant(["<b>ö"]),
        "row": tf.constant([[0.5] * 20]),
    }
    [row] = looked(tmp_path, spec, inputs, np.zeros((1, 3), np.float32))
    assert row["inputs"] == "user 7, name <b>ö, row " + "0.5 " * 12 + "..."
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("shape", "dtype", "size"),
    [
        ((3000, 2000, 3), "uint8", (256, 171, 3)),
        ((1000, 300), "uint8", (256, 77, 1)),
        ((2, 2000, 1), "float32", (1, 256, 1)),
        ((256, 256, 1), "uint8", (256, 256, 1)),
    ],
)
def test_a_huge_image_becomes_a_small_picture(tmp_path, shape, dtype, size):
    values = np.zeros((1, *shape), dtype)
    values[:, :, shape[1] // 2 :] = 200
    logits = np.zeros((1, 3), np.float32)
    [row] = looked(tmp_path, spec_of(x=(shape, dtype)), {"x": values}, logits)
    picture = tf.io.decode_png((tmp_path / row["picture"]).read_bytes()).numpy()
    assert picture.shape == size
    left, right = picture[:, : size[1] // 2 - 1], picture[:, size[1] // 2 + 1 :]
    assert (left == 0).all()
    assert (right == (200 if dtype == "uint8" else 255)).all()


def test_each_input_of_a_worst_example_has_its_name(tmp_path):
    spec = spec_of(user=((), "int64"), row=((2,), "float32"))
    inputs = {"user": tf.constant([7]), "row": tf.constant([[0.5, float("nan")]])}
    [row] = looked(tmp_path, spec, inputs, np.zeros((1, 3), np.float32))
    assert row["columns"] == {"user": 7, "row": "0.5 nan"}

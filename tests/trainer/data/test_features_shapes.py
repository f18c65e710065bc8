"""Tests examples of varying shape: a configured shape, padding, cropping and rejection."""

import logging

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.builders.batches import fit_value
from flotilla.trainer.data.features import Fit, select
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.data import made_builders as builders
from tests.trainer.data.test_features import of

# Shapes of all features of `Ragged`. A set of tags becomes one bool per class.
SHAPES = {
    "picture": (4, 2, 3),
    "mask": (4, 2, 1),
    "clip": (3, 2, 2, 1),
    "sound": (3,),
    "words": (3,),
    "grid": (3, 2),
    "boxes/size": (3,),
    "kinds": (3,),
    "flags": (3,),
}


@pytest.fixture
def ragged(tmp_path):
    def make(**section):
        return select(
            DataConfig(dataset="Ragged", **section), builders.Ragged(data_dir=tmp_path).info
        )

    return make


@pytest.mark.parametrize(
    ("feature", "form", "example"),
    [
        (
            tfds.features.Image(shape=(None, None, 3)),
            "'x' (uint8 of shape (None, None, 3))",
            "{x: [64, 64, 3]}",
        ),
        (tfds.features.Image(shape=(None, 32, 1)), "(None, 32, 1)", "{x: [64, 32, 1]}"),
        (tfds.features.Video(shape=(None, 8, 8, 3)), "(None, 8, 8, 3)", "{x: [16, 8, 8, 3]}"),
        (tfds.features.Audio(), "'x' (int64 of shape (None,))", "{x: [16000]}"),
        (tfds.features.Audio(sample_rate=8000), "(None,)", "{x: [8000]}"),
        (tfds.features.Sequence(np.int32), "'x' (int32 of shape (None,))", "{x: [64]}"),
        (tfds.features.Sequence({"a": np.int32}), "'x/a' (int32", "{x/a: [64]}"),
        (
            {"a": tfds.features.Sequence(np.int32), "b": tfds.features.Sequence(np.int8)},
            "'x/a' (int32 of shape (None,)), 'x/b' (int8 of shape (None,))",
            "{x/a: [64], x/b: [64]}",
        ),
    ],
)
def test_a_shape_that_is_not_fixed_is_asked_for_with_an_example(feature, form, example, tmp_path):
    with pytest.raises(ConfigError) as caught:
        of({"x": feature, "label": np.int64}, ("x", "label"), tmp_path)
    message = str(caught.value)
    assert message.startswith("data.shapes: examples of made differ in the shape of 'x")
    assert form in message
    assert message.endswith(f"; set data.shapes to {example} or other sizes")


@pytest.mark.parametrize(("set_", "asked"), [({}, 10), ({"sound": (5,)}, 5)])
def test_what_is_asked_for_is_taken_and_what_is_set_stays_in_the_example(ragged, set_, asked):
    roles = {"inputs": ("sound", "words"), "label": "tags"}
    expected = (
        rf"\{{sound: \[{asked}\], words: \[64\]\}} or other sizes; 'tags' is read as a set of "
        "classes or, if you set a length, as one class at each position$"
    )
    with pytest.raises(ConfigError, match=expected):
        ragged(**roles, shapes=set_)
    found = ragged(**roles, shapes={"sound": (asked,), "words": (64,)})
    assert found.specs["sound"].shape == (asked,)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            {"pictur": (8, 8, 3)},
            "data.shapes: there is no feature 'pictur' in Ragged; did you mean 'picture'?",
        ),
        (
            {"picture": (8, 8)},
            "data.shapes: picture: [8, 8] does not match uint8 of shape (None, None, 3); set a "
            "shape such as [64, 64, 3]",
        ),
        ({"picture": (8, 8, 1)}, "data.shapes: picture: [8, 8, 1] does not match uint8 of shape "),
        ({"sound": (5, 5)}, "data.shapes: sound: [5, 5] does not match int64 of shape (None,); "),
    ],
)
def test_a_shape_that_does_not_suit_is_refused(ragged, shapes, message):
    with pytest.raises(ConfigError) as caught:
        ragged(shapes=shapes)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("feature", "what"),
    [(tfds.features.Text(), "a single value"), (tfds.features.Dataset(np.int32), "a dataset in")],
    ids=["text", "dataset"],
)
def test_what_has_no_shape_of_its_own_gets_none(feature, what, tmp_path):
    features = {"x": np.float32, "more": feature, "label": np.int64}
    with pytest.raises(ConfigError, match=f"the feature 'more' of made is {what}"):
        of(features, ("x", "label"), tmp_path, shapes={"more": (3,)})


def test_a_dataset_in_each_example_is_no_input(tmp_path):
    features = {"x": tfds.features.Dataset(np.float32), "y": np.float32, "label": np.int64}
    with pytest.raises(ConfigError, match=r"data.inputs: 'x' of made is a nested dataset"):
        of(features, ("x", "label"), tmp_path)
    assert of(features, ("x", "label"), tmp_path, inputs="y").inputs == ("y",)


def test_a_fixed_shape_may_become_another_one(tmp_path):
    image = tfds.features.Image(shape=(4, 4, 3))
    found = of({"x": image, "label": np.int64}, ("x", "label"), tmp_path, shapes={"x": (2, 2, 3)})
    assert found.specs["x"].shape == (2, 2, 3)


def test_a_set_of_classes_becomes_a_bool_for_each(ragged, caplog):
    caplog.set_level(logging.INFO)
    found = ragged(inputs="sound", label="tags", shapes={"sound": (3,)})
    tags = found.specs["tags"]
    assert (tags.shape, tags.dtype, tags.num_classes) == ((3,), "bool", 3)
    assert "Ragged: tags is stored as [3] by multi_hot" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "stored"), [(np.int32, "int32"), (np.uint8, "int64"), (np.bool_, "int64")]
)
def test_a_sequence_of_labels_can_hold_what_is_no_label(dtype, stored, tmp_path):
    features = {"x": np.float32, "y": tfds.features.Sequence(dtype)}
    found = of(features, ("x", "y"), tmp_path, shapes={"y": (4,)})
    assert (found.specs["y"].dtype, found.fits["y"].fill) == (stored, -1)


@pytest.mark.slow
def test_of_every_kind_it_is_what_is_expected(prepared, contents):
    """Every stored record equals what NumPy computes from the example."""
    section = {"shapes": SHAPES, "label": ("kinds", "tags"), "validation": 0}
    values = contents(prepared("Ragged", **section), "train")
    order = values["sound"].argsort(axis=0)[:, 0]
    assert len(order) == 40
    expected = [by_numpy(builders.ragged(number)) for number in range(40)]
    for name in ("clip", "sound", "words", "grid", "boxes/size", "kinds", "flags", "tags"):
        found = sorted(each.tolist() for each in values[name])
        assert found == sorted(each[name] for each in expected), name
    assert values["picture"].shape == (40, 4, 2, 3)
    assert values["picture"].dtype == np.uint8
    # Resizing a mask must not create new values.
    assert set(np.unique(values["mask"])) == {0, 1, 2}


def by_numpy(example):
    def padded(values, fill):
        return [*values[:3], *[fill] * (3 - len(values))]

    rows = [[*row, 0, 0][:2] for row in example["grid"]]
    return {
        "clip": padded([frame.tolist() for frame in example["clip"]], np.zeros((2, 2, 1)).tolist()),
        "sound": padded(example["sound"].tolist(), 0),
        "words": padded([word.encode() for word in example["words"]], b""),
        "grid": padded(rows, [0, 0]),
        "boxes/size": padded(example["boxes"]["size"], 0.0),
        "kinds": padded(example["kinds"], -1),
        "flags": padded(example["flags"], False),
        "tags": [number in example["tags"] for number in range(3)],
    }


def resized(image, *shape, method="resize"):
    fit = Fit(method=method, shape=shape, dtype=image.dtype.name)
    return fit_value(fit, tf.constant(image)).numpy()


def test_an_image_keeps_its_brightness():
    image = np.full((7, 5, 3), 200, np.uint8)
    image[:, :2] = 100
    assert abs(resized(image, 14, 10, 3).mean() - image.mean()) < 2
    # At a quarter of the size, each pixel is the mean of sixteen pixels.
    checks = np.indices((16, 16)).sum(0)[..., None] % 2 * np.uint8(255)
    small = resized(checks.astype(np.uint8), 4, 4, 1)
    assert abs(small.astype(int) - 128).max() < 20


@pytest.mark.parametrize(("dtype", "top"), [("uint8", 255), ("uint16", 65535), ("float32", 1.0)])
def test_an_image_keeps_its_type_and_its_range(dtype, top):
    found = resized(np.full((2, 2, 1), top, dtype), 3, 5, 1)
    assert (found.dtype, found.min(), found.max()) == (np.dtype(dtype), top, top)


def test_a_mask_takes_the_nearest_class():
    mask = np.array([[0, 9], [0, 9]], np.uint8)[..., None]
    found = resized(mask, 4, 4, 1, method="nearest")
    np.testing.assert_array_equal(found[..., 0], [[0, 0, 9, 9]] * 4)

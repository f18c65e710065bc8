"""Tests that the fast PNG encoder keeps all pixels and is used only where it is safe."""

import io

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flotilla.trainer.data import images as module
from flotilla.trainer.data.builders import datasets
from flotilla.trainer.data.images import encode_png


def picture(*shape, seed=0):
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


@settings(deadline=None, max_examples=40)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    channels=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 1000),
)
def test_tensorflow_reads_the_same_pixels(height, width, channels, seed):
    image = picture(height, width, channels, seed=seed)
    np.testing.assert_array_equal(tf.io.decode_png(encode_png(image)).numpy(), image)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_others_read_the_same_pixels(channels, mode):
    image = picture(5, 7, channels)
    with Image.open(io.BytesIO(encode_png(image))) as found:
        found.load()
        assert (found.format, found.mode) == ("PNG", mode)
        np.testing.assert_array_equal(np.asarray(found).reshape(image.shape), image)


def test_an_image_that_is_no_copy_of_its_own():
    image = picture(8, 6, 3)[::2, ::-1]
    np.testing.assert_array_equal(tf.io.decode_png(encode_png(image)).numpy(), image)


@pytest.fixture
def encoded(monkeypatch):
    """Return the images that the fast encoder was called with."""
    images = []
    encode = encode_png
    monkeypatch.setattr(module, "encode_png", lambda each: images.append(each) or encode(each))
    return images


def quickened(**options):
    feature = tfds.features.Image(**options)
    datasets.quicken([tfds.features.Text(), feature])
    return feature


@pytest.mark.parametrize("encoding", [None, "png"])
def test_a_feature_is_quickened(encoded, encoding):
    feature = quickened(shape=(4, 5, 3), encoding_format=encoding)
    image = picture(4, 5, 3)
    np.testing.assert_array_equal(feature.decode_example(feature.encode_example(image)), image)
    assert len(encoded) == 1


@pytest.mark.parametrize(
    ("options", "image"),
    [
        ({"shape": (4, 5, 3), "encoding_format": "jpeg"}, picture(4, 5, 3)),
        ({"shape": (None, None, 3)}, picture(4, 5, 3)),
        ({"shape": (4, 5, 1), "dtype": np.uint16}, picture(4, 5, 1).astype(np.uint16)),
        ({"shape": (4, 5, 1), "dtype": np.float32}, picture(4, 5, 1).astype(np.float32)),
        ({"shape": (4, 5, 2)}, picture(4, 5, 2)),
    ],
    ids=["jpeg", "variable", "uint16", "float32", "two channels"],
)
def test_other_features_are_left_alone(encoded, options, image):
    theirs = tfds.features.Image(**options).encode_example(image)
    assert quickened(**options).encode_example(image) == theirs
    assert not encoded


def test_a_subclass_is_left_alone(encoded):
    class Own(tfds.features.Image):
        def encode_example(self, _):
            return b"own"

    feature = Own(shape=(4, 5, 3))
    datasets.quicken([feature])
    assert feature.encode_example(picture(4, 5, 3)) == b"own"
    assert not encoded


@pytest.mark.parametrize("kind", ["path", "bytes", "file", "pil"])
def test_other_values_go_the_other_way(encoded, tmp_path, kind):
    image = picture(4, 5, 3)
    data = encode_png(image)
    encoded.clear()
    (tmp_path / "image.png").write_bytes(data)
    value = {
        "path": tmp_path / "image.png",
        "bytes": data,
        "file": io.BytesIO(data),
        "pil": Image.fromarray(image),
    }[kind]
    feature = quickened(shape=(4, 5, 3), encoding_format="png")
    np.testing.assert_array_equal(feature.decode_example(feature.encode_example(value)), image)
    assert not encoded


@pytest.mark.parametrize(
    "value", [picture(5, 4, 3), picture(4, 5, 3).astype(np.int64)], ids=["shape", "type"]
)
def test_a_wrong_array_is_refused_as_before(encoded, value):
    with pytest.raises((ValueError, AssertionError)):
        quickened(shape=(4, 5, 3)).encode_example(value)
    assert not encoded

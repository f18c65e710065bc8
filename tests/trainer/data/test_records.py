"""Records are read as they were written, for every type, in whole batches."""

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.data.features import choose_stored_form
from flotilla.trainer.data.records import encode, parse
from flotilla.trainer.features.feature_spec import FeatureSpec

NUMBERS = [
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "bool",
]  # fmt: skip


def feature(shape, dtype):
    return FeatureSpec(shape=shape, dtype=dtype, stored=choose_stored_form(shape, dtype))


def values(dtype, shape, examples=5):
    """Numbers of the whole range of the type, its ends included."""
    size = (examples, *shape)
    kind = np.dtype(dtype)
    draw = np.random.RandomState(1)
    if kind.kind == "b":
        return draw.randint(0, 2, size).astype(bool)
    if kind.kind == "f":
        limits = np.finfo(kind)
        found = draw.standard_normal(size).astype(kind)
    else:
        limits = np.iinfo(kind)
        found = draw.randint(0, 100, size).astype(kind)
    found.flat[0], found.flat[-1] = limits.min, limits.max
    return found


def there_and_back(features, batch):
    return parse(features, tf.constant(list(encode(features, batch))))


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 1, 2)], ids=str)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_numbers(dtype, shape):
    written = values(dtype, shape)
    read = there_and_back({"x": feature(shape, dtype)}, {"x": written})["x"]
    assert read.dtype == tf.as_dtype(dtype)
    assert read.shape == written.shape
    np.testing.assert_array_equal(read.numpy(), written)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_no_number_and_infinity(dtype):
    written = np.array([np.nan, np.inf, -np.inf, -0.0], dtype)
    read = there_and_back({"x": feature((), dtype)}, {"x": written})["x"].numpy()
    assert read.tobytes() == written.tobytes()


@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_short_floats(shape):
    written = np.ones((3, *shape), ml_dtypes.bfloat16)
    read = there_and_back({"x": feature(shape, "bfloat16")}, {"x": written})["x"]
    assert read.dtype == tf.bfloat16
    np.testing.assert_array_equal(read.numpy(), written)


@pytest.mark.parametrize("shape", [(), (2,), (2, 2)], ids=str)
def test_texts(shape):
    words = np.array([b"", "äöü".encode(), b"\x00\xff", b"plain"] * 4, object)
    written = words[: 2 * int(np.prod(shape))].reshape(2, *shape)
    read = there_and_back({"x": feature(shape, "string")}, {"x": written})["x"]
    assert read.dtype == tf.string
    assert read.numpy().tolist() == written.tolist()


@pytest.mark.parametrize(
    ("shape", "dtype", "form"),
    [
        ((28, 28, 1), "uint8", "raw"),
        ((3,), "int64", "raw"),
        ((), "int64", "int"),
        ((), "uint8", "int"),
        ((), "bool", "int"),
        ((), "uint64", "raw"),
        ((), "float32", "float"),
        ((), "float16", "float"),
        ((), "float64", "raw"),
        ((), "complex64", "raw"),
        ((), "string", "bytes"),
        ((4,), "string", "bytes"),
    ],
)
def test_the_stored_form(shape, dtype, form):
    assert choose_stored_form(shape, dtype) == form


def test_a_record_is_a_plain_example():
    features = {"image": feature((2, 2), "uint8"), "label": feature((), "int64")}
    batch = {"image": np.arange(4, dtype=np.uint8).reshape(1, 2, 2), "label": np.array([7])}
    (record,) = encode(features, batch)
    example = tf.train.Example.FromString(record)
    assert example.features.feature["image"].bytes_list.value[:] == [bytes([0, 1, 2, 3])]
    assert example.features.feature["label"].int64_list.value[:] == [7]


@pytest.mark.parametrize("size", [0, 1, 200, 70_000])
def test_a_record_is_what_protobuf_writes(size):
    """Also where lengths take several bytes, and numbers are negative."""
    features = {
        "zebra": feature((), "int64"),
        "ä" * 100: feature((), "float32"),
        "raw": feature((size,), "uint8"),
        "texts": feature((2,), "string"),
        "flag": feature((), "bool"),
        "flag1": feature((), "bool"),
        "flag10": feature((), "bool"),
    }
    numbers = np.array([0, 1, 127, 128, 300, -1, 2**63 - 1, -(2**63), 1, 2**31])
    batch = {
        "zebra": numbers,
        "ä" * 100: (numbers / 7).astype(np.float32),
        "raw": np.full((10, size), 7, np.uint8),
        "texts": np.array([[b"x" * size, b""]] * 10, object),
        **dict.fromkeys(("flag", "flag1", "flag10"), numbers % 2 == 0),
    }
    for index, record in enumerate(encode(features, batch)):
        example = tf.train.Example()
        wire = example.features.feature
        wire["zebra"].int64_list.value.append(int(numbers[index]))
        wire["ä" * 100].float_list.value.append(float(batch["ä" * 100][index]))
        wire["raw"].bytes_list.value.append(b"\x07" * size)
        wire["texts"].bytes_list.value.extend([b"x" * size, b""])
        for flag in ("flag", "flag1", "flag10"):
            wire[flag].int64_list.value.append(int(batch[flag][index]))
        assert record == example.SerializeToString(deterministic=True)


def test_the_same_content_gives_the_same_bytes():
    features = {name: feature((), "int64") for name in "zyxabc"}
    batch = {name: np.arange(3) for name in features}
    turned = dict(reversed(features.items()))
    assert list(encode(features, batch)) == list(encode(turned, batch))


def test_tensors_that_are_no_copies_of_their_own():
    whole = np.arange(24, dtype=np.int32).reshape(2, 3, 4)
    written = whole.transpose(0, 2, 1)[:, ::2]
    read = there_and_back({"x": feature((2, 3), "int32")}, {"x": written})["x"]
    np.testing.assert_array_equal(read.numpy(), written)


def test_only_what_is_wanted_is_read():
    features = {"x": feature((), "int64"), "y": feature((2,), "float32")}
    records = list(encode(features, {"x": np.arange(2), "y": np.ones((2, 2))}))
    assert list(parse({"x": features["x"]}, tf.constant(records))) == ["x"]


def test_nothing_may_be_wanted():
    records = list(encode({"x": feature((), "int64")}, {"x": np.arange(2)}))
    assert parse({}, tf.constant(records)) == {}


def test_a_feature_that_is_missing_is_an_error():
    features = {"x": feature((), "int64")}
    records = tf.constant(list(encode(features, {"x": np.arange(2)})))
    with pytest.raises(tf.errors.InvalidArgumentError, match="other"):
        parse({"other": feature((), "int64")}, records)


def test_columns_of_different_lengths_are_an_error():
    features = {"x": feature((), "int64"), "y": feature((), "int64")}
    with pytest.raises(ValueError, match="shorter"):
        list(encode(features, {"x": np.arange(3), "y": np.arange(2)}))


def test_the_shape_is_known_in_a_graph():
    features = {"image": feature((2, 3), "uint8"), "label": feature((), "int64")}
    element = (
        tf.data.Dataset.from_tensors(b"").batch(8).map(lambda records: parse(features, records))
    )
    assert element.element_spec["image"].shape.as_list() == [None, 2, 3]
    assert element.element_spec["label"].shape.as_list() == [None]


def test_the_size_of_a_batch_stays_known():
    features = {"image": feature((2, 3), "uint8"), "label": feature((), "int64")}
    records = tf.data.Dataset.from_tensors(b"").batch(8, drop_remainder=True)
    element = records.map(lambda batch: parse(features, batch)).element_spec
    assert element["image"].shape.as_list() == [8, 2, 3]
    assert element["label"].shape.as_list() == [8]

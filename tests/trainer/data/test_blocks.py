"""Tests that rows are read back unchanged from blocks, and sequences of varying length."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import blocks
from flotilla.trainer.data.blocks import (
    BYTES,
    choose_rows,
    complete,
    encode_blocks,
    parse_blocks,
    parse_rows,
)
from flotilla.trainer.data.columns import make_columns, make_table
from flotilla.trainer.data.features import choose_stored_form
from flotilla.trainer.data.prepare import prepare, select_features
from flotilla.trainer.data.read import (
    evaluation_batches,
    labelled_columns,
    read_rows,
    training_batches,
)
from flotilla.trainer.features.dataset_spec import BLOCK_ROWS, DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.data import made_builders as builders

NUMBERS = [
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "bool", "bfloat16",
]  # fmt: skip
SHAPES = [(), (3,), (2, 3), (2, 0), (2, 1, 2)]


def feature(shape, dtype):
    return FeatureSpec(shape=shape, dtype=dtype, stored=choose_stored_form(shape, dtype))


def sequence(inner, dtype, padding=0):
    return FeatureSpec(shape=(None, *inner), dtype=dtype, stored="sequence", padding=padding)


LENGTH = FeatureSpec(shape=(), dtype="int64", stored="int")


def encode(features, batch, size=2):
    features = features | {length_name(name): LENGTH for name in features if features[name].varies}
    table = make_table(features, make_columns(features, batch))
    return list(encode_blocks(features, table, size))


def decode(features, blocks):
    return complete(features, parse_blocks(features, tf.constant(blocks)))


def there_and_back(features, batch, size=2):
    return decode(features, encode(features, batch, size))


def kind(dtype):
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


def draw_numbers(draw, dtype, shape):
    """Return values with random bits, so that every bit pattern can occur; a bool is 0 or 1."""
    size = int(np.prod(shape))
    data = np.random.RandomState(draw(st.integers(0, 1 << 30))).bytes(
        size * np.dtype(kind(dtype)).itemsize
    )
    if dtype == "bool":
        return (np.frombuffer(data, np.uint8) % 2).astype(bool).reshape(shape)
    return np.frombuffer(data, kind(dtype)).reshape(shape).copy()


@st.composite
def numbers(draw):
    dtype, shape = draw(st.sampled_from(NUMBERS)), draw(st.sampled_from(SHAPES))
    return feature(shape, dtype), draw_numbers(draw, dtype, (draw(st.integers(1, 9)), *shape))


def as_bytes(values):
    """Return the values' bits, with a single bit pattern for all NaNs."""
    if values.dtype.kind in "fV":
        with np.errstate(invalid="ignore"):
            wide = values.astype(np.float64)
        return np.where(np.isnan(wide), np.nan, wide).tobytes()
    return values.tobytes()


@given(numbers(), st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_numbers_of_a_fixed_shape(case, size):
    spec, written = case
    read = there_and_back({"x": spec}, {"x": written}, size)["x"]
    assert read.dtype == tf.as_dtype(spec.dtype)
    assert read.shape == written.shape
    assert as_bytes(read.numpy()) == as_bytes(written)


TEXTS = st.binary(max_size=9) | st.binary(min_size=300, max_size=310)


@given(st.sampled_from([(), (1,), (2,), (2, 2)]), st.data(), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_texts(shape, data, size):
    rows, values = data.draw(st.integers(1, 7)), int(np.prod(shape))
    every = data.draw(st.lists(TEXTS, min_size=rows * values, max_size=rows * values))
    written = np.array([*every, None], object)[:-1].reshape(rows, *shape)
    read = there_and_back({"x": feature(shape, "string")}, {"x": written}, size)["x"]
    assert read.numpy().tolist() == written.tolist()


@given(
    st.sampled_from([*NUMBERS, "string"]),
    st.sampled_from([(), (2,), (2, 3)]),
    st.lists(st.integers(0, 4), min_size=1, max_size=9),
    st.integers(1, 4),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_sequences_are_padded_or_cut(dtype, inner, lengths, size, data):
    fixed = data.draw(st.sampled_from([None, None, 2, 5]))
    padding = -1 if dtype.startswith("int") else 0
    written = [
        draw_numbers(data.draw, dtype, (each, *inner))
        if dtype != "string"
        else np.array([b"a" * n for n in range(each * int(np.prod(inner)))], object).reshape(
            each, *inner
        )
        for each in lengths
    ]
    spec = sequence(inner, dtype, padding)
    records = encode({"x": spec}, {"x": written}, size)
    read = decode({"x": replace(spec, shape=(fixed, *inner))}, records)["x"].numpy()
    # A batch of empty sequences has one place.
    assert read.shape == (len(lengths), fixed or max(1, *lengths), *inner)
    for row, every in zip(read, written, strict=True):
        values = every[:fixed]
        if dtype == "string":
            assert row[: len(values)].tolist() == values.tolist()
        else:
            assert as_bytes(row[: len(values)]) == as_bytes(values)
        rest = row[len(values) :]
        assert (rest == (b"" if dtype == "string" else np.array(padding).astype(rest.dtype))).all()


def test_rows_of_the_whole_range():
    written = np.array([0, 1, -1, 127, 128, 1 << 40, -(1 << 63), (1 << 63) - 1])
    for size in (1, 3, 8):
        read = there_and_back({"x": feature((), "int64")}, {"x": written}, size)["x"]
        np.testing.assert_array_equal(read.numpy(), written)


EVERY = {
    "class": feature((), "int64"),
    "number": feature((), "float32"),
    "exact": feature((), "float64"),
    "text": feature((), "string"),
    "vector": feature((2,), "int32"),
    "words": sequence((), "string"),
    "points": sequence((2,), "float32"),
    "": feature((), "bool"),
    "\0rows": feature((), "int16"),
    "ünï/code": feature((2,), "string"),
}


def every(rows):
    lengths = [n % 4 for n in range(rows)]
    return {
        "class": np.arange(rows),
        "number": np.arange(rows, dtype=np.float32),
        "exact": np.arange(rows) / 3,
        "text": [str(n).encode() for n in range(rows)],
        "vector": np.arange(2 * rows).reshape(rows, 2),
        "words": [np.array([b"w"] * n, object) for n in lengths],
        "points": [np.full((n, 2), n, np.float32) for n in lengths],
        "": np.arange(rows) % 2 == 0,
        "\0rows": np.arange(rows) + 1000,
        "ünï/code": np.array([[b"a", str(n).encode()] for n in range(rows)], object),
    }


@pytest.mark.parametrize("size", [1, 4, 100])
def test_features_of_all_kinds_stay_rows(size):
    read = there_and_back(EVERY, every(11), size)
    np.testing.assert_array_equal(read["class"], np.arange(11))
    np.testing.assert_array_equal(read["exact"], np.arange(11) / 3)
    assert [int(each) for each in read["text"].numpy()] == list(range(11))
    np.testing.assert_array_equal(read["\0rows"], np.arange(11) + 1000)
    np.testing.assert_array_equal(read["points"][7], np.full((3, 2), 3.0))
    assert read["ünï/code"][10].numpy().tolist() == [b"a", b"10"]


def test_some_features_of_a_block_and_equal_rows_that_give_equal_bytes():
    blocks = encode(EVERY, every(9))
    read = parse_blocks({"points": EVERY["points"]}, tf.constant(blocks))
    assert list(read) == ["points"]
    assert read["points"].row_lengths().numpy().tolist() == [n % 4 for n in range(9)]
    assert blocks == encode(dict(reversed(EVERY.items())), every(9))


def test_a_part_of_a_table():
    features = {"x": EVERY["text"]}
    table = make_table(features, make_columns(features, {"x": [b"a", b"bc", b"d"]}))
    found = decode(features, list(encode_blocks(features, table.slice(1, 2), 9)))
    assert found["x"].numpy().tolist() == [b"bc", b"d"]


@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        (sequence((2,), "int64"), [None, None, 2]),
        (sequence((2,), "string"), [None, None, 2]),
        (FeatureSpec(shape=(6, 8, 3), dtype="uint8", stored="image"), [None, 6, 8, 3]),
    ],
)
def test_the_shape_is_known_in_a_graph(spec, shape):
    records = tf.data.Dataset.from_tensors(b"").batch(1)
    element = records.map(lambda each: complete({"x": spec}, parse_blocks({"x": spec}, each)))
    assert element.element_spec["x"].shape.as_list() == shape


def test_a_block_of_one_row_is_what_clients_send():
    records = encode(EVERY, every(5), size=1)
    as_rows, as_blocks = parse_rows(EVERY_NAMED, records), decode(EVERY_NAMED, records)
    for name in EVERY_NAMED:
        np.testing.assert_array_equal(as_rows[name].numpy(), as_blocks[name].numpy(), name)


EVERY_NAMED = {name: each for name, each in EVERY.items() if not name.startswith("\0")}


def test_the_rows_of_a_block():
    assert choose_rows(10**6, 60 * 10**6, 100) == BLOCK_ROWS
    assert choose_rows(1000, 1000 * BYTES // 10, BYTES) == 10
    assert choose_rows(10, 10 * 2 * BYTES, 2 * BYTES) == 1
    # One row of a million has 60 MiB.
    assert choose_rows(10**6, 10**8, 60 << 20) == 1
    assert choose_rows(1, 0, 0) == BLOCK_ROWS


class Sentences(builders.Small):
    """Sentence `number` has `number % 7` words, with one tag per word."""

    keys = ("tokens", "tags")
    sizes = {"train": 60, "test": 9}  # noqa: RUF012

    def features(self):
        return {
            "tokens": tfds.features.Sequence(np.int32),
            "words": tfds.features.Sequence(tfds.features.Text()),
            "points": tfds.features.Tensor(shape=(None, 2), dtype=np.float32),
            "tags": tfds.features.Sequence(tfds.features.ClassLabel(num_classes=3)),
            "number": np.int64,
        }

    def example(self, number):
        count = number % 7
        return {
            "tokens": [number + 1] * count,
            "words": [f"w{number}"] * count,
            "points": np.full((count, 2), number, np.float32),
            "tags": [number % 3] * count,
            "number": number,
        }


VARYING = {"tokens": (0,), "tags": (0,), "words": (0,), "points": (0, 2)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentences")
    config = DataConfig(dataset=f"{__name__}:Sentences", shards=2, shapes=VARYING)
    return prepare(config, storage.uri_of(folder / "root"), folder / "scratch")


@pytest.fixture
def sentences(made):
    spec = DatasetSpec.from_manifest(made.manifest)
    folder = storage.local_path(made.uri)
    return spec, [folder / name for name in spec.files("train")]


def test_a_dataset_of_tfds(made, contents):
    found = contents(made, "test")
    spec = DatasetSpec.from_manifest(made.manifest)
    assert spec.features["tokens"].shape == (None,)
    assert spec.inputs == ("tokens",)
    assert spec.features["tags"].num_classes == 3
    for row, number in enumerate(found["number"].tolist()):
        count = number % 7
        assert found["tokens_length"][row] == count
        tokens = found["tokens"][row].tolist()
        assert tokens == [number + 1] * count + [0] * (len(tokens) - count)
        assert (found["tags"][row, count:] == -1).all()
        assert found["words"][row, :count].tolist() == [f"w{number}".encode()] * count
        assert (found["points"][row, :count] == number).all()


def test_an_epoch_holds_every_example_once(sentences):
    spec, files = sentences
    count = spec.examples("train")
    batches = training_batches(spec, files, batch_size=1, seed=3)
    seen = [x.numpy().max() for x, _ in batches.take(2 * count)]
    assert sorted(seen[:count]) == sorted(seen[count:])
    assert len({each for each in seen if each}) == sum(1 for each in seen[:count] if each)
    # Batches are padded to their longest example.
    for inputs, labels in training_batches(spec, files, batch_size=4, seed=3).take(20):
        assert inputs.shape == labels.shape
        assert inputs.shape[1] == max(1, int(tf.reduce_max(tf.math.count_nonzero(inputs, 1))))


def test_buckets_hold_examples_of_like_lengths(sentences):
    spec, files = sentences
    count = spec.examples("train")
    batches = training_batches(spec, files, batch_size=4, seed=3, buckets=(2, 4))
    seen = []
    for inputs, _ in batches.take(count):
        found = tf.math.count_nonzero(inputs, 1).numpy()
        assert len(found) == 4
        assert len(set(np.digitize(found, [3, 5]))) == 1
        seen += inputs.numpy().max(1).tolist()
    # At the end, each of the three buckets may hold back up to three examples.
    times = np.bincount(np.array(seen, int))[1:]
    held_back = 3 * 3
    assert abs(times[times > 0] - 4).sum() <= held_back


def test_evaluation_has_one_length(sentences):
    spec, files = sentences
    widths = {x.shape[1] for x, _ in evaluation_batches(spec, files, batch_size=5)}
    assert len(widths) > 1 or widths == {6}
    read = labelled_columns(spec, files, batch_size=5, columns=["words"])
    shapes = {(x.shape[1], y.shape[1], c["words"].shape[1]) for (x, y), c in read}
    assert len({(x, y) for x, y, _ in shapes}) == 1
    windows = read_rows(spec, files, blocks.length_names(spec))
    assert blocks.longest(spec, windows) == {"tokens": 6, "tags": 6}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({**VARYING, "points": (0, 0)}, "only the first size of a sequence may be 0"),
        ({**VARYING, "points": (4, 0)}, "only the first size"),
        ({**VARYING, "points": (0, 3)}, r"set it to \[0, 2\]"),
        ({**VARYING, "number": (0,)}, "is a single value; leave it out"),
        ({**VARYING, "tokenz": (0,)}, "there is no feature 'tokenz'"),
    ],
)
def test_shapes_that_cannot_vary(prepared, shapes, message):
    with pytest.raises(ConfigError, match=message):
        prepared("", dataset=f"{__name__}:Sentences", shapes=shapes)
    with pytest.raises(ConfigError, match=r"data\.buckets: no input or label varies in length"):
        prepared("Small", buckets=(2, 4))


def test_a_length_may_be_an_input(tmp_path):
    inputs = ("tokens", "tokens_length")
    config = DataConfig(dataset=f"{__name__}:Sentences", shapes=VARYING, inputs=inputs)
    assert select_features(config, tmp_path).inputs == inputs

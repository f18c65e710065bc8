"""Tests sequences of varying length: stored unpadded, padded to the longest in a batch."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import blocks
from flotilla.trainer.data.prepare import prepare, select_features
from flotilla.trainer.data.read import (
    evaluation_batches,
    labelled_columns,
    read_rows,
    training_batches,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.data import made_builders as builders


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


SHAPES = {"tokens": (0,), "tags": (0,), "words": (0,), "points": (0, 2)}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentences")
    config = DataConfig(dataset=f"{__name__}:Sentences", shards=2, shapes=SHAPES)
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
        ({**SHAPES, "points": (0, 0)}, "only the first size of a sequence may be 0"),
        ({**SHAPES, "points": (4, 0)}, "only the first size"),
        ({**SHAPES, "points": (0, 3)}, r"set it to \[0, 2\]"),
        ({**SHAPES, "number": (0,)}, "is a single value; leave it out"),
        ({**SHAPES, "tokenz": (0,)}, "there is no feature 'tokenz'"),
    ],
)
def test_shapes_that_cannot_vary(prepared, shapes, message):
    with pytest.raises(ConfigError, match=message):
        prepared("", dataset=f"{__name__}:Sentences", shapes=shapes)
    with pytest.raises(ConfigError, match=r"data\.buckets: no input or label varies in length"):
        prepared("Small", buckets=(2, 4))


def test_a_length_may_be_an_input(tmp_path):
    inputs = ("tokens", "tokens_length")
    config = DataConfig(dataset=f"{__name__}:Sentences", shapes=SHAPES, inputs=inputs)
    assert select_features(config, tmp_path).inputs == inputs

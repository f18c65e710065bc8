"""Tests users' builders: every kind of feature, unusual splits and unusual labels."""

import itertools
import json
import re
import shutil

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import features
from flotilla.trainer.data.blocks import parse_blocks
from flotilla.trainer.data.builders import batches, datasets
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.data import made_builders as builders

# TFDS reads a dataset's description with a method that protobuf has deprecated.
READS_AGAIN = pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("everything")
    config = DataConfig(dataset="tests.trainer.data.made_builders:Everything", shards=2)
    return prepare(config, storage.uri_of(folder / "root"), folder / "scratch")


def refusal(prepared, name, **options):
    with pytest.raises(UserError) as caught:
        prepared(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def numbers_of(contents, dataset, split):
    return contents(dataset, split)["number"].tolist()


def plain(value):
    """Return a value as it is read from a stored record."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list) and isinstance(value[0], str):
        return [word.encode() for word in value]
    return np.asarray(value).tolist()


def test_every_value_is_the_builders_and_every_example_in_one_place(everything, contents):
    specs, every = DatasetSpec.from_manifest(everything.manifest).features, []
    for split in ("train", "validation", "test"):
        found = contents(everything, split)
        numbers = (2**64 - 1 - found["large"]).tolist()
        expected = [builders.flat(builders.example(number)) for number in numbers]
        assert set(found) == set(expected[0]) == set(specs)
        for name, values in found.items():
            assert [plain(row[name]) for row in expected] == values.tolist(), name
            dtype = "object" if specs[name].dtype == "string" else specs[name].dtype
            assert (values.dtype, values.shape[1:]) == (dtype, specs[name].shape), name
        every += numbers
    assert sorted(every) == list(range(50))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Pictures", "Everything"])
def test_both_ways_of_reading_agree(prepared, monkeypatch, name):
    short = prepared(name)
    monkeypatch.setattr(batches, "_is_plain", lambda *_: False)
    storage.delete(short.uri)
    assert prepared(name).manifest.same_content(short.manifest)


def test_pictures_are_read_the_short_way(prepared, tmp_path, monkeypatch):
    used = []
    read = batches._records
    monkeypatch.setattr(batches, "_records", lambda *args: used.append(args[2]) or read(*args))
    prepared("Pictures")
    assert used == ["train", "test"]
    config = DataConfig(dataset="tests.trainer.data.made_builders:Everything")
    builder = datasets.builder(config, tmp_path)
    assert not batches._is_plain(builder, features.select(config, builder.info))


def test_the_manifest_names_the_features(everything):
    fields = everything.manifest.fields
    assert fields["features"]["box"] == {
        "shape": [3],
        "dtype": "int32",
        "stored": "raw",
        "num_classes": 0,
        "labels": [],
        "padding": 0,
    }
    assert fields["inputs"] == ["image", "nested/inner", "nested/deep/er"]
    assert fields["features"]["label"]["labels"] == builders.CLASSES
    assert json.loads(json.dumps(fields)) == fields


def test_test_is_drawn_where_the_builder_has_none(prepared, contents):
    dataset = prepared("TrainOnly", validation=5)
    splits = {
        split: numbers_of(contents, dataset, split) for split in ("train", "validation", "test")
    }
    assert {name: len(numbers) for name, numbers in splits.items()} == {
        "train": 30,
        "validation": 5,
        "test": 5,
    }
    assert sorted(itertools.chain(*splits.values())) == list(range(40))


def test_the_builders_validation_is_the_test(prepared, contents):
    dataset = prepared("TrainAndValidation")
    assert sorted(numbers_of(contents, dataset, "test")) == list(range(40, 47))


def test_without_validation_there_is_no_such_split(prepared):
    fields = prepared("Small", validation=0).manifest.fields
    assert set(fields["splits"]) == set(fields["target_counts"]["label"]) == {"train", "test"}


def test_each_shard_has_some_of_everything(prepared):
    # This builder's examples keep their order, which may be sorted by class.
    dataset = prepared("InOrder", shards=3, validation=0)
    spec = DatasetSpec.from_manifest(dataset.manifest)
    folder = storage.local_path(dataset.uri)
    found = []
    for name in spec.files("train"):
        blocks = list(tf.data.TFRecordDataset(str(folder / name)).as_numpy_iterator())
        found.append(parse_blocks(spec.features, tf.constant(blocks))["number"].numpy())
    assert all(each.min() < 13 and each.max() > 26 for each in found)


def test_a_variable_image_is_refused_before_it_is_made(prepared, monkeypatch):
    monkeypatch.setattr(datasets, "download", lambda *_: pytest.fail("downloaded"))
    assert "the shape of 'picture'" in refusal(prepared, "VariableImage")


def test_integers_are_classes_up_to_the_largest(prepared):
    fields = prepared("IntegerLabel").manifest.fields
    counts = fields["target_counts"]["rating"]
    assert (fields["features"]["rating"]["num_classes"], set(counts)) == (0, set(fields["splits"]))
    assert [len(each) for each in counts.values()] == [8] * 3
    assert sum(counts["test"]) == 10
    assert counts["train"][:3] == [0, 0, 0]


def test_a_quantity_is_no_class(prepared):
    fields = prepared("HugeLabel").manifest.fields
    assert fields["target_counts"]["rating"] == {}
    assert 10**9 <= fields["target_moments"]["rating"]["min"] < 10**9 + 40


def test_the_version_is_resolved(prepared):
    newest = prepared("Versions")
    assert newest.manifest.fields["version"] == "2.0.0"
    assert prepared("Versions", version="2.0.0").reused


def test_a_version_that_can_no_longer_be_made(prepared):
    assert "too old" in refusal(prepared, "Versions", version="1.5.0")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return the folder in which TFDS keeps prepared data."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@READS_AGAIN
def test_the_download_is_kept_where_tfds_keeps_it(prepared, kept, monkeypatch):
    monkeypatch.setattr(builders.Downloading, "urls", [])
    monkeypatch.setattr(builders.Downloading, "made", 0)
    prepared("Downloading")
    assert (kept / "downloading" / "1.0.0").is_dir()
    assert not prepared("Downloading", seed=1).reused
    assert builders.Downloading.made == 1


@READS_AGAIN
@pytest.mark.parametrize("name", [pytest.param("Pictures", marks=pytest.mark.slow), "Small"])
def test_a_kept_dataset_that_is_damaged(prepared, kept, name):
    prepared(name)
    (path,) = kept.rglob("*-train.tfrecord-*")
    whole = path.read_bytes()
    harms = {
        "40 examples fewer than|only 0 element": b"",
        "truncated": whole[:-7],
        "examples more than|at least 41": whole * 2,
        "No such file": None,
    }
    place = f"the split 'train' of tests.trainer.data.made_builders:{name} in {path.parent}"
    for words, data in harms.items():
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        message = refusal(prepared, name, seed=1)
        assert place in message
        assert re.search(words, message)
    shutil.rmtree(path.parent)
    assert not prepared(name, seed=1).reused

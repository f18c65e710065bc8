"""What a reader takes from the manifest, and what it refuses."""

import sys

import pytest

from trainer.data.spec import SCHEMA, DatasetSpec, FeatureSpec, shard_name
from trainer.errors import UserError
from trainer.storage import Manifest

FIELDS = {
    "dataset_schema": SCHEMA,
    "dataset": "some",
    "splits": {
        "train": {"examples": 5, "shards": [3, 2]},
        "test": {"examples": 4, "shards": [4]},
    },
    "features": {
        "image": {"shape": [2, 2, 1], "dtype": "uint8", "stored": "raw"},
        "label": {"shape": [], "dtype": "int64", "stored": "int"},
    },
    "inputs": ["image"],
    "label": "label",
    "labels": ["a", "b"],
    "num_classes": 2,
}


def read(**changes):
    return DatasetSpec.from_manifest(Manifest("dataset", (), {**FIELDS, **changes}))


def test_the_manifest_tells_all():
    spec = read()
    assert spec.features["image"] == FeatureSpec(shape=(2, 2, 1), dtype="uint8", stored="raw")
    assert (spec.inputs, spec.label, spec.labels, spec.num_classes) == (
        ("image",),
        "label",
        ("a", "b"),
        2,
    )


def test_a_feature_goes_to_json_and_back():
    feature = FeatureSpec(shape=(3, 4), dtype="float32", stored="raw")
    assert read(features={"x": feature.to_json()}).features["x"] == feature


def test_the_spec_is_the_same_after_the_manifest_was_written():
    manifest = Manifest("dataset", (), FIELDS)
    assert DatasetSpec.from_manifest(Manifest.from_json(manifest.to_json())) == read()


def test_examples_of_a_split():
    spec = read()
    assert [spec.examples(split) for split in ("train", "test", "validation")] == [5, 4, 0]


def test_files_of_a_split():
    assert read().files("train") == [
        "train-00000-of-00002.tfrecord",
        "train-00001-of-00002.tfrecord",
    ]


@pytest.mark.parametrize(
    ("split", "hint"), [("tests", "did you mean 'test'"), ("validation", "it has train, test")]
)
def test_a_split_that_is_not_there(split, hint):
    with pytest.raises(UserError, match=f"no split '{split}'.*{hint}"):
        read().files(split)


def test_another_kind_is_refused():
    with pytest.raises(UserError, match="a checkpoint is published there and not a dataset"):
        DatasetSpec.from_manifest(Manifest("checkpoint", (), {}))


@pytest.mark.parametrize("schema", [SCHEMA + 1, None, "1"])
def test_another_schema_is_refused(schema):
    with pytest.raises(UserError, match=f"schema {schema} and this version reads {SCHEMA}"):
        read(dataset_schema=schema)


def test_names_of_shards_sort_in_order():
    names = [shard_name("train", index, 12) for index in range(12)]
    assert names == sorted(names)
    assert names[3] == "train-00003-of-00012.tfrecord"


def test_a_spec_cannot_be_changed():
    with pytest.raises(AttributeError):
        read().label = "other"


def test_it_is_in_a_module_without_tensorflow():
    source = sys.modules[DatasetSpec.__module__].__file__
    with open(source, encoding="utf-8") as file:
        assert "import tensorflow" not in file.read()

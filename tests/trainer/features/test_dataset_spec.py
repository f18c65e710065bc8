"""Tests which fields a reader uses from the manifest and which manifests it rejects."""

from dataclasses import replace

import pytest

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.features.dataset_spec import (
    SCHEMA,
    DatasetSpec,
    require_slices,
    slice_features,
)
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage import Manifest

FIELDS = {
    "dataset_schema": SCHEMA,
    "block_rows": 512,
    "dataset": "some",
    "splits": {
        "train": {"examples": 5, "shards": [3, 2]},
        "test": {"examples": 4, "shards": [4]},
    },
    "features": {
        "image": FeatureSpec(shape=(2, 2, 1), dtype="uint8", stored="raw").to_json(),
        "label": FeatureSpec(
            shape=(), dtype="int64", stored="int", num_classes=2, labels=("a", "b")
        ).to_json(),
    },
    "inputs": ["image"],
    "targets": ["label"],
    "weight": "",
    "group": "",
    "target_counts": {"label": {"train": [3, 2], "test": [1, 3]}},
    "target_moments": {"label": {"mean": 0.4, "std": 0.5, "min": 0.0, "max": 1.0}},
}


def read(**changes):
    return DatasetSpec.from_manifest(Manifest("dataset", (), {**FIELDS, **changes}))


def test_the_manifest_tells_all():
    spec = read()
    assert spec.features["image"] == FeatureSpec(shape=(2, 2, 1), dtype="uint8", stored="raw")
    assert (spec.inputs, spec.targets, spec.weight, spec.group) == (("image",), ("label",), "", "")
    assert (spec.features["label"].num_classes, spec.features["label"].labels) == (2, ("a", "b"))
    assert spec.target_counts["label"]["train"] == [3, 2]
    assert spec.target_moments["label"]["max"] == 1.0
    assert [spec.examples(split) for split in ("train", "test", "validation")] == [5, 4, 0]
    assert spec.files("train") == ["train-00000-of-00002.tfrecord", "train-00001-of-00002.tfrecord"]
    manifest = Manifest("dataset", (), FIELDS)
    assert DatasetSpec.from_manifest(Manifest.from_json(manifest.to_json())) == spec


@pytest.mark.parametrize(
    ("split", "hint"), [("tests", "did you mean 'test'"), ("validation", "it has train, test")]
)
def test_a_split_that_is_not_there(split, hint):
    with pytest.raises(UserError, match=f"no split '{split}'.*{hint}"):
        read().files(split)


def test_what_is_no_dataset_of_this_version_is_refused():
    with pytest.raises(UserError, match="the given dataset is a checkpoint, not a dataset"):
        DatasetSpec.from_manifest(Manifest("checkpoint", (), {}))
    for schema in (SCHEMA + 1, None, "1"):
        with pytest.raises(UserError, match=f"schema {schema}, but this version reads {SCHEMA}"):
            read(dataset_schema=schema)


SLICED = {
    "image": FeatureSpec(shape=(8, 8, 1), dtype="uint8", stored="raw"),
    "digit": FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=10),
    "writer": FeatureSpec(shape=(), dtype="string", stored="bytes"),
}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"evaluation": {"slices": ["writr"]}},
            "evaluation.slices: 'writr' is not a feature of the dataset; did you mean 'writer'?",
        ),
        (
            {"evaluation": {"slices": ["image"]}},
            "evaluation.slices: 'image' has more than one value per example of the dataset (one "
            "of digit, writer)",
        ),
        (
            {"gate": {"min": {"accuracy@writer=a": 0.5}}},
            "gate.min.accuracy@writer=a: there is no slice by 'writer' (sliced by: digit); add it "
            "to evaluation.slices",
        ),
        (
            {"gate": {"max": {"loss@digt": 0.5}}},
            "gate.max.loss@digt: there is no slice by 'digt'; did you mean 'digit'? (sliced by: "
            "digit); add it to evaluation.slices",
        ),
    ],
)
def test_a_slice_that_there_cannot_be_is_named(tree, message):
    with pytest.raises(ConfigError) as error:
        require_slices(parse_config(tree), SLICED, ["digit"])
    assert str(error.value) == message


def test_a_slice_by_a_class_that_the_label_has_not_is_named():
    named = {"digit": replace(SLICED["digit"], num_classes=2, labels=("even", "odd"))}
    for rule in ("accuracy@digit=odd", "accuracy@digit"):
        require_slices(parse_config({"gate": {"min": {rule: 0.1}}}), named, ["digit"])
    with pytest.raises(ConfigError) as error:
        require_slices(parse_config({"gate": {"max": {"loss@digit=od": 0.1}}}), named, ["digit"])
    assert str(error.value) == (
        "gate.max.loss@digit=od: 'digit' has no class 'od'; did you mean 'odd'?"
    )


def test_slices_of_label_and_features_are_allowed_the_label_first_and_once():
    assert slice_features(SLICED, ["digit"], ()) == ["digit"]
    assert slice_features(SLICED, ["digit"], ("writer", "digit")) == ["digit", "writer"]
    tree = {
        "evaluation": {"slices": ["writer"]},
        "gate": {"min": {"accuracy": 0.5, "accuracy@digit": 0.1, "accuracy@writer=a": 0.1}},
    }
    require_slices(parse_config(tree), SLICED, ["digit"])

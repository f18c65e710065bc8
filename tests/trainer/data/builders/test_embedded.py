"""Tests that the embedded datasets are the same on every machine and have the stated patterns."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.config.load import load_config
from flotilla.trainer.data import prepare
from flotilla.trainer.data.builders import datasets, embedded
from flotilla.trainer.data.features import select
from flotilla.trainer.data.read import evaluation_batches
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.tasks import registry

# Numbers of training and test examples, and the inferred task, by dataset.
CONTENT = {
    "brackets": (4000, 1000, "binary_classification"),
    "breast_cancer": (455, 114, "binary_classification"),
    "diabetes": (354, 88, "regression"),
    "digit_properties": (1438, 359, "multilabel_classification"),
    "linnerud": (16, 4, "multi_output"),
    "wine": (142, 36, "classification"),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Return a function that publishes a dataset by name and returns its folder."""
    known = {}

    def make(name):
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            shapes = {"tokens": (24,), "depths": (24,)} if name == "brackets" else {}
            config = DataConfig(dataset=name, validation=0, shards=2, shapes=shapes)
            found = prepare.prepare(config, storage.uri_of(folder), folder / "scratch")
            spec = DatasetSpec.from_manifest(found.manifest)
            known[name] = spec, storage.local_path(found.uri)
        return known[name]

    return make


def split(prepared, name, part):
    spec, folder = prepared(name)
    files = [str(folder / each) for each in spec.files(part)]
    return next(iter(evaluation_batches(spec, files, batch_size=5000)))


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENT)
def test_it_has_examples_and_a_task(prepared, name):
    spec, _ = prepared(name)
    task = registry.create(load_config(None).task, spec)
    found = spec.examples("train"), spec.examples("test"), task.name
    assert found == CONTENT[name]
    task.check()


@pytest.mark.parametrize("name", ["breast_cancer", "diabetes", "linnerud", "wine"])
def test_inputs_are_standardized_by_the_training_examples(prepared, name):
    inputs, _ = split(prepared, name, "train")
    np.testing.assert_allclose(inputs.numpy().mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(inputs.numpy().std(axis=0), 1, atol=1e-5)


def test_a_digit_has_its_properties(prepared):
    spec, _ = prepared("digit_properties")
    assert spec.features["properties"].labels == tuple(embedded.PROPERTIES)
    _, labels = split(prepared, "digit_properties", "test")
    even, _, looped, _ = np.mean(labels.numpy(), axis=0)
    assert 0.4 < even < 0.6
    assert 0.3 < looped < 0.5


@pytest.mark.slow
def test_places_are_as_deep_as_brackets_are_open(tmp_path):
    config = DataConfig(dataset="brackets")
    builder = datasets.builder(config, tmp_path)
    builder.download_and_prepare()
    deepest = set()
    for each in builder.as_dataset(split="test").as_numpy_iterator():
        tokens, depths = each["tokens"], each["depths"]
        steps = np.select([tokens == embedded.OPENS, tokens == embedded.CLOSES], [1, -1], 0)
        np.testing.assert_array_equal(np.minimum(np.cumsum(steps), 3), depths)
        assert each["end"] == (steps.sum() > 0)
        deepest.add(depths.max())
    assert deepest == {0, 1, 2, 3}


def test_they_are_the_same_everywhere():
    drawn = b"".join(column.tobytes() for column in embedded.draw_clicks())
    assert hashlib.sha256(drawn).hexdigest()[:16] == "65349d118813665a"


def test_the_pair_is_the_input_and_the_click_the_label(tmp_path):
    config = DataConfig(dataset="clicks")
    chosen = select(config, datasets.builder(config, tmp_path).info)
    assert set(chosen.inputs) == {"user", "item"}
    assert (chosen.targets, chosen.specs["label"].labels) == (("label",), ("no_click", "click"))
    assert {spec.stored for spec in chosen.specs.values()} == {"int"}

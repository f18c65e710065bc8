"""The tables of scikit-learn and the generated sequences: what is in them, always the same."""

from __future__ import annotations

import numpy as np
import pytest

from trainer import storage
from trainer.config.data import DataConfig
from trainer.config.load import load_config
from trainer.data import prepare
from trainer.data.builders import datasets
from trainer.data.embedded import brackets, tables
from trainer.data.read import evaluation_batches
from trainer.data.spec import DatasetSpec
from trainer.tasks import registry

# Examples for training and for the test, and the task that each one gets.
CONTENT = {
    "brackets": (4000, 1000, "classification"),
    "breast_cancer": (455, 114, "classification"),
    "diabetes": (354, 88, "regression"),
    "digit_properties": (1438, 359, "multilabel_classification"),
    "linnerud": (16, 4, "multi_output"),
    "wine": (142, 36, "classification"),
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """The published dataset of each name, and its folder."""
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
    assert spec.features["properties"].labels == tuple(tables.PROPERTIES)
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
        steps = np.select([tokens == brackets.OPENS, tokens == brackets.CLOSES], [1, -1], 0)
        np.testing.assert_array_equal(np.minimum(np.cumsum(steps), 3), depths)
        assert each["end"] == (steps.sum() > 0)
        deepest.add(depths.max())
    assert deepest == {0, 1, 2, 3}

"""Fixtures that prepare a source of numbers."""

import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import prepare as module
from flotilla.trainer.data.blocks import parse_blocks
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.features.dataset_spec import DatasetSpec
from tests.trainer.data.preparation.numbers import Numbers


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Return a function that prepares a source with two shards."""

    def make(source, processes=1, **options):
        monkeypatch.setattr(module, "open_source", lambda *_: source)
        config = DataConfig(**{"shards": 2, "runner": {"processes": processes}, **options})
        return prepare(config, storage.uri_of(tmp_path / "root"), tmp_path / "scratch")

    return make


@pytest.fixture
def source(tmp_path):
    return Numbers(seen=tmp_path / "seen")


@pytest.fixture
def numbers_of():
    """Return a function that reads the numbers in each shard of a split."""

    def read(dataset, split):
        spec = DatasetSpec.from_manifest(dataset.manifest)
        folder = storage.local_path(dataset.uri)
        found = []
        for name in spec.files(split):
            blocks = list(tf.data.TFRecordDataset(str(folder / name)).as_numpy_iterator())
            found.append(parse_blocks(spec.features, tf.constant(blocks))["number"].numpy())
        return found

    return read

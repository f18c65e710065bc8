"""A source of numbers, prepared."""

import pytest
import tensorflow as tf

from tests.trainer.data.preparation.numbers import Numbers
from trainer import storage
from trainer.config.data import DataConfig
from trainer.data import prepare as module
from trainer.data.prepare import prepare
from trainer.data.records import parse
from trainer.data.spec import DatasetSpec


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Prepare a source below the root, with two shards."""

    def make(source, processes=1, **options):
        monkeypatch.setattr(module, "source_of", lambda *_: source)
        config = DataConfig(**{"shards": 2, "runner": {"processes": processes}, **options})
        return prepare(config, storage.uri_of(tmp_path / "root"), tmp_path / "scratch")

    return make


@pytest.fixture
def source(tmp_path):
    return Numbers(seen=tmp_path / "seen")


@pytest.fixture
def numbers_of():
    """Return the numbers in each shard of a split."""

    def read(dataset, split):
        spec = DatasetSpec.from_manifest(dataset.manifest)
        folder = storage.local_path(dataset.uri)
        found = []
        for name in spec.files(split):
            records = list(tf.data.TFRecordDataset(str(folder / name)).as_numpy_iterator())
            found.append(parse(spec.features, tf.constant(records))["number"].numpy())
        return found

    return read

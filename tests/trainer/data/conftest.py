"""Fixtures that prepare small datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.blocks import complete, parse_blocks, write_index
from flotilla.trainer.data.preparation.shards import write_shards
from flotilla.trainer.data.prepare import PreparedDataset, prepare
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec

ROOT = Path(__file__).parents[3]
Prepare = Callable[..., PreparedDataset]


@pytest.fixture(scope="session")
def digits(tmp_path_factory):
    folder = tmp_path_factory.mktemp("digits")
    return prepare(DataConfig(), storage.uri_of(folder / "root"), folder / "scratch")


@pytest.fixture
def root(tmp_path):
    return storage.uri_of(tmp_path / "root")


@pytest.fixture
def scratch(tmp_path):
    return tmp_path / "scratch"


@pytest.fixture
def prepared(root, scratch) -> Prepare:
    """Return a function that prepares a builder of `made_builders.py` with two shards."""

    def make(name, **options):
        dataset = f"tests.trainer.data.made_builders:{name}"
        return prepare(DataConfig(**{"dataset": dataset, "shards": 2, **options}), root, scratch)

    return make


@pytest.fixture
def contents() -> Callable[..., dict[str, np.ndarray]]:
    """Return a function that reads all stored features of a split's examples."""

    def read(dataset, split):
        spec = DatasetSpec.from_manifest(dataset.manifest)
        folder = storage.local_path(dataset.uri)
        paths = [str(folder / name) for name in spec.files(split)]
        blocks = list(tf.data.TFRecordDataset(paths).as_numpy_iterator())
        rows = parse_blocks(spec.features, tf.constant(blocks))
        return {name: each.numpy() for name, each in complete(spec.features, rows).items()}

    return read


@pytest.fixture
def numbered(tmp_path) -> Callable[..., tuple[DatasetSpec, list[Path]]]:
    """Return a function that writes shards of examples numbered from 0, without TFDS."""

    def write(examples, shards=3, rows=2):
        features = {
            "number": FeatureSpec(shape=(), dtype="int64", stored="int"),
            "image": FeatureSpec(shape=(2, 2), dtype="uint8", stored="raw"),
            "label": FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=10),
        }
        numbers = np.arange(examples)
        images = np.repeat(numbers % 256, 4).reshape(-1, 2, 2)
        batch = {"number": numbers, "image": images, "label": numbers % 10}
        folder = tmp_path / "shards"
        folder.mkdir()
        written = write_shards(folder, "train", features, batch, count=shards, rows=rows)
        spec = DatasetSpec(
            features=features,
            inputs=("number",),
            targets=("label",),
            shards={"train": written},
            block_rows=rows,
        )
        files = sorted(folder.iterdir())
        write_index(files)
        return spec, files

    return write

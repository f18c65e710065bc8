"""The published dataset that the tests of this folder train on."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer import storage
from trainer.config.data import DataConfig
from trainer.data.prepare import prepare


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URI of the prepared digits in 8 shards, with a validation split."""
    folder: Path = tmp_path_factory.mktemp("dataset")
    return prepare(DataConfig(), storage.uri_of(folder), folder / "scratch").uri

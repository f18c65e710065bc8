"""Fixtures for a worker's shard feed, whose disk holds only some of the shards."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from flotilla.trainer import storage
from flotilla.trainer.data.preparation.shards import write_shards
from flotilla.trainer.data.shards.shard_feed import ShardFeed
from flotilla.trainer.data.shards.shard_store import (
    SHARDS,
    TRAIN,
    VALIDATION,
    Streaming,
    part_range,
    shuffle_shards,
)
from flotilla.trainer.features.dataset_spec import shard_name
from flotilla.trainer.storage.local import FileStore
from tests.trainer.data.shards.numbered import BATCH, MEASURED, SPEC, STARTED


@pytest.fixture(scope="module")
def numbered(tmp_path_factory):
    """Publish a dataset whose examples are numbered consecutively in each split."""
    folder = tmp_path_factory.mktemp("published")
    source = folder / "source"
    source.mkdir()
    for split, counts in SPEC.shards.items():
        numbers = iter(range(sum(counts)))
        for name, count in zip(SPEC.files(split), counts, strict=True):
            rows = {"x": [next(numbers) for _ in range(count)]}
            write_shards(source, "one", SPEC.features, rows, rows=SPEC.block_rows)
            (source / shard_name("one", 0, 1)).rename(source / name)
    storage.publish(source, storage.uri_of(folder / "dataset"), kind="dataset")
    return storage.uri_of(folder / "dataset")


@pytest.fixture
def peaks(monkeypatch, tmp_path):
    """Return a list of the total shard bytes on disk after each download."""
    found, download = [], FileStore.download

    def measured(self, uri, target):
        download(self, uri, target)
        held = (path for path in (tmp_path / SHARDS).rglob("*") if path.is_file())
        found.append(sum(path.stat().st_size for path in held))

    monkeypatch.setattr(FileStore, "download", measured)
    return found


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Return a folder for graphs that outlive a test; restore the working directory at the end."""
    before = Path.cwd()
    yield tmp_path_factory.mktemp("elsewhere")
    os.chdir(before)


@pytest.fixture
def feed(numbered, tmp_path, elsewhere):
    """Return a function that starts a feed with disk space for the given number of shards."""
    os.chdir(tmp_path)
    largest = max(entry.bytes for entry in storage.read_manifest(numbered).files)
    made = []

    def begin(shards=3, *, at_once=1, parts=1):
        def measured(_, part):
            where = part_range(MEASURED, BATCH, part, parts)
            return SPEC.files(VALIDATION)[where.first : where.last]

        names = SPEC.files(TRAIN)
        orders = {
            TRAIN: lambda seed, epoch: shuffle_shards(names, seed, epoch),
            VALIDATION: measured,
        }
        limit = shards * largest
        made.append(ShardFeed(numbered, tmp_path, limit=limit, orders=orders))
        return made[-1], Streaming(limit=limit, at_once=at_once)

    yield begin
    for each in made:
        each.close()
    STARTED.clear()
    # Graphs use relative paths, so graphs that still wait fail after this change of directory.
    gc.collect()
    os.chdir(elsewhere)

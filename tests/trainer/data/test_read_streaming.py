"""Tests that graphs receive the requested shards with each record once, and never hang.

The examples of the dataset are numbered consecutively in each split.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.data.preparation.shards import write_shards
from flotilla.trainer.data.read import _allow_tensor_seed, evaluation_batches, training_batches
from flotilla.trainer.data.shard_feed import (
    FOLDER,
    SHARDS,
    TRAIN,
    VALIDATION,
    ShardFeed,
    Streaming,
    part_range,
    shuffle_shards,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec, shard_name
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.local import FileStore

EXAMPLES = (40, 41, 40, 39, 40, 41, 40)
MEASURED = (13, 11, 12)
BATCH = 5
FEATURE = {"x": FeatureSpec(shape=(), dtype="int64", stored="int")}
SPEC = DatasetSpec(
    features=FEATURE,
    inputs=("x",),
    targets=("x",),
    shards={"train": EXAMPLES, "validation": MEASURED},
    block_rows=3,
)
# Keeps a test's iterators alive until the feed is closed. Python deletes an iterator while it holds
# the GIL and waits for reads that need the feed's Python thread, which would be a deadlock.
STARTED: list[Any] = []


def start_reading(streaming, **options):
    batches = training_batches(SPEC, streaming, batch_size=BATCH, **options)
    STARTED.append(batches.as_numpy_iterator())
    return STARTED[-1]


def drawn(streaming, count, *, seed=3, buffer=20):
    batches = start_reading(streaming, seed=seed, shuffle_buffer=buffer)
    return np.concatenate([x for x, _ in islice(batches, count)])


@pytest.fixture(scope="module")
def published(tmp_path_factory):
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
def feed(published, tmp_path, elsewhere):
    """Return a function that starts a feed with disk space for the given number of shards."""
    os.chdir(tmp_path)
    largest = max(entry.bytes for entry in storage.read_manifest(published).files)
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
        made.append(ShardFeed(published, tmp_path, limit=limit, orders=orders))
        return made[-1], Streaming(limit=limit, at_once=at_once)

    yield begin
    for each in made:
        each.close()
    STARTED.clear()
    # Graphs use relative paths, so graphs that still wait fail after this change of directory.
    gc.collect()
    os.chdir(elsewhere)


def test_another_attempt_begins_anew_where_one_was_left(feed):
    begun, first = feed(3)
    next(start_reading(first, seed=1, shuffle_buffer=10))
    second = Streaming(limit=first.limit, at_once=1)
    total = sum(EXAMPLES)
    seen = drawn(second, 5 * total // BATCH)
    assert set(Counter(seen).values()) == {5}
    assert begun.error is None


def test_a_damaged_shard_is_one_line_and_no_endless_wait(feed, monkeypatch):
    download = FileStore.download

    def damaged(self, uri, target):
        if target.name != SPEC.files(TRAIN)[4]:
            return download(self, uri, target)
        return target.write_bytes(b"other")

    monkeypatch.setattr(FileStore, "download", damaged)
    begun, streaming = feed(2)
    line = r"damaged: train-00004-of-00007\.tfrecord"
    with pytest.raises(UserError, match=line), begun.reporting():
        drawn(streaming, 500)


def test_a_server_ends_with_the_error_of_a_shard(feed, monkeypatch):
    def full(_self, _uri, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(FileStore, "download", full)
    begun, streaming = feed(2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no more shards will arrive"):
        drawn(streaming, 1)
    with pytest.raises(UserError, match="No space left on device; free some space"):
        begun.wait()


def test_no_reader_waits_for_a_feed_that_is_closed(feed):
    begun, streaming = feed(2)
    begun.close()
    with pytest.raises(tf.errors.InvalidArgumentError, match="no more shards will arrive"):
        drawn(streaming, 1)
    begun.wait()


def test_what_a_killed_attempt_has_left_is_removed(feed, tmp_path):
    left = tmp_path / FOLDER
    left.mkdir()
    (left / "ask").write_text("next", encoding="utf-8")
    begun, streaming = feed(3)
    assert isinstance(begun, ShardFeed)
    assert len(drawn(streaming, 2)) == 2 * BATCH


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "at_once"), [(2, 1), (3, 1), (6, 3), (20, 8)])
def test_an_epoch_is_every_example_once_within_the_disk(feed, peaks, shards, at_once):
    begun, streaming = feed(shards, at_once=at_once)
    total = sum(EXAMPLES)
    # Five epochs fill a whole number of batches, some of which span two epochs.
    seen = drawn(streaming, 5 * total // BATCH)
    epochs = [seen[index * total : (index + 1) * total] for index in range(5)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(total))
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert max(peaks) <= streaming.limit
    assert begun.store._count_bytes() <= streaming.limit


@pytest.mark.slow
def test_the_order_is_that_of_the_seed(feed):
    _, streaming = feed(4, at_once=2)
    first = drawn(streaming, 60)
    orders = {
        seed: tuple(drawn(Streaming(limit=streaming.limit, at_once=2), 60, seed=seed))
        for seed in (3, 4)
    }
    assert orders[3] == tuple(first)
    assert orders[4] != orders[3]


def test_what_fits_in_memory_is_fetched_once(feed, peaks):
    _, streaming = feed(2)
    total = sum(EXAMPLES)
    seen = drawn(streaming, 3 * total // BATCH, buffer=1000)
    assert set(Counter(seen[: total // BATCH * BATCH]).values()) == {1}
    assert len(peaks) <= len(EXAMPLES) + 2


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3, 9])
def test_parts_of_a_validation_are_all_of_it_once_in_whole_batches(feed, parts):
    begun, streaming = feed(2, parts=parts)

    @tf.function(input_signature=[tf.TensorSpec((), tf.int32)])
    def measured(part):
        found = tf.constant([], tf.int64)
        for x, _ in evaluation_batches(SPEC, streaming, batch_size=BATCH, part=part, of=parts):
            found = tf.concat([found, x], axis=0)
        return found

    # After a worker is lost, other workers may repeat its parts, in any order.
    for _ in range(2):
        whole = [measured(tf.constant(part)).numpy() for part in reversed(range(parts))]
        assert np.concatenate(whole[::-1]).tolist() == list(range(sum(MEASURED)))
        assert all(len(each) % BATCH == 0 for each in whole[1:])
    assert begun.store._count_bytes() <= streaming.limit


def test_training_goes_on_around_validations_within_the_disk(feed, peaks):
    _, streaming = feed(3)
    total = sum(EXAMPLES)
    iterator, seen = start_reading(streaming, seed=1, shuffle_buffer=10), []
    for index in range(5 * total // BATCH):
        if index % 140 == 0:
            measured = evaluation_batches(SPEC, streaming, batch_size=BATCH)
            assert sum(len(x) for x, _ in measured) == sum(MEASURED)
        seen.extend(next(iterator)[0])
    assert set(Counter(seen).values()) == {5}
    assert max(peaks) <= streaming.limit


def test_the_seed_of_a_graph_is_as_before():
    with tf.Graph().as_default() as graph:
        graph.seed = 7
        with _allow_tensor_seed():
            assert graph.seed is None
        assert graph.seed == 7

"""Tests which shards are on disk, and when they are downloaded and removed."""

from __future__ import annotations

import itertools
import threading

import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.data.shard_feed import (
    AT_ONCE,
    ShardStore,
    part_range,
    plan_streaming,
    shuffle_shards,
)
from flotilla.trainer.features.dataset_spec import KIND, SCHEMA, shard_name
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage import Manifest
from flotilla.trainer.storage.local import FileStore
from flotilla.trainer.storage.manifest import FileEntry
from tests.trainer.objectives import NO_ROLES

SIZE = 1000
NAMES = [f"s{index}.tfrecord" for index in range(6)]


def hold(store, reader, name):
    with store._lock:
        while not store.try_hold(reader, name):
            store._lock.wait()
    return store.folder / name


@pytest.fixture
def uri(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in NAMES:
        (source / name).write_bytes(name.encode().ljust(SIZE))
    storage.publish(source, storage.uri_of(tmp_path / "dataset"), kind="dataset")
    return storage.uri_of(tmp_path / "dataset")


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """Return the names of the downloaded shards, in order, each with the bytes then on disk."""
    found, download = [], FileStore.download

    def noted(self, uri, target):
        download(self, uri, target)
        found.append((target.name, on_disk(tmp_path / "shards")))

    monkeypatch.setattr(FileStore, "download", noted)
    return found


@pytest.fixture
def stores(uri, tmp_path):
    """Return a function that creates stores, which are closed at the end of the test."""
    made = []

    def store(shards, **options):
        folder = tmp_path / "shards"
        made.append(ShardStore(uri, folder, limit=shards * SIZE, **options))
        return made[-1]

    yield store
    for each in made:
        each.close()
    # A download that is still running must not affect the next test.
    for thread in threading.enumerate():
        if thread.name == "shards":
            thread.join(timeout=60)


def on_disk(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_next_comes_in_the_background_and_what_was_used_goes(stores, fetched):
    came = threading.Semaphore(0)
    store = stores(3, changed=came.release)
    for epoch in range(3):
        for index, name in enumerate(NAMES):
            store.will_use("train", [*NAMES[index:], *NAMES])
            path = hold(store, "train", name)
            assert path.read_bytes() == name.encode().ljust(SIZE), epoch
            assert store._count_bytes() <= 3 * SIZE
            store.release("train", name)
    assert max(size for _, size in fetched) == 3 * SIZE


def test_shards_come_in_the_order_in_which_they_are_used(stores, fetched):
    came = threading.Semaphore(0)
    store = stores(6, changed=came.release)
    store.will_use("train", NAMES[::-1])
    for _ in NAMES:
        assert came.acquire(timeout=60)
    assert [name for name, _ in fetched] == NAMES[::-1]


def test_what_is_used_again_soon_stays(stores, fetched):
    store = stores(2)
    hold(store, "train", "s0.tfrecord")
    store.release("train")
    hold(store, "train", "s1.tfrecord")
    store.release("train")
    store.will_use("train", ["s2.tfrecord", "s1.tfrecord"])
    hold(store, "train", "s2.tfrecord")
    hold(store, "train", "s1.tfrecord")
    assert [name for name, _ in fetched] == ["s0.tfrecord", "s1.tfrecord", "s2.tfrecord"]
    assert names_in(store.folder) == ["s1.tfrecord", "s2.tfrecord"]


def test_what_is_held_by_any_reader_is_not_removed(stores):
    store = stores(2)
    with pytest.raises(ValueError, match="holds no other"):
        store.try_hold("train", "other")
    # What a reader waits for comes before what is fetched ahead.
    store.will_use("train", NAMES)
    hold(store, "train", NAMES[0])
    hold(store, "validation", NAMES[5])
    assert names_in(store.folder) == [NAMES[0], NAMES[5]]
    store.will_use("train", ())
    store.release("validation")
    hold(store, "validation", NAMES[0])
    store.release("train")
    hold(store, "train", NAMES[1])
    assert not store.try_hold("validation", NAMES[2])
    store.release("train")
    hold(store, "validation", NAMES[2])
    assert names_in(store.folder) == [NAMES[0], NAMES[2]]


def test_a_folder_of_another_attempt_is_emptied(stores, tmp_path):
    stage = tmp_path / "shards" / ".shards.0123456789ab.part"
    stage.mkdir(parents=True)
    (stage / "s0.tfrecord").write_bytes(b"half")
    (tmp_path / "shards" / "s1.tfrecord").write_bytes(b"other")
    store = stores(2)
    assert on_disk(tmp_path / "shards") == 0
    assert hold(store, "train", "s1.tfrecord").read_bytes() == b"s1.tfrecord".ljust(SIZE)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(b"?" * SIZE), r"s2\.tfrecord has crc32c .* \(expected"),
        (lambda path: path.write_bytes(b"?"), r"s2\.tfrecord has 1 bytes \(expected 1000\)"),
        (lambda path: path.unlink(), r"s2\.tfrecord is missing"),
    ],
)
def test_a_damaged_shard_is_one_line_for_all_who_wait(stores, uri, damage, message):
    damage(storage.local_path(uri) / "s2.tfrecord")
    failed = threading.Event()
    store = stores(2, changed=lambda: failed.set() if store.error else None)
    hold(store, "train", "s0.tfrecord")
    store.will_use("train", ["s2.tfrecord"])
    assert failed.wait(timeout=60)
    for name in ("s1.tfrecord", "s2.tfrecord"):
        with pytest.raises(UserError, match=message):
            hold(store, "validation", name)


MB = 10**6


def manifest_of(train, validation=()):
    """Return the manifest of a dataset with shards of these sizes, in megabytes."""
    splits = {"train": train, "validation": validation}
    return Manifest(
        kind=KIND,
        files=tuple(
            FileEntry(shard_name(split, index, len(sizes)), size * MB, "00000000")
            for split, sizes in splits.items()
            for index, size in enumerate(sizes)
        ),
        fields={
            "dataset_schema": SCHEMA,
            "block_rows": 512,
            "splits": {split: {"shards": [1] * len(sizes)} for split, sizes in splits.items()},
            "features": {"x": FeatureSpec(shape=(), dtype="int64", stored="int").to_json()},
            **NO_ROLES,
            "inputs": ["x"],
            "targets": ["x"],
        },
    )


def found(manifest, disk, workers=1, **sections):
    sections["data"] = {"disk": disk, **sections.get("data", {})}
    return plan_streaming(parse_config(sections), manifest, workers)


@pytest.mark.parametrize(
    ("disk", "workers", "partition", "streams"),
    [
        ("", 1, "disjoint", False),
        ("82MB", 1, "disjoint", False),
        ("81MB", 1, "disjoint", True),
        ("42MB", 2, "disjoint", False),
        ("41MB", 2, "disjoint", True),
        ("42MB", 2, "reshuffle", True),
    ],
)
def test_shards_stream_where_those_of_a_worker_and_the_validation_do_not_fit(
    disk, workers, partition, streams
):
    manifest = manifest_of([10] * 8, [1, 1])
    assert bool(found(manifest, disk, workers, data={"partition": partition})) is streams


@pytest.mark.parametrize(("disk", "at_once"), [("20MB", 1), ("50MB", 2), ("300MB", AT_ONCE)])
def test_as_many_shards_are_read_as_can_come_meanwhile(disk, at_once):
    streaming = found(manifest_of([10] * 100), disk)
    assert streaming.at_once == at_once
    assert (2 * at_once + 1) * 10 * MB <= streaming.limit or at_once == 1


@pytest.mark.parametrize(
    ("validation", "least"), [((), "19.0MB"), ((5,), "19.0MB"), ((12,), "22.0MB")]
)
def test_less_than_two_shards_is_one_line(validation, least):
    manifest = manifest_of([10, 9, 8, 7], validation)
    with pytest.raises(ConfigError, match=rf"data\.disk: 18MB .* {least} or more, or data\.shards"):
        found(manifest, "18MB")
    assert found(manifest, "22MB")


def test_workers_in_one_process_have_all_or_are_refused():
    manifest = manifest_of([10] * 8)
    assert found(manifest, "80MB", cluster={"in_process": True}) is None
    with pytest.raises(ConfigError, match=r"data\.disk: with cluster\.in_process"):
        found(manifest, "40MB", cluster={"in_process": True})


def test_every_epoch_has_an_order_of_its_own_that_the_seed_gives():
    names = [str(index) for index in range(20)]
    orders = [shuffle_shards(names, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == sorted(names) for order in orders)
    assert shuffle_shards(names, 1, 1) == orders[3]


@pytest.mark.parametrize("shards", [(13, 11, 12), (1,), (4, 0, 9), (50, 1, 1, 1)])
def test_parts_are_whole_batches_in_a_row_and_name_the_shards_that_they_need(shards):
    owner = [index for index, count in enumerate(shards) for _ in range(count)]
    for batch_size, of in itertools.product([1, 5, 13, 100], [1, 2, 3, 7, 40]):
        seen = 0
        for part in range(of):
            where = part_range(shards, batch_size, part, of)
            begin = sum(shards[: where.first]) + where.skip
            assert where.take == 0 or begin == seen
            needed = owner[seen : seen + where.take]
            if needed:
                assert (where.first, where.last - 1) == (needed[0], needed[-1])
            seen += where.take
            assert seen % batch_size == 0 or seen == len(owner)
        assert seen == len(owner)

"""Which shards are on the disk of a task, and when."""

from __future__ import annotations

import threading

import pytest

from trainer import storage
from trainer.data.shards.shard_store import ShardStore
from trainer.errors import UserError
from trainer.storage.local import FileStore

SIZE = 1000
NAMES = [f"s{index}.tfrecord" for index in range(6)]


@pytest.fixture
def uri(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in NAMES:
        (source / name).write_bytes(name.encode().ljust(SIZE))
    storage.publish(source, storage.uri_of(tmp_path / "dataset"), kind="dataset")
    return storage.uri_of(tmp_path / "dataset")


@pytest.fixture
def fetched(monkeypatch):
    """Return the names of what was fetched, in order."""
    names, download = [], FileStore.download

    def noted(self, uri, target):
        download(self, uri, target)
        names.append(target.name)

    monkeypatch.setattr(FileStore, "download", noted)
    return names


@pytest.fixture
def stores(uri, tmp_path):
    """Make a store; all end with the test."""
    made = []

    def store(shards, **options):
        folder = tmp_path / "shards"
        made.append(ShardStore(uri, folder, limit=shards * SIZE, **options))
        return made[-1]

    yield store
    for each in made:
        each.close()
    # A fetch that has begun must not be seen by the next test.
    for thread in threading.enumerate():
        if thread.name == "shards":
            thread.join(timeout=60)


def on_disk(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_next_comes_in_the_background_and_what_was_used_goes(stores, tmp_path, monkeypatch):
    peaks, download = [], FileStore.download

    def measured(self, uri, target):
        download(self, uri, target)
        peaks.append(on_disk(tmp_path / "shards"))

    monkeypatch.setattr(FileStore, "download", measured)
    came = threading.Semaphore(0)
    store = stores(3, changed=came.release)
    for epoch in range(3):
        for index, name in enumerate(NAMES):
            store.will_use("train", [*NAMES[index:], *NAMES])
            path = store.hold("train", name)
            assert path.read_bytes() == name.encode().ljust(SIZE), epoch
            assert store.bytes_used <= 3 * SIZE
            store.release("train", name)
    assert max(peaks) == 3 * SIZE


def test_shards_come_in_the_order_in_which_they_are_used(stores, fetched):
    came = threading.Semaphore(0)
    store = stores(6, changed=came.release)
    store.will_use("train", NAMES[::-1])
    for _ in NAMES:
        assert came.acquire(timeout=60)
    assert fetched == NAMES[::-1]


def test_what_is_used_again_soon_stays(stores, fetched):
    store = stores(2)
    store.hold("train", "s0.tfrecord")
    store.release("train")
    store.hold("train", "s1.tfrecord")
    store.release("train")
    store.will_use("train", ["s2.tfrecord", "s1.tfrecord"])
    store.hold("train", "s2.tfrecord")
    store.hold("train", "s1.tfrecord")
    assert fetched == ["s0.tfrecord", "s1.tfrecord", "s2.tfrecord"]
    assert names_in(store.folder) == ["s1.tfrecord", "s2.tfrecord"]


def test_what_is_held_by_any_reader_is_not_removed(stores):
    store = stores(2)
    store.hold("train", "s0.tfrecord")
    store.hold("validation", "s0.tfrecord")
    store.release("train")
    store.hold("train", "s1.tfrecord")
    assert not store.try_hold("validation", "s2.tfrecord")
    store.release("train")
    store.hold("validation", "s2.tfrecord")
    assert names_in(store.folder) == ["s0.tfrecord", "s2.tfrecord"]


def test_what_a_reader_waits_for_comes_before_what_is_fetched_ahead(stores):
    store = stores(2)
    store.will_use("train", NAMES)
    store.hold("train", NAMES[0])
    store.hold("validation", NAMES[5])
    assert names_in(store.folder) == [NAMES[0], NAMES[5]]


def test_a_folder_of_another_attempt_is_emptied(stores, tmp_path):
    stage = tmp_path / "shards" / ".shards.0123456789ab.part"
    stage.mkdir(parents=True)
    (stage / "s0.tfrecord").write_bytes(b"half")
    (tmp_path / "shards" / "s1.tfrecord").write_bytes(b"other")
    store = stores(2)
    assert on_disk(tmp_path / "shards") == 0
    assert store.hold("train", "s1.tfrecord").read_bytes() == b"s1.tfrecord".ljust(SIZE)


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
    store.hold("train", "s0.tfrecord")
    store.will_use("train", ["s2.tfrecord"])
    assert failed.wait(timeout=60)
    for name in ("s1.tfrecord", "s2.tfrecord"):
        with pytest.raises(UserError, match=message):
            store.hold("validation", name)


def test_a_full_disk_is_one_line(stores, monkeypatch):
    def full(_self, _uri, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(FileStore, "download", full)
    with pytest.raises(UserError, match="No space left on device; free some space"):
        stores(2).hold("train", "s0.tfrecord")


def test_a_shard_that_the_dataset_does_not_have_is_a_bug(stores):
    with pytest.raises(ValueError, match="holds no other"):
        stores(2).try_hold("train", "other")

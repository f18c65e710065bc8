"""Tests how a published directory is fetched into a folder."""

import os
from pathlib import Path

import pytest

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.local import FileStore
from flotilla.trainer.storage.object_store import ObjectStore

from .conftest import EVERY, FILES, left_over
from .places import FilePlace, content


@pytest.fixture
def uri_published(make, place):
    uri_published = storage.join(place.root, "published")
    storage.publish(make(), uri_published, kind="x", fields={"n": 1})
    return uri_published


def test_it_brings_all_files_and_nothing_else(uri_published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    for target in (tmp_path / "new" / "ö ö", tmp_path / "empty", Path("relative")):
        assert storage.fetch(uri_published, target) == storage.read_manifest(uri_published)
        assert content(tmp_path / target) == FILES
    assert left_over(tmp_path) == []


def test_only_picks_by_path(uri_published, tmp_path):
    manifest = storage.fetch(
        uri_published, tmp_path / "a", only=lambda path: path.endswith((".bin", "é"))
    )
    assert content(tmp_path / "a").keys() == {"a.bin", "ü/é"}
    assert len(manifest.files) == len(FILES)
    storage.fetch(uri_published, tmp_path / "a", only=lambda path: path == "b.txt")
    assert content(tmp_path / "a").keys() == {"a.bin", "b.txt", "ü/é"}
    storage.fetch(uri_published, tmp_path / "none", only=lambda _: False)
    assert (tmp_path / "none").is_dir()


def test_an_empty_folder_is_published_and_fetched(make, place, tmp_path):
    nothing = storage.join(place.root, "nothing")
    storage.publish(make("none", {}), nothing, kind="x")
    storage.fetch(nothing, tmp_path / "of nothing")
    assert (tmp_path / "of nothing").is_dir()


@EVERY
def test_what_is_right_is_kept_and_the_rest_is_mended(uri_published, place, tmp_path, monkeypatch):
    store = FileStore if isinstance(place, FilePlace) else ObjectStore
    target = tmp_path / "a"
    storage.fetch(uri_published, target)
    (target / "b.txt").write_bytes(b"broken")
    (target / "deep/er/c d.txt").unlink()
    (target / "mine").write_bytes(b"not theirs")
    before = (target / "a.bin").stat()
    brought = []
    real = store.download

    def download(self, source, to):
        brought.append(source)
        real(self, source, to)

    monkeypatch.setattr(store, "download", download)
    storage.fetch(uri_published, target)
    assert content(target) == {**FILES, "mine": b"not theirs"}
    assert (target / "a.bin").stat() == before
    wanted = [storage.join(uri_published, name) for name in ("b.txt", "deep/er/c d.txt")]
    assert sorted(brought) == sorted(wanted)
    storage.fetch(uri_published, target)
    assert len(brought) == 2


@pytest.mark.parametrize("damage", ["is missing", "has crc32c"])
def test_a_damaged_file_leaves_the_folder_as_it_was(uri_published, place, tmp_path, damage):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine").write_bytes(b"x")
    file = storage.join(uri_published, "ü/é")
    place.remove(file) if damage == "is missing" else place.put(file, b"y")
    for target in (tmp_path / "a", tmp_path / "fresh"):
        with pytest.raises(storage.Corrupt, match=f"ü/é {damage}"):
            storage.fetch(uri_published, target)
    assert content(tmp_path / "a") == {"mine": b"x"}
    assert not (tmp_path / "fresh").exists()
    assert left_over(tmp_path) == []


def test_a_copy_that_goes_wrong_on_the_way_is_found(uri_published, tmp_path, monkeypatch):
    def truncate(_, __, target):
        target.write_bytes(b"")

    for store in (FileStore, ObjectStore):
        monkeypatch.setattr(store, "download", truncate)
    with pytest.raises(storage.Corrupt, match=r"has 0 bytes \(expected \d+\)"):
        storage.fetch(uri_published, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_manifest_that_leads_out_of_the_folder_writes_nothing(uri_published, place, tmp_path):
    manifest = storage.join(uri_published, "MANIFEST.json")
    place.put(manifest, place.get(manifest).replace(b'"b.txt"', b'"../escaped"'))
    with pytest.raises(storage.Corrupt, match=r"'\.\./escaped' is not a path below"):
        storage.fetch(uri_published, tmp_path / "in" / "a")
    assert not (tmp_path / "in").exists()


@pytest.mark.parametrize(
    ("in_the_way", "reason"),
    [("a", "Not a directory"), ("parent", "there is a file where a folder is expected")],
)
def test_a_file_in_the_way(uri_published, tmp_path, in_the_way, reason):
    (tmp_path / in_the_way).write_bytes(b"mine")
    target = tmp_path / "parent" / "a" if in_the_way == "parent" else tmp_path / "a"
    with pytest.raises(UserError, match=f"cannot fetch .*{reason}"):
        storage.fetch(uri_published, target)
    assert (tmp_path / in_the_way).read_bytes() == b"mine"
    assert left_over(tmp_path) == []


def test_a_folder_in_a_files_place(uri_published, tmp_path):
    (tmp_path / "a" / "b.txt" / "mine").mkdir(parents=True)
    with pytest.raises(UserError, match="there is a folder where a file is expected"):
        storage.fetch(uri_published, tmp_path / "a")
    assert left_over(tmp_path) == []


def test_another_fetch_that_is_done_first_is_no_error(uri_published, place, tmp_path, monkeypatch):
    store = FileStore if isinstance(place, FilePlace) else ObjectStore
    real = store.download

    def download(self, source, to):
        monkeypatch.setattr(store, "download", real)
        storage.fetch(uri_published, tmp_path / "a")
        real(self, source, to)

    monkeypatch.setattr(store, "download", download)
    storage.fetch(uri_published, tmp_path / "a")
    assert content(tmp_path / "a") == FILES
    assert left_over(tmp_path) == []


def test_an_error_while_it_appears_is_reported(uri_published, tmp_path, monkeypatch):
    def fail(source, target):
        raise PermissionError(1, "Operation not permitted", str(source), None, str(target))

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(UserError, match="not permitted; make it accessible to this user"):
        storage.fetch(uri_published, tmp_path / "a")
    assert left_over(tmp_path) == []


def test_what_a_dead_fetch_has_brought_is_not_fetched_again(bucket, make, tmp_path):
    uri_published = storage.join(bucket.root, "published")
    storage.publish(make(), uri_published, kind="x")
    dead = ".a.0123456789ab.part"
    make(dead, {"a.bin": FILES["a.bin"], "b.txt": b"half", "of another": b""})
    make(".a.b.0123456789ab.part", {"of another": b""})
    bucket.plan.requests.clear()
    storage.fetch(uri_published, tmp_path / "a")
    assert content(tmp_path / "a") == FILES
    assert not any("a.bin" in request for request in bucket.plan.requests)
    assert any("b.txt" in request for request in bucket.plan.requests)
    assert left_over(tmp_path) == []

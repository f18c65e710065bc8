import json
import logging
import os
import time

import pytest

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError

from .conftest import EVERY, FILES
from .places import content, fetched, fill, path_of

WHOLE = {*FILES, "MANIFEST.json"}


@pytest.mark.parametrize("place", ["file", "gs", "s3", "minio"], indirect=True)
def test_publish_and_read_back(make, place):
    uri = storage.join(place.root, "datasets", "digits 1")
    assert not storage.is_published(uri)
    source = make()
    manifest = storage.publish(source, uri, kind="dataset", fields={"examples": 3})
    assert content(source) == FILES
    assert manifest.kind == "dataset"
    assert manifest.fields == {"examples": 3}
    assert [entry.path for entry in manifest.files] == sorted(FILES)
    assert storage.read_manifest(uri) == manifest
    assert storage.verify(uri) == manifest
    assert storage.is_published(uri)
    assert "b.txt" in storage.names(uri)
    assert "c.txt" not in storage.names(uri)
    there = place.content(uri)
    tree = json.loads(there.pop("MANIFEST.json"))
    assert tree["schema"] == 1
    assert all(entry.keys() == {"path", "bytes", "crc32c"} for entry in tree["files"])
    assert there == FILES


def test_the_checksums_are_crc32c(make, uri):
    source = make(files={"check": b"123456789"})
    [entry] = storage.publish(source, uri, kind="x").files
    assert (entry.bytes, entry.crc32c) == (9, "e3069283")


@pytest.mark.slow
@pytest.mark.parametrize("size", [3 * 2**20 + 7, 2**23 - 1, 2**23, 2**23 + 1, 5 * 2**22 + 1])
def test_a_file_of_more_than_one_chunk(make, uri, tmp_path, size):
    data = os.urandom(size)
    storage.publish(make(files={"large": data}), uri, kind="x")
    assert storage.verify(uri).total_bytes == size
    assert fetched(uri, tmp_path) == {"large": data}


@pytest.mark.slow
@pytest.mark.timeout(1200)
# The stand-ins for object stores need minutes for 10,000 files.
@pytest.mark.parametrize(
    "place",
    ["file", *(pytest.param(each, marks=pytest.mark.long) for each in ("gs", "s3", "minio"))],
    indirect=True,
)
def test_ten_thousand_files(make, place, uri, tmp_path):
    files = {f"{n % 100}/{n:05d}": b"%d" % n for n in range(10_000)}
    assert len(storage.publish(make(files=files), uri, kind="x").files) == 10_000
    assert fetched(uri, tmp_path) == files
    storage.delete(uri)
    assert place.content(uri) == {}


@EVERY
def test_the_same_again_is_a_no_op(make, place, uri):
    first = storage.publish(make(), uri, kind="x", fields={"shape": (8, 8)})
    stored = place.content(place.root)
    second = storage.publish(make("elsewhere"), uri, kind="x", fields={"shape": (8, 8)})
    assert second == first
    assert place.content(place.root) == stored
    assert stored.keys() == {f"a b/{name}" for name in WHOLE}


@EVERY
def test_other_content_is_a_conflict(make, place, uri):
    first = storage.publish(make(), uri, kind="x", fields={"n": 1})
    for kind, files, fields, reason in (
        ("x", {**FILES, "b.txt": b"Second"}, {"n": 1}, "b.txt differs"),
        ("x", {"b.txt": b"second"}, {"n": 1}, "a.bin differs, and so do 2 more files"),
        ("x", FILES, {"n": 2, "m": 0}, "different fields: m, n"),
        ("y", FILES, {"n": 1}, "kind x instead of y"),
    ):
        with pytest.raises(storage.Conflict) as error:
            storage.publish(make(f"other {reason}", files), uri, kind=kind, fields=fields)
        assert str(error.value) == (
            f"{uri} is already published with different content ({reason}): "
            "delete it first, or publish elsewhere"
        )
    assert storage.verify(uri) == first
    assert place.content(uri).keys() == WHOLE


@EVERY
def test_what_a_dead_writer_left_is_replaced(make, place, uri, tmp_path):
    fill(place, uri, {"a.bin": FILES["a.bin"], "b.txt": b"half", "old": b"", "deep/old": b""})
    assert not storage.is_published(uri)
    manifest = storage.publish(make(), uri, kind="x")
    assert storage.verify(uri) == manifest
    assert fetched(uri, tmp_path) == FILES
    assert storage.read_file(uri, "b.txt") == FILES["b.txt"]
    assert len(place.content(uri)) == len(WHOLE)


def test_a_parent_of_published_directories_is_not_replaced(make, place):
    inner = storage.join(place.root, "runs", "one")
    storage.publish(make(), inner, kind="x")
    with pytest.raises(UserError, match=r"one, which is below it, is already published"):
        storage.publish(make(), storage.join(place.root, "runs"), kind="x")
    assert storage.verify(inner)


def test_nothing_at_all_can_be_published(make, uri):
    storage.publish(make(files={}), uri, kind="promotion", fields={"model": "a"})
    assert storage.verify(uri).fields == {"model": "a"}


def test_a_published_directory_can_be_published_elsewhere(make, root, uri):
    one = storage.join(root, "one")
    first = storage.publish(make(), one, kind="x", fields={"n": 1})
    second = storage.publish(path_of(one), uri, kind="x", fields={"n": 1})
    assert second.same_content(first)
    assert storage.verify(uri) == second


def test_links_to_files_are_followed_and_what_a_dead_fetch_left_is_not_published(
    make, uri, tmp_path
):
    (tmp_path / "behind").write_bytes(b"linked")
    source = make(files={"a": b"", "sub/.shards.0123456789ab.part/half": b""})
    (source / "link").symlink_to(tmp_path / "behind")
    storage.publish(source, uri, kind="x")
    assert fetched(uri, tmp_path) == {"a": b"", "link": b"linked"}


def test_what_is_no_file_is_refused_by_name(make, place, uri, tmp_path):
    folder = make("with_folder_link")
    (folder / "folder link").symlink_to(tmp_path)
    pipe = make("with_pipe")
    os.mkfifo(pipe / "a pipe")
    broken = make("with_broken")
    (broken / "broken").symlink_to("nowhere")
    badly_named = make("badly_named")
    (badly_named / os.fsdecode(b"bad\xff")).write_bytes(b"")
    for source, message in [
        (badly_named, r"bad\\udcff.*its name is not UTF-8"),
        (folder, "folder link: it is a link to a folder"),
        (pipe, "a pipe: it is neither a file nor a folder"),
        (broken, "broken: No such file"),
        (tmp_path / "absent", "absent: No such file"),
        (tmp_path / "with_pipe" / "b.txt", "b.txt: Not a directory"),
    ]:
        with pytest.raises(UserError, match=message):
            storage.publish(source, uri, kind="x")
    assert place.content(place.root) == {}


def test_a_missing_manifest_is_said(place, uri, tmp_path):
    fill(place, uri, FILES)

    def fetch(absent):
        storage.fetch(absent, tmp_path / "target")

    for absent in (uri, storage.join(place.root, "nowhere"), storage.join(uri, "b.txt")):
        assert not storage.is_published(absent)
        for action in (storage.read_manifest, storage.verify, fetch):
            with pytest.raises(storage.NotPublished) as error:
                action(absent)
            assert str(error.value).startswith(f"{absent} is not published")
    assert not (tmp_path / "target").exists()


def test_no_uri_leads_out_of_its_root(place, uri):
    for path in ("../up", "/root", "a/../../up", "", "a//b"):
        for action in (storage.join, storage.read_file):
            with pytest.raises(UserError):
                action(uri, path)
    assert place.content(place.root) == {}


def test_garbage_is_none_where_nobody_died(make, place, uri):
    storage.publish(make(), uri, kind="x")
    storage.write_bytes(storage.join(place.root, "history.jsonl"), b"")
    fill(place, storage.join(place.root, "mine"), {"a": b"", "deep/b": b""})
    before = place.content(place.root)
    assert storage.collect_garbage(place.root) == []
    assert place.content(place.root) == before


def test_the_clock_of_the_storage_is_read_without_a_trace(place, uri, monkeypatch):
    place.put(storage.join(uri, "a"), b"")
    before, stored = time.time(), place.content(place.root)
    monkeypatch.setattr(time, "time", lambda: before + 1e6)
    # Object stores report whole seconds.
    assert before - 1 <= storage.read_clock(uri) < before + 9e5
    assert place.content(place.root) == stored


def test_damage_is_named(make, place, uri):
    manifest = storage.publish(make(), uri, kind="x")
    place.put(storage.join(uri, "in no manifest"), b"")
    for name, at, bit in (("a.bin", 5000, 7), ("b.txt", 0, 0), ("ü/é", -1, 3)):
        data = bytearray(FILES[name])
        data[at] ^= 1 << bit
        place.put(storage.join(uri, name), bytes(data))
        expected = rf"{name} has crc32c [0-9a-f]{{8}} \(expected [0-9a-f]{{8}}\)"
        with pytest.raises(storage.Corrupt, match=expected):
            storage.verify(uri)
        place.put(storage.join(uri, name), FILES[name])
    assert storage.verify(uri) == manifest
    file = storage.join(uri, "b.txt")
    place.put(file, b"secon")
    with pytest.raises(storage.Corrupt, match=r"b.txt has 5 bytes \(expected 6\); delete it"):
        storage.verify(uri)
    place.remove(file)
    with pytest.raises(storage.Corrupt, match=r"b.txt is missing \(expected 6 bytes\)"):
        storage.verify(uri)


def test_folders_and_files_in_each_others_place(make, root):
    uri = storage.join(root, "a")
    storage.publish(make(files={"b.txt": b"1", "deep/file": b"1"}), uri, kind="x")
    (path_of(uri) / "deep" / "file").unlink()
    (path_of(uri) / "deep").rmdir()
    (path_of(uri) / "deep").write_bytes(b"")
    with pytest.raises(storage.Corrupt, match="deep/file is missing"):
        storage.verify(uri)
    (path_of(uri) / "b.txt").unlink()
    (path_of(uri) / "b.txt").mkdir()
    with pytest.raises(UserError, match="there is a folder where a file is expected"):
        storage.verify(uri)


@EVERY
def test_one_file_is_read_and_checked(make, place, uri):
    storage.publish(make(), uri, kind="x")
    for name, data in FILES.items():
        assert storage.read_file(uri, name) == data
    place.put(storage.join(uri, "more"), b"")
    with pytest.raises(storage.Missing, match="does not contain more"):
        storage.read_file(uri, "more")
    with pytest.raises(storage.Missing, match=r"does not contain b\.tx; did you mean 'b\.txt'\?"):
        storage.read_file(uri, "b.tx")
    place.put(storage.join(uri, "b.txt"), b"Second")
    with pytest.raises(storage.Corrupt, match=r"b\.txt has crc32c"):
        storage.read_file(uri, "b.txt")
    place.remove(storage.join(uri, "b.txt"))
    with pytest.raises(storage.Corrupt, match=r"b\.txt is missing"):
        storage.read_file(uri, "b.txt")
    with pytest.raises(storage.NotPublished):
        storage.read_file(place.root, "b.txt")


def test_a_damaged_manifest_is_neither_absent_nor_replaced(make, place, uri):
    storage.publish(make(), uri, kind="x")
    place.put(storage.join(uri, "MANIFEST.json"), b"{")
    assert storage.is_published(uri)
    for action in (storage.read_manifest, storage.verify):
        with pytest.raises(storage.Corrupt, match=r"MANIFEST\.json is damaged"):
            action(uri)
    with pytest.raises(storage.Corrupt):
        storage.publish(make(), uri, kind="x")
    storage.delete(uri)
    storage.publish(make(), uri, kind="x")
    storage.verify(uri)


def test_published_lists_by_name_and_kind(make, place):
    root = place.root
    for name, kind in [("step-9", "checkpoint"), ("step-10", "checkpoint"), ("Ü 1", "model")]:
        storage.publish(make(), storage.join(root, name), kind=kind, fields={"name": name})
    fill(place, root, {"history.jsonl": b"", "half/a": b"", ".hidden/MANIFEST.json": b"{}"})
    names = ["step-10", "step-9", "Ü 1"]
    assert [m.fields["name"] for _, m in storage.list_published(root)] == names
    checkpoints = [uri for uri, _ in storage.list_published(root, "checkpoint")]
    assert checkpoints == [storage.join(root, name) for name in names[:2]]
    assert storage.list_published(root, "dataset") == []


def test_the_newest_is_found_by_manifests(make, place):
    assert storage.newest(place.root) is None
    assert storage.list_published(place.root) == []
    for name, kind in [("b", "x"), ("a", "x"), ("c", "y")]:
        uri = storage.join(place.root, name)
        manifest = storage.publish(make(), uri, kind=kind, fields={"name": name})
        assert storage.newest(place.root) == (uri, manifest)
    for name in ("a", "b"):
        found = storage.newest(place.root, "x")
        assert found[0] == storage.join(place.root, name)
        storage.delete(found[0])


def test_published_of_a_file(root, make):
    make(str(path_of(root)), {"file": b""})
    with pytest.raises(UserError, match=r"cannot list .*file: Not a directory"):
        storage.list_published(storage.join(root, "file"))


@EVERY
def test_published_passes_over_what_it_cannot_read_and_says_so(make, place, caplog):
    root = place.root
    for name in ("a", "b", "c"):
        storage.publish(make(), storage.join(root, name), kind="x")
    place.put(uri_below(root, "a"), b"torn")
    newer = place.get(uri_below(root, "b")).replace(b'"schema": 1', b'"schema": 2')
    place.put(uri_below(root, "b"), newer)
    with caplog.at_level(logging.WARNING):
        assert [uri for uri, _ in storage.list_published(root)] == [storage.join(root, "c")]
    assert sorted(record.getMessage().split(" (")[0] for record in caplog.records) == [
        f"skipped: {storage.join(root, 'a')}: MANIFEST.json is damaged",
        f"skipped: {storage.join(root, 'b')}: MANIFEST.json has schema 2, but this version "
        "reads only schema 1; use the version that wrote it, or create it again",
    ]


def uri_below(root, name):
    return storage.join(root, name, "MANIFEST.json")


@EVERY
def test_delete_takes_all_and_may_be_repeated(make, place):
    root = place.root
    uri, other = storage.join(root, "a"), storage.join(root, "ab")
    storage.publish(make(), uri, kind="x")
    storage.publish(make(), other, kind="x")
    storage.write_bytes(storage.join(root, "file"), b"1")
    storage.delete(storage.join(root, "file"))
    storage.delete(uri)
    storage.delete(uri)
    storage.delete(storage.join(root, "never", "was"))
    assert {path.partition("/")[0] for path in place.content(root)} == {"ab"}
    storage.publish(make("new", {"n": b""}), uri, kind="y")


def test_delete_of_a_link(make, root):
    kept = make("kept")
    path_of(root).mkdir()
    (path_of(root) / "link").symlink_to(kept)
    storage.delete(storage.join(root, "link"))
    assert list(path_of(root).iterdir()) == []
    assert content(kept) == FILES


@EVERY
def test_bytes_are_written_read_and_replaced(place):
    uri = storage.join(place.root, "a b", "history.jsonl")
    with pytest.raises(
        storage.Missing, match=r"there is nothing at (file:///|gs://|s3://|minio://)"
    ):
        storage.read_bytes(uri)
    for data in (b"", b"one\n", b"two\n" * 1000, b"\0\xff"):
        storage.write_bytes(uri, data)
        assert storage.read_bytes(uri) == data
    assert place.content(place.root).keys() == {"a b/history.jsonl"}
    with pytest.raises(storage.Missing):
        storage.read_bytes(storage.join(uri, "below"))

"""Lists, deletions, and files of their own."""

from __future__ import annotations

import logging

import pytest

from trainer import storage
from trainer.errors import UserError

from .conftest import FILES, Make, content, path_of
from .places import Place, fill


def test_published_lists_by_name_and_kind(make: Make, place: Place) -> None:
    root = place.root
    for name, kind in [("step-9", "checkpoint"), ("step-10", "checkpoint"), ("Ü 1", "model")]:
        storage.publish(make(), storage.join(root, name), kind=kind, fields={"name": name})
    fill(place, root, {"history.jsonl": b"", "half/a": b"", ".hidden/MANIFEST.json": b"{}"})
    assert [m.fields["name"] for _, m in storage.published(root)] == ["step-10", "step-9", "Ü 1"]
    assert [uri for uri, _ in storage.published(root, "checkpoint")] == [
        storage.join(root, "step-10"),
        storage.join(root, "step-9"),
    ]
    assert storage.published(root, "dataset") == []


def test_the_newest_is_found_by_manifests(make: Make, place: Place) -> None:
    assert storage.newest(place.root) is None
    for name, kind in [("b", "x"), ("a", "x"), ("c", "y")]:
        uri = storage.join(place.root, name)
        manifest = storage.publish(make(), uri, kind=kind, fields={"name": name})
        assert storage.newest(place.root) == (uri, manifest)
    found = storage.newest(place.root, "x")
    assert found
    assert found[0] == storage.join(place.root, "a")
    storage.delete(storage.join(place.root, "a"))
    found = storage.newest(place.root, "x")
    assert found
    assert found[0] == storage.join(place.root, "b")


def test_published_of_nothing(place: Place) -> None:
    assert storage.published(place.root) == []


def test_published_of_a_file(root: str, make: Make) -> None:
    make(str(path_of(root)), {"file": b""})
    with pytest.raises(UserError, match=r"cannot list .*file: Not a directory"):
        storage.published(storage.join(root, "file"))


def test_published_passes_over_what_it_cannot_read_and_says_so(
    make: Make, place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    root = place.root
    for name in ("a", "b", "c"):
        storage.publish(make(), storage.join(root, name), kind="x")
    place.put(uri_below(root, "a"), b"torn")
    newer = place.get(uri_below(root, "b")).replace(b'"schema": 1', b'"schema": 2')
    place.put(uri_below(root, "b"), newer)
    with caplog.at_level(logging.WARNING):
        assert [uri for uri, _ in storage.published(root)] == [storage.join(root, "c")]
    assert sorted(record.getMessage().split(" (")[0] for record in caplog.records) == [
        f"passed over: {storage.join(root, 'a')}: MANIFEST.json is damaged",
        f"passed over: {storage.join(root, 'b')}: MANIFEST.json has schema 2 and this version "
        "reads 1: use the version that wrote it, or make it again",
    ]


def uri_below(root: str, name: str) -> str:
    return storage.join(root, name, "MANIFEST.json")


def test_delete_takes_all_and_may_be_repeated(make: Make, place: Place) -> None:
    root = place.root
    uri, other = storage.join(root, "a"), storage.join(root, "ab")
    storage.publish(make(), uri, kind="x")
    storage.publish(make(), other, kind="x")
    storage.delete(uri)
    storage.delete(uri)
    storage.delete(storage.join(root, "never", "was"))
    assert {path.partition("/")[0] for path in place.content(root)} == {"ab"}
    storage.publish(make("new", {"n": b""}), uri, kind="y")


def test_delete_of_a_file(place: Place) -> None:
    storage.write_bytes(storage.join(place.root, "file"), b"1")
    storage.delete(storage.join(place.root, "file"))
    assert place.content(place.root) == {}


def test_delete_of_a_link(make: Make, root: str) -> None:
    kept = make("kept")
    path_of(root).mkdir()
    (path_of(root) / "link").symlink_to(kept)
    storage.delete(storage.join(root, "link"))
    assert list(path_of(root).iterdir()) == []
    assert content(kept) == FILES


def test_bytes_are_written_read_and_replaced(place: Place) -> None:
    uri = storage.join(place.root, "a b", "history.jsonl")
    with pytest.raises(
        storage.Missing, match=r"there is nothing at (file:///|gs://|s3://|minio://)"
    ):
        storage.read_bytes(uri)
    for data in (b"", b"one\n", b"two\n" * 1000, b"\0\xff"):
        storage.write_bytes(uri, data)
        assert storage.read_bytes(uri) == data
    assert place.content(place.root).keys() == {"a b/history.jsonl"}


def test_bytes_below_a_file_are_missing(place: Place) -> None:
    uri = storage.join(place.root, "file")
    storage.write_bytes(uri, b"")
    with pytest.raises(storage.Missing):
        storage.read_bytes(storage.join(uri, "below"))

"""Lists, deletions, and files of their own."""

from __future__ import annotations

import logging

import pytest

from trainer import storage
from trainer.errors import UserError

from .conftest import FILES, Make, content, path_of


def test_published_lists_by_name_and_kind(make: Make, root: str) -> None:
    for name, kind in [("step-9", "checkpoint"), ("step-10", "checkpoint"), ("Ü 1", "model")]:
        storage.publish(make(), storage.join(root, name), kind=kind, fields={"name": name})
    make(str(path_of(root)), {"history.jsonl": b"", "half/a": b"", ".hidden/MANIFEST.json": b"{}"})
    assert [m.fields["name"] for _, m in storage.published(root)] == ["step-10", "step-9", "Ü 1"]
    assert [uri for uri, _ in storage.published(root, "checkpoint")] == [
        storage.join(root, "step-10"),
        storage.join(root, "step-9"),
    ]
    assert storage.published(root, "dataset") == []


def test_published_of_nothing(root: str, make: Make) -> None:
    assert storage.published(root) == []
    make(str(path_of(root)), {"file": b""})
    with pytest.raises(UserError, match=r"cannot list .*file: Not a directory"):
        storage.published(storage.join(root, "file"))


def test_published_passes_over_what_it_cannot_read_and_says_so(
    make: Make, root: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("a", "b", "c"):
        storage.publish(make(), storage.join(root, name), kind="x")
    (path_of(root) / "a" / "MANIFEST.json").write_bytes(b"torn")
    newer = (
        (path_of(root) / "b" / "MANIFEST.json").read_text().replace('"schema": 1', '"schema": 2')
    )
    (path_of(root) / "b" / "MANIFEST.json").write_text(newer)
    with caplog.at_level(logging.WARNING):
        assert [uri for uri, _ in storage.published(root)] == [storage.join(root, "c")]
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        f"passed over: {root}/a: MANIFEST.json is damaged",
        f"passed over: {root}/b: MANIFEST.json has schema 2 and this version reads 1: "
        "use the version that wrote it, or make it again",
    ]


def test_delete_takes_all_and_may_be_repeated(make: Make, root: str) -> None:
    uri, other = storage.join(root, "a"), storage.join(root, "ab")
    storage.publish(make(), uri, kind="x")
    storage.publish(make(), other, kind="x")
    storage.delete(uri)
    storage.delete(uri)
    storage.delete(storage.join(root, "never", "was"))
    assert [path.name for path in path_of(root).iterdir()] == ["ab"]
    storage.publish(make("new", {"n": b""}), uri, kind="y")


def test_delete_of_a_file_or_a_link(make: Make, root: str) -> None:
    kept = make("kept")
    make(str(path_of(root)), {"file": b""})
    (path_of(root) / "link").symlink_to(kept)
    storage.delete(storage.join(root, "file"))
    storage.delete(storage.join(root, "link"))
    assert list(path_of(root).iterdir()) == []
    assert content(kept) == FILES


def test_bytes_are_written_read_and_replaced(root: str) -> None:
    uri = storage.join(root, "a b", "history.jsonl")
    with pytest.raises(storage.Missing, match="there is nothing at file:///"):
        storage.read_bytes(uri)
    for data in (b"", b"one\n", b"two\n" * 1000, b"\0\xff"):
        storage.write_bytes(uri, data)
        assert storage.read_bytes(uri) == data
    assert content(path_of(root)).keys() == {"a b/history.jsonl"}


def test_bytes_below_a_file_are_missing(root: str) -> None:
    uri = storage.join(root, "file")
    storage.write_bytes(uri, b"")
    with pytest.raises(storage.Missing):
        storage.read_bytes(storage.join(uri, "below"))

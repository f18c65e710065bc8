"""Storage in a replay: read as it was, written to the mirror alone, in files and in buckets."""

import json
from pathlib import Path

import pytest

from tests.stores.fixtures import bucket_name
from trainer import mirror, storage
from trainer.errors import UserError
from trainer.mirror import Snapshot

NOW = "2026-03-01T00:00:00.000Z"


def published_at(uri, text, created, folder):
    """Publish one file, as it was at a time."""
    folder.mkdir()
    (folder / "a.txt").write_text(text, encoding="utf-8")
    made = storage.publish(folder, uri, kind="thing", fields={"text": text})
    tree = {**json.loads(made.to_json()), "created": created}
    storage.write_bytes(storage.join(uri, "MANIFEST.json"), json.dumps(tree).encode())


@pytest.fixture(params=["file", "s3"])
def root(request, tmp_path):
    if request.param == "file":
        return storage.uri_of(tmp_path / "root")
    server, name = request.getfixturevalue("s3"), bucket_name()
    server.create_bucket(name)
    return f"s3://{name}/root"


@pytest.fixture
def before(root, tmp_path, request):
    """Publish one directory before the time and one after it; return all that the store has."""
    published_at(storage.join(root, "old"), "old", "2026-02-28T23:59:59.999Z", tmp_path / "1")
    published_at(storage.join(root, "new"), "new", "2026-03-01T00:00:00.001Z", tmp_path / "2")
    storage.write_bytes(storage.join(root, "run", ".lock", "1.json"), b"{}")
    storage.write_bytes(storage.join(root, "run", "note.txt"), b"then")

    def content():
        if path := storage.local_path(root):
            return {str(each): each.read_bytes() for each in path.rglob("*") if each.is_file()}
        server, bucket = request.getfixturevalue("s3"), root.split("/")[2]
        return {key: server.content(bucket, key) for key in server.keys(bucket)}

    return content


@pytest.fixture
def replay(root, before, tmp_path, monkeypatch):
    """Be a process of a replay; what the store has is the same at its end."""
    content = before()
    folder = tmp_path / "replay"
    folder.mkdir()
    snapshot = Snapshot(
        root=root,
        source=root,
        until=NOW,
        hidden=("run/.lock*",),
        path=str(storage.local_path(root) or ""),
    )
    mirror.write(folder, snapshot, {})
    monkeypatch.setenv(mirror.VARIABLE, str(folder))
    yield folder
    monkeypatch.delenv(mirror.VARIABLE)
    assert before() == content


def test_what_was_published_later_is_not_there(replay, root):
    assert storage.read_file(storage.join(root, "old"), "a.txt") == b"old"
    assert not storage.is_published(storage.join(root, "new"))
    assert [storage.name_of(uri) for uri, _ in storage.published(root)] == ["old"]
    assert storage.verify(storage.join(root, "old")).fields == {"text": "old"}
    assert replay.is_dir()


@pytest.mark.usefixtures("replay")
def test_what_is_hidden_is_not_there(root):
    with pytest.raises(storage.Missing):
        storage.read_bytes(storage.join(root, "run", ".lock", "1.json"))
    assert storage.names(storage.join(root, "run")) == ["note.txt"]
    assert storage.create_bytes(storage.join(root, "run", ".lock", "1.json"), b"own")


def test_what_is_written_is_in_the_mirror(replay, root, tmp_path):
    note = storage.join(root, "run", "note.txt")
    storage.write_bytes(note, b"now")
    assert storage.read_bytes(note) == b"now"
    assert (replay / "storage" / "run" / "note.txt").read_bytes() == b"now"
    again = tmp_path / "again"
    again.mkdir()
    (again / "a.txt").write_text("again", encoding="utf-8")
    # The place is free: what is there was published later.
    storage.publish(again, storage.join(root, "new"), kind="thing")
    assert storage.read_file(storage.join(root, "new"), "a.txt") == b"again"
    with pytest.raises(storage.Conflict):
        storage.publish(again, storage.join(root, "old"), kind="thing")
    assert not storage.create_bytes(note, b"other")


def test_what_is_deleted_is_gone_for_the_replay(replay, root):
    storage.delete(storage.join(root, "old"))
    assert not storage.is_published(storage.join(root, "old"))
    assert storage.published(root) == []
    storage.delete(storage.join(root, "never"))
    assert storage.collect_garbage(root) == []
    assert (replay / "gone").is_dir()


@pytest.mark.usefixtures("replay")
def test_what_is_elsewhere_is_only_read(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "rows.csv").write_text("1", encoding="utf-8")
    uri = storage.uri_of(other / "rows.csv")
    assert storage.read_bytes(uri) == b"1"
    for write in (lambda: storage.write_bytes(uri, b"2"), lambda: storage.delete(uri)):
        with pytest.raises(UserError, match="a replay publishes nothing"):
            write()
    with pytest.raises(UserError, match="a replay publishes nothing"):
        storage.publish(other, storage.uri_of(tmp_path / "target"), kind="thing")


def test_the_root_may_be_read_by_another_uri(s3, tmp_path, monkeypatch):
    name = bucket_name()
    s3.create_bucket(name)
    published_at(f"s3://{name}/copy/old", "old", NOW, tmp_path / "1")
    there = f"minio://{name}/root?endpoint=http://minio.kubeflow:9000"
    snapshot = Snapshot(root=there, source=f"s3://{name}/copy", until=NOW)
    mirror.write(tmp_path, snapshot, {})
    monkeypatch.setenv(mirror.VARIABLE, str(tmp_path))
    uri = storage.join(there, "old")
    assert storage.read_file(uri, "a.txt") == b"old"
    storage.fetch(uri, tmp_path / "fetched")
    assert Path(tmp_path, "fetched", "a.txt").read_text(encoding="utf-8") == "old"


def test_a_replay_without_its_file_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv(mirror.VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match=r"has no readable replay\.json; replay the step again"):
        storage.read_bytes("file:///nothing")

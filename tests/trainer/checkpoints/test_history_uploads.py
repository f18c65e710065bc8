"""Background uploads: one at a time, only the newest of each slot, and with reported errors."""

import threading
from collections.abc import Callable

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import LogFiles, UploadQueue
from flotilla.trainer.runtime.errors import UserError


class Gate:
    """An upload that blocks until it is released."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.opened.wait(60)


def failing(error: Exception) -> Callable[[], None]:
    def upload() -> None:
        raise error

    return upload


def test_put_does_not_wait_and_flush_waits_for_all() -> None:
    uploads, gate, done = UploadQueue(), Gate(), []
    uploads.put("a", gate)
    uploads.put("b", lambda: done.append("b"))
    assert gate.begun.wait(60)
    assert done == []
    gate.opened.set()
    uploads.flush()
    assert done == ["b"]


def test_of_uploads_that_wait_the_newest_replaces_the_others() -> None:
    uploads, gate, done = UploadQueue(), Gate(), []
    uploads.put("a", gate)
    assert gate.begun.wait(60)
    for number in range(5):
        uploads.put("a", lambda number=number: done.append(number))
        uploads.put("b", lambda number=number: done.append(-number))
    gate.opened.set()
    uploads.flush()
    assert done == [4, -4]


def test_what_a_newer_one_takes_the_place_of_is_reported() -> None:
    uploads, gate, reported = UploadQueue(), Gate(), []

    def fail() -> None:
        gate()
        raise storage.Unavailable("away")

    uploads.put("a", fail, lambda: reported.append("ran"))
    assert gate.begun.wait(60)
    uploads.put("a", lambda: None, lambda: reported.append("waited"))
    assert reported == []
    uploads.put("a", failing(storage.Unavailable("away")), lambda: reported.append("failed"))
    assert reported == ["waited"]
    gate.opened.set()
    with pytest.raises(storage.Unavailable):
        uploads.flush()
    assert reported == ["waited", "ran"]
    uploads.put("a", lambda: None)
    uploads.flush()
    assert reported == ["waited", "ran", "failed"]


def test_there_is_one_upload_at_a_time() -> None:
    uploads, at_once, most = UploadQueue(), [], []

    def upload() -> None:
        at_once.append(1)
        most.append(len(at_once))
        at_once.pop()

    for number in range(50):
        uploads.put(str(number), upload)
    uploads.flush()
    assert most == [1] * 50


def test_a_lasting_error_is_raised_at_the_next_upload() -> None:
    uploads = UploadQueue()
    uploads.put("a", failing(UserError("no permission")))
    with pytest.raises(UserError, match="no permission"):
        uploads.flush()
    with pytest.raises(UserError, match="no permission"):
        uploads.put("a", lambda: None)


def test_an_unavailable_store_is_tried_again_at_the_end() -> None:
    uploads, tries = UploadQueue(), []

    def upload() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise storage.Unavailable("away")

    uploads.put("a", upload)
    uploads.put("b", lambda: None)
    uploads.flush()
    assert len(tries) == 2


def test_a_store_that_stays_unavailable_is_one_line_at_the_end() -> None:
    uploads = UploadQueue()
    uploads.put("a", failing(storage.Unavailable("away for 300 s")))
    uploads.put("b", lambda: None)
    with pytest.raises(storage.Unavailable, match="away for 300 s"):
        uploads.flush()


def test_a_newer_upload_replaces_a_failed_one() -> None:
    uploads = UploadQueue()
    gate = Gate()
    uploads.put("a", failing(storage.Unavailable("away")))
    uploads.put("b", gate)
    assert gate.begun.wait(60)
    uploads.put("a", lambda: None)
    gate.opened.set()
    uploads.flush()


def test_a_bug_is_raised() -> None:
    uploads = UploadQueue()
    uploads.put("a", failing(ZeroDivisionError("a bug")))
    with pytest.raises(ZeroDivisionError):
        uploads.flush()


def test_logs_keep_their_folders_and_only_what_has_grown_goes_again(tmp_path, monkeypatch) -> None:
    folder, sent = tmp_path / "logs", []
    monkeypatch.setattr(storage, "write_bytes", lambda place, data: sent.append((place, data)))
    files = LogFiles(folder, "gs://b/logs")
    files.upload()
    (folder / "run" / "train").mkdir(parents=True)
    (folder / "events.0").write_bytes(b"of an older version")
    (folder / "run" / "train" / "events.1").write_bytes(b"one")
    files.upload()
    assert sorted(sent) == [
        ("gs://b/logs/events.0", b"of an older version"),
        ("gs://b/logs/run/train/events.1", b"one"),
    ]
    sent.clear()
    (folder / "run" / "train" / "events.1").write_bytes(b"one, two")
    files.upload()
    assert sent == [("gs://b/logs/run/train/events.1", b"one, two")]

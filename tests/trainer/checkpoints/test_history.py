"""Tests rows (complete, in order, truncated by a new attempt), and uploads in the background."""

import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import contextmanager

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints import history
from flotilla.trainer.checkpoints.history import (
    HISTORY_FILE,
    History,
    LogFiles,
    RowFile,
    SegmentedRowFile,
    UploadQueue,
    read_history,
    read_rows,
)
from flotilla.trainer.runtime.errors import UserError
from tests.stores.fixtures import bucket_name


def row(step, **metrics):
    return {"global_step": step, "loss": 0.5, "seconds": step / 10, **metrics}


def read(uri_file):
    return [each["global_step"] for each in read_rows(uri_file, lambda row: "global_step" in row)]


@pytest.fixture
def uri(tmp_path):
    return storage.uri_of(tmp_path / "check points")


def lines(uri):
    text = (storage.local_path(uri) / HISTORY_FILE).read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_run_that_has_not_begun_has_no_rows(uri):
    assert read_history(uri) == []
    empty = History(uri, start=0)
    assert empty.rows == []
    assert empty.seconds() == 0.0


def test_each_row_is_in_the_file_at_once(uri):
    growing = History(uri, start=0)
    for count, step in enumerate((10, 20, 30), start=1):
        growing.add(row(step))
        assert lines(uri) == read_history(uri) == growing.rows
        assert len(growing.rows) == count
    assert growing.seconds() == 3.0
    assert [path.name for path in storage.local_path(uri).iterdir()] == [HISTORY_FILE]


def test_a_new_attempt_continues_rows_and_time(uri):
    first = History(uri, start=0)
    first.add(row(10))
    first.add(row(20, validation_loss=0.5))
    second = History(uri, start=20)
    assert second.rows == first.rows
    assert second.seconds() == 2.0
    second.add(row(30))
    assert [each["global_step"] for each in read_history(uri)] == [10, 20, 30]


@pytest.mark.parametrize(("start", "kept"), [(0, []), (9, []), (10, [10]), (25, [10, 20])])
def test_what_came_after_the_checkpoint_is_made_again(uri, start, kept):
    first = History(uri, start=0)
    for step in (10, 20, 30):
        first.add(row(step))
    second = History(uri, start=start)
    assert [each["global_step"] for each in second.rows] == kept
    assert second.seconds() == (kept[-1] / 10 if kept else 0.0)
    # The old file stays complete until the new attempt writes a row.
    assert len(read_history(uri)) == 3
    second.add(row(99))
    assert [each["global_step"] for each in read_history(uri)] == [*kept, 99]


def test_metrics_keep_their_exact_values(uri):
    exact = row(3, validation_accuracy=0.1 + 0.2, learning_rate=1e-7)
    History(uri, start=0).add(exact)
    assert read_history(uri) == [exact]


@pytest.mark.parametrize(
    "damaged",
    ["", '{"global_step": 20, "lo', "null", "[]", '{"loss": 1.0, "seconds": 2.0}',
     '{"global_step": "now", "seconds": 2.0}', '{"global_step": 20, "seconds": null}', "\ufffd",
     "[" * 100_000],
    ids=range(9),
)  # fmt: skip
def test_one_damaged_line_hides_no_other_and_ends_no_training(uri, caplog, damaged):
    whole = [json.dumps(row(step)) for step in (10, 30)]
    text = "\n".join([whole[0], damaged, whole[1], ""])
    storage.write_bytes(storage.join(uri, HISTORY_FILE), text.encode())
    assert [each["global_step"] for each in read_history(uri)] == [10, 30]
    assert caplog.text.count("history.jsonl: line 2\n") == 1
    continued = History(uri, start=30)
    continued.add(row(40))
    assert [each["global_step"] for each in lines(uri)] == [10, 30, 40]


def test_a_file_in_the_place_of_the_folder_is_said_in_one_line(uri):
    storage.local_path(uri).write_text("in the way")
    with pytest.raises(UserError, match="there is a file where a folder is expected"):
        History(uri, start=0).add(row(10))


WRITER = """
import sys
from flotilla.trainer.checkpoints.history import RowFile
file = RowFile(sys.argv[1])
file.begin([])
for number in range(1_000_000):
    file.append({"global_step": number, "text": "x" * 300})
    print(number, flush=True)
"""


@contextmanager
def bytes_written():
    """Count the bytes that this thread writes, as the kernel reports them."""

    def count():
        with open("/proc/thread-self/io", encoding="ascii") as file:
            return int(dict(line.split(": ") for line in file)["wchar"])

    found = []
    before = count()
    yield found
    found.append(count() - before)


@pytest.fixture
def uri_file(tmp_path):
    return storage.uri_of(tmp_path / "history.jsonl")


class TestInAFileSystem:
    def test_a_row_costs_a_row_and_not_the_file(self, uri_file):
        file = RowFile(uri_file)
        file.begin(map(row, range(10_000)))
        before = storage.local_path(uri_file).stat()
        with bytes_written() as written:
            file.append(row(10_000))
        assert written[0] < 1000
        assert storage.local_path(uri_file).stat().st_ino == before.st_ino
        assert read(uri_file) == list(range(10_001))

    def test_a_line_that_was_cut_short_takes_no_other_along(self, uri_file, caplog):
        storage.local_path(uri_file).write_bytes(b'{"global_step": 1}\n{"global_st')
        # The line may simply be incomplete, so there is no warning.
        assert (read(uri_file), caplog.text) == ([1], "")
        RowFile(uri_file).append(row(3))
        assert read(uri_file) == [1, 3]
        assert "line 2\n" in caplog.text

    @pytest.mark.parametrize("limit", [1, 20])
    def test_a_full_disk_leaves_the_rows_as_they_were(self, uri_file, limit):
        file = RowFile(uri_file)
        file.begin([row(1)])
        path = storage.local_path(uri_file)
        before = path.read_bytes()
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + limit, limits[1]))
        try:
            with pytest.raises(UserError, match="cannot write"):
                file.append(row(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, ignored)
        assert path.read_bytes() == before
        file.append(row(2))
        assert read(uri_file) == [1, 2]

    def test_a_kill_loses_no_row_that_was_added(self, uri_file):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, uri_file], stdout=subprocess.PIPE, text=True
        )
        with writer:
            last = next(line for line in writer.stdout if int(line) >= 20)
            writer.kill()
            last = [last, *writer.stdout][-1]
        found = read(uri_file)
        assert found == list(range(len(found)))
        assert len(found) > int(last)

    @pytest.mark.parametrize("there", ["folder", "fifo", "loop"])
    def test_what_is_no_file_is_one_line(self, uri_file, there):
        path = storage.local_path(uri_file)
        {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "loop": lambda: loop(path)}[there]()
        with pytest.raises(UserError, match=r"^cannot read .*history\.jsonl"):
            read(uri_file)
        with pytest.raises(UserError, match=r"^cannot write .*history\.jsonl"):
            RowFile(uri_file).append(row(1))


def loop(path):
    path.symlink_to(path)


class TestInAnObjectStore:
    @pytest.fixture(params=["gcs", "s3"])
    def uri_file(self, request):
        bucket, server = bucket_name(), request.getfixturevalue(request.param)
        server.create_bucket(bucket)
        scheme, options = {"gcs": ("gs", ""), "s3": ("s3", "?region=us-east-1")}[request.param]
        return f"{scheme}://{bucket}/run/checkpoints/history.jsonl{options}"

    @pytest.fixture(autouse=True)
    def _small_segments(self, monkeypatch):
        monkeypatch.setattr(history, "SEGMENT_BYTES", 1000)

    def sent(self, monkeypatch):
        sizes = []
        write = storage.write_bytes
        monkeypatch.setattr(
            storage, "write_bytes", lambda at, data: (sizes.append(len(data)), write(at, data))
        )
        return sizes

    def test_nothing_is_sent_before_the_upload(self, uri_file, monkeypatch):
        sizes = self.sent(monkeypatch)
        file = SegmentedRowFile(uri_file)
        file.upload()
        file.begin([row(1)])
        file.append(row(2))
        assert (sizes, read(uri_file)) == ([], [])
        file.upload()
        assert read(uri_file) == [1, 2]

    def test_the_bytes_grow_with_the_rows_and_not_with_their_square(self, uri_file, monkeypatch):
        sizes = self.sent(monkeypatch)
        file = SegmentedRowFile(uri_file)
        file.begin([])
        for step in range(300):
            file.append(row(step))
            if step % 10 == 9:
                file.upload()
        assert read(uri_file) == list(range(300))
        # Each of 30 uploads sends the new rows and repeats at most one segment.
        assert max(sizes) < 1100
        assert sum(sizes) < 30 * 1500

    @staticmethod
    def uploaded(uri_file, count):
        """Upload this number of rows as a new attempt."""
        file = SegmentedRowFile(uri_file)
        file.begin(map(row, range(count)))
        file.upload()
        return file

    def test_another_attempt_leaves_no_segment_of_the_one_before(self, uri_file):
        self.uploaded(uri_file, 200)
        again = self.uploaded(uri_file, 30)
        assert read(uri_file) == list(range(30))
        again.append(row(30))
        again.upload()
        assert read(uri_file) == list(range(31))
        assert len(storage.names(storage.parent_of(uri_file))) == 2

    def test_no_segment_stays_where_the_rows_end_with_one(self, uri_file):
        self.uploaded(uri_file, 200)
        size = len(storage.read_bytes(uri_file).splitlines())
        self.uploaded(uri_file, size)
        assert read(uri_file) == list(range(size))

    def test_a_gap_hides_no_segment_of_an_earlier_attempt(self, uri_file):
        self.uploaded(uri_file, 200)
        storage.delete(uri_file.replace(".jsonl", ".2.jsonl"))
        self.uploaded(uri_file, 1)
        assert storage.names(storage.parent_of(uri_file)) == [storage.name_of(uri_file)]

    def test_a_row_that_comes_during_an_upload_is_sent_by_the_next(self, uri_file, monkeypatch):
        file = SegmentedRowFile(uri_file)
        file.begin(map(row, range(25)))
        write = storage.write_bytes

        def while_it_is_sent(at, data):
            write(at, data)
            file.append(row(99))

        monkeypatch.setattr(storage, "write_bytes", while_it_is_sent)
        file.upload()
        monkeypatch.setattr(storage, "write_bytes", write)
        file.upload()
        assert read(uri_file)[:25] == list(range(25))
        assert set(read(uri_file)[25:]) == {99}


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

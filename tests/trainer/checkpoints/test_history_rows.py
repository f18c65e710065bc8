"""Files of rows: appended in a file system, in segments in an object store, whole after a kill."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager

import pytest

from tests.stores.fixtures import bucket_name
from trainer import storage
from trainer.checkpoints import history
from trainer.checkpoints.history import RowFile, SegmentedRowFile, read_rows
from trainer.errors import UserError

WRITER = """
import sys
from trainer.checkpoints.history import RowFile
file = RowFile(sys.argv[1])
file.begin([])
for number in range(1_000_000):
    file.append({"global_step": number, "text": "x" * 300})
    print(number, flush=True)
"""


def row(step):
    return {"global_step": step, "seconds": step / 10, "loss": 0.5}


def read(uri):
    return [each["global_step"] for each in read_rows(uri, lambda row: "global_step" in row)]


@contextmanager
def bytes_written():
    """Count the bytes that this thread writes, by the kernel's own account."""

    def count():
        with open("/proc/thread-self/io", encoding="ascii") as file:
            return int(dict(line.split(": ") for line in file)["wchar"])

    found = []
    before = count()
    yield found
    found.append(count() - before)


@pytest.fixture
def uri(tmp_path):
    return storage.uri_of(tmp_path / "history.jsonl")


class TestInAFileSystem:
    def test_a_row_costs_a_row_and_not_the_file(self, uri):
        file = RowFile(uri)
        file.begin(map(row, range(10_000)))
        before = storage.local_path(uri).stat()
        with bytes_written() as written:
            file.append(row(10_000))
        assert written[0] < 1000
        assert storage.local_path(uri).stat().st_ino == before.st_ino
        assert read(uri) == list(range(10_001))

    def test_a_line_that_was_cut_short_takes_no_other_along(self, uri, caplog):
        storage.local_path(uri).write_bytes(b'{"global_step": 1}\n{"global_st')
        # It may be about to be written: no word about it.
        assert (read(uri), caplog.text) == ([1], "")
        RowFile(uri).append(row(3))
        assert read(uri) == [1, 3]
        assert "line 2\n" in caplog.text

    @pytest.mark.parametrize("limit", [1, 20])
    def test_a_full_disk_leaves_the_rows_as_they_were(self, uri, limit):
        file = RowFile(uri)
        file.begin([row(1)])
        path = storage.local_path(uri)
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
        assert read(uri) == [1, 2]

    def test_a_kill_loses_no_row_that_was_added(self, uri):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, uri], stdout=subprocess.PIPE, text=True
        )
        with writer:
            last = next(line for line in writer.stdout if int(line) >= 20)
            writer.kill()
            last = [last, *writer.stdout][-1]
        found = read(uri)
        assert found == list(range(len(found)))
        assert len(found) > int(last)

    @pytest.mark.parametrize("there", ["folder", "fifo", "loop"])
    def test_what_is_no_file_is_one_line(self, uri, there):
        path = storage.local_path(uri)
        {"folder": path.mkdir, "fifo": lambda: os.mkfifo(path), "loop": lambda: loop(path)}[there]()
        with pytest.raises(UserError, match=r"^cannot read .*history\.jsonl"):
            read(uri)
        with pytest.raises(UserError, match=r"^cannot write .*history\.jsonl"):
            RowFile(uri).append(row(1))


def loop(path):
    path.symlink_to(path)


class TestInAnObjectStore:
    @pytest.fixture
    def uri(self, gcs):
        bucket = bucket_name()
        gcs.create_bucket(bucket)
        return f"gs://{bucket}/run/checkpoints/history.jsonl"

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

    def test_nothing_is_sent_before_the_upload(self, uri, monkeypatch):
        sizes = self.sent(monkeypatch)
        file = SegmentedRowFile(uri)
        file.upload()
        file.begin([row(1)])
        file.append(row(2))
        assert (sizes, read(uri)) == ([], [])
        file.upload()
        assert read(uri) == [1, 2]

    def test_the_bytes_grow_with_the_rows_and_not_with_their_square(self, uri, monkeypatch):
        sizes = self.sent(monkeypatch)
        file = SegmentedRowFile(uri)
        file.begin([])
        for step in range(300):
            file.append(row(step))
            if step % 10 == 9:
                file.upload()
        assert read(uri) == list(range(300))
        # Of 30 uploads each sends what is new and at most one segment again.
        assert max(sizes) < 1100
        assert sum(sizes) < 30 * 1500

    def test_another_attempt_leaves_no_segment_of_the_one_before(self, uri):
        first = SegmentedRowFile(uri)
        first.begin(map(row, range(200)))
        first.upload()
        again = SegmentedRowFile(uri)
        again.begin(map(row, range(30)))
        again.upload()
        assert read(uri) == list(range(30))
        again.append(row(30))
        again.upload()
        assert read(uri) == list(range(31))
        assert len(storage.names(storage.parent_of(uri))) == 2

    def test_no_segment_stays_where_the_rows_end_with_one(self, uri):
        first = SegmentedRowFile(uri)
        first.begin(map(row, range(200)))
        first.upload()
        size = len(storage.read_bytes(uri).splitlines())
        again = SegmentedRowFile(uri)
        again.begin(map(row, range(size)))
        again.upload()
        assert read(uri) == list(range(size))

    def test_a_gap_hides_no_segment_of_an_earlier_attempt(self, uri):
        first = SegmentedRowFile(uri)
        first.begin(map(row, range(200)))
        first.upload()
        storage.delete(uri.replace(".jsonl", ".2.jsonl"))
        again = SegmentedRowFile(uri)
        again.begin([row(0)])
        again.upload()
        assert storage.names(storage.parent_of(uri)) == [storage.name_of(uri)]

    def test_a_row_that_comes_during_an_upload_is_sent_by_the_next(self, uri, monkeypatch):
        file = SegmentedRowFile(uri)
        file.begin(map(row, range(25)))
        write = storage.write_bytes

        def while_it_is_sent(at, data):
            write(at, data)
            file.append(row(99))

        monkeypatch.setattr(storage, "write_bytes", while_it_is_sent)
        file.upload()
        monkeypatch.setattr(storage, "write_bytes", write)
        file.upload()
        assert read(uri)[:25] == list(range(25))
        assert set(read(uri)[25:]) == {99}

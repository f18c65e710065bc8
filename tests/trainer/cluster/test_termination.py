"""Tests the termination message of a task, whose space is reserved in case of a full disk."""

import errno
import resource
from pathlib import Path

import pytest

from flotilla.trainer.cluster import termination


def test_a_message_is_one_line_and_the_next_attempt_deletes_it(tmp_path):
    assert termination.read(tmp_path) == ""
    termination.write(tmp_path, " two\nlines ")
    assert termination.read(tmp_path) == "two lines"
    termination.reserve(tmp_path)
    assert termination.read(tmp_path) == ""
    termination.write(tmp_path, "ä" * 5000)
    termination.write(tmp_path, "short")
    assert termination.read(tmp_path) == "short"


def test_a_message_is_removed_and_where_its_file_is_a_mount_emptied(tmp_path, monkeypatch):
    path = tmp_path / termination.FILE
    termination.remove(tmp_path)
    termination.write(tmp_path, "lost")
    termination.remove(tmp_path)
    assert not path.exists()
    termination.write(tmp_path, "lost")

    def refuse(*_, **__):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(Path, "unlink", refuse)
    termination.remove(tmp_path)
    # If the file is empty, Kubernetes uses the log instead.
    assert path.read_bytes() == b""


def test_a_message_that_is_too_long_is_cut(tmp_path):
    termination.write(tmp_path, "ä" * 5000)
    assert termination.read(tmp_path).startswith("ä" * 2000)
    assert (tmp_path / termination.FILE).stat().st_size == termination.ROOM


def test_a_message_fits_where_files_may_not_grow(tmp_path):
    termination.reserve(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (termination.ROOM, hard))
    try:
        termination.write(tmp_path, "no space left")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert termination.read(tmp_path) == "no space left"


@pytest.mark.parametrize("way", ["a file", "nothing"])
def test_without_a_folder_nothing_happens(tmp_path, way):
    folder = tmp_path / "folder"
    if way == "a file":
        folder.write_text("in the way")
    termination.write(folder, "lost")

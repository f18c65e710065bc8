"""The one line of a task that ends: it has its room before a disk is full."""

from __future__ import annotations

import resource

import pytest

from trainer.cluster import termination


def test_words_are_one_line_and_the_next_life_forgets_them(tmp_path):
    assert termination.read(tmp_path) == ""
    termination.leave(tmp_path, " two\nlines ")
    assert termination.read(tmp_path) == "two lines"
    termination.reserve(tmp_path)
    assert termination.read(tmp_path) == ""
    termination.leave(tmp_path, "ä" * 5000)
    termination.leave(tmp_path, "short")
    assert termination.read(tmp_path) == "short"


def test_words_that_are_too_long_are_cut(tmp_path):
    termination.leave(tmp_path, "ä" * 5000)
    assert termination.read(tmp_path).startswith("ä" * 2000)
    assert (tmp_path / termination.FILE).stat().st_size == termination.ROOM


def test_a_file_that_may_not_grow_has_room_for_them(tmp_path):
    termination.reserve(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (termination.ROOM, hard))
    try:
        termination.leave(tmp_path, "no space left")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert termination.read(tmp_path) == "no space left"


@pytest.mark.parametrize("way", ["a file", "nothing"])
def test_where_there_is_no_folder_nothing_happens(tmp_path, way):
    folder = tmp_path / "folder"
    if way == "a file":
        folder.write_text("in the way")
    termination.leave(folder, "lost")

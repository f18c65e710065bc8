"""Tests that a table omits or wraps columns that do not fit, and never truncates a cell."""

import io

import pytest
from rich.console import Console
from rich.text import Text

from flotilla.pipelines.cli.display import Table

URI = "gs://bucket/" + "folder/" * 9 + "model"
ROWS = [
    {"id": "a-1", "size": "9", "mark": Text("failed", "red"), "why": "no [room] left for it"},
    {"id": "b-22", "size": "10", "mark": "", "why": ""},
]


def drawn(width, rows=ROWS, **options):
    return [line.plain for line in Table(rows=rows, **options).lines(width)]


def test_in_a_pipe_it_is_whole_with_a_sign_in_each_cell():
    console = Console(file=io.StringIO(), width=10)
    console.print(Table(rows=ROWS, spare=("mark",), right=("size",)), soft_wrap=True)
    assert console.file.getvalue().splitlines() == [
        "id    size  mark    why",
        "a-1      9  failed  no [room] left for it",
        "b-22    10  -       -",
    ]


def test_what_is_spare_goes_first_in_its_order():
    for width, left in ((41, "id size mark why"), (40, "id size why"), (32, "id why")):
        assert drawn(width, spare=("mark", "size"))[0].split() == left.split()


def test_sentences_go_on_in_further_lines_between_words():
    assert drawn(32, words=("why",)) == [
        "id    size  mark    why",
        "a-1   9     failed  no [room]",
        "                    left for it",
        "b-22  10",
    ]


def test_what_fits_in_no_way_is_a_table_of_its_own_with_the_first_column():
    assert drawn(16) == [
        "id    size", "a-1   9", "b-22  10", "",
        "id    mark", "a-1   failed", "",
        "id    why", "a-1   no [room] left for it",
    ]  # fmt: skip


def test_long_heads_have_short_ones_where_there_is_no_room():
    rows = [{"": "accuracy", "digits-0001": "0.91", "digits-0002": "0.93"}]
    more = {"right": ("digits-0001", "digits-0002")}
    more["short"] = {"digits-0001": "run 1", "digits-0002": "run 2"}
    assert drawn(34, rows, **more) == [
        "          digits-0001  digits-0002",
        "accuracy         0.91         0.93",
    ]
    assert drawn(33, rows, **more) == [
        "run 1  digits-0001", "run 2  digits-0002", "",
        "          run 1  run 2",
        "accuracy   0.91   0.93",
    ]  # fmt: skip


@pytest.mark.parametrize("width", [None, 1, 5, 20, 60, 80, 140])
def test_a_uri_is_whole_at_every_width(width):
    rows = [{"name": "digits", "where": f"at {URI}", "more": "x"}]
    for words in ((), ("where",)):
        assert any(URI in line for line in drawn(width, rows, words=words))


def test_wide_signs_take_two_places():
    rows = [{"a": "漢字", "b": "x"}, {"a": "abcd", "b": "y\n\x1b[1m"}]
    assert drawn(80, rows) == ["a     b", "漢字  x", "abcd  y \\u001b[1m"]


def test_without_rows_there_is_nothing():
    assert drawn(80, []) == drawn(None, []) == []

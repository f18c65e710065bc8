"""Tests JSON layouts: one object per line, lists, objects over several lines, invalid text."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from flotilla.trainer.data.files.formats import raw_rows
from flotilla.trainer.data.files.formats.json_lines import JsonReader
from flotilla.trainer.data.files.formats.raw_rows import Piece
from flotilla.trainer.runtime.errors import UserError

READER = JsonReader()
ROWS = [{"n": i, "t": f"größe {i}, [{{", "in": {"b": i / 2, "x": None}} for i in range(50)]
LINES = [json.dumps(row) for row in ROWS]


def table(folder: Path, data: str | bytes) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the records of a file, and messages about the broken ones."""
    path = folder / "t.json"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    broken: list[str] = []

    def refuse(number: int, why: str) -> None:
        broken.append(f"{READER.row(path, Piece(0), number)}: {why}")

    names = READER.names(path)
    found = READER.rows(path, Piece(0), names, refuse)
    return [row for rows in found for row in rows.table.to_pylist()], broken


@pytest.mark.parametrize(
    "data",
    [
        "\n".join(LINES),
        "\ufeff" + "\r\n".join(LINES) + "\r\n",
        json.dumps(ROWS),
        json.dumps(ROWS, indent=2),
        "\ufeff\n [\n" + ",\n".join(LINES) + "\n]\n",
        "[" + ",\n".join(LINES) + ",\n]",
        ",\n".join(LINES),
        "\n".join(json.dumps(row, indent=1) for row in ROWS),
        "\n".join(f"[{pair[0]},{pair[1]}]" for pair in zip(LINES[::2], LINES[1::2], strict=True)),
        json.dumps(ROWS).encode("utf-16"),
        gzip.compress(json.dumps(ROWS).encode()),
    ],
)
def test_all_forms_are_read(tmp_path: Path, data: str | bytes) -> None:
    rows, broken = table(tmp_path, data)
    assert [row["n"] for row in rows] == list(range(50))
    assert rows[7] == {"n": 7, "t": "größe 7, [{", "in/b": 3.5, "in/x": None}
    assert not broken


def test_a_list_is_read_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flotilla.trainer.data.files.formats.json_lines._CHUNK", 7)
    rows, broken = table(tmp_path, json.dumps(ROWS, ensure_ascii=False))
    assert len(rows) == 50
    assert rows[7]["t"] == "größe 7, [{"
    assert not broken


def test_elements_that_are_no_rows_are_named_by_their_number(tmp_path: Path) -> None:
    text = json.dumps([*ROWS[:3], 5, *ROWS[3:]]).encode()
    rows, broken = table(tmp_path, text.replace(b"gr\\u00f6\\u00dfe 9,", b"gr\xf6\xdfe 9,"))
    assert len(rows) == 49
    assert broken == ["4: it is a int, not an object", "11: it is not UTF-8"]
    with pytest.raises(UserError, match=r"t\.json, record 3 is not JSON"):
        table(tmp_path, '[{"a": 1}, {"a": 2}, {"a": oh}, {"a": 3}]')
    with pytest.raises(UserError, match=r"t\.json, record 3 is not JSON"):
        table(tmp_path, '[{"a": 1}, {"a": 2}, {"a": ')


def test_keys_that_are_there_twice_break_a_row(tmp_path: Path) -> None:
    double = ['{"n": 1, "n": 2}', '{"in": {"b": 1}, "in/b": 2}']
    _, broken = table(tmp_path, "\n".join([*LINES[:2], *double]))
    assert broken == [
        "3: it is not JSON (the key 'n' occurs twice)",
        "4: 'in/b' occurs twice, as one key and as nested keys",
    ]


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"data": ROWS}, "is one JSON object with a list of objects in 'data'"),
        ({"type": "x", "features": ROWS}, "is one JSON object with a list of objects in 'feat"),
        ({"columns": ["a"], "index": [0], "data": [[1]]}, "with columns and data in separate keys"),
        ({"a": {"0": 1, "1": 2}, "b": {"0": 3, "1": 4}}, "with a key for each row"),
        ({"0": {"a": 1, "b": 2}, "1": {"a": 3, "b": 4}}, "with a key for each row"),
        ({"a": [1, 2], "b": ["x", "y"]}, "is one JSON object with a list of values for each key"),
        ([[1, 2], [3, 4]], "t.json, row 1: it is a list, not an object"),
        ([], "has no JSON object in its first 1000 lines"),
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_what_is_no_list_of_rows_is_one_line(tmp_path, data, line, indent):
    with pytest.raises(UserError) as refused:
        table(tmp_path, json.dumps(data, indent=indent))
    if not (indent and data and isinstance(data, list)):
        assert line in str(refused.value)
    assert "write one object per line (pandas: to_json(" in str(refused.value)


def test_keys_of_each_record_of_its_own_are_refused(tmp_path: Path) -> None:
    lines = [json.dumps({f"id{i}": {"x": i, "y": "ab"[i % 2]}}) for i in range(50)]
    with pytest.raises(UserError, match=r"different keys, such as 'id0/x' and 'id49/y'"):
        table(tmp_path, "\n".join(lines))


def test_one_request_is_one_row(tmp_path: Path) -> None:
    one = {"user": {"age": 1, "x": 2}, "item": {"age": 3, "x": 4}, "v": [[1, 2], [3, 4]]}
    rows, _ = table(tmp_path, json.dumps(one, indent=2))
    assert rows == [{"user/age": 1, "user/x": 2, "item/age": 3, "item/x": 4, "v": one["v"]}]


def test_a_letter_of_two_halves_is_a_letter(tmp_path: Path) -> None:
    rows, broken = table(tmp_path, '[{"a": "idea \U0001f4a1"}, {"a": "C:\\\\udc80"}]')
    assert [row["a"] for row in rows] == ["idea \U0001f4a1", "C:\\udc80"]
    assert not broken


def test_a_list_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="ends within a list, after record 49"):
        table(tmp_path, "[" + ",\n".join(LINES[:49]) + ",\n")


def test_a_key_for_each_record_is_one_line_before_a_table_is_made(tmp_path):
    """A table with a column for every key would need quadratic memory."""
    lines = [{"x": 1, "label": "a"}] * 1500 + [{"x": 1, f"k{i}": 1} for i in range(3000)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(UserError, match="4500 records have 3002 keys in total, such as 'k2999'"):
        list(JsonReader().rows(path, Piece(0), (), print))


def test_more_keys_than_are_read_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_rows, "MOST_COLUMNS", 50)
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({f"k{i}": 1 for i in range(60)}) for _ in range(3)))
    with pytest.raises(UserError, match="has 60 columns, but at most 50 can be read"):
        list(JsonReader().rows(path, Piece(0), (), print))

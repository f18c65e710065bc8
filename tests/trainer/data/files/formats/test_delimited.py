"""Tests how CSV files are read: layouts, quotes, pieces, compression and damage."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest

from flotilla.trainer.data.files.formats.delimited import CsvReader
from flotilla.trainer.data.files.formats.raw_rows import END, Piece
from flotilla.trainer.runtime.errors import UserError

READER = CsvReader()


def file(folder: Path, data: bytes, name: str = "a.csv") -> Path:
    path = folder / name
    path.write_bytes(data)
    return path


def csv_records(path: Path, *bounds: int) -> list[dict[str, str]]:
    names = READER.names(path)
    pieces = READER.rows(path, Piece(0, *bounds), names, lambda *_: None)
    return [row for rows in pieces for row in rows.table.to_pylist()]


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as refused:
        csv_records(path)
    return str(refused.value).replace(str(path), "FILE")


def test_delimiters_are_found(tmp_path: Path) -> None:
    for mark in (",", ";", "\t", "|"):
        path = file(tmp_path, mark.join(("a", '"b,;"', "c\n1", "2", "3\n")).encode())
        assert csv_records(path) == [{"a": "1", "b,;": "2", "c": "3"}]


def test_newlines_in_quotes(tmp_path: Path) -> None:
    path = file(tmp_path, b'a,"b\nb"\n1,"x\ny"\n\n2,"say ""hi"""\n')
    assert csv_records(path) == [{"a": "1", "b\nb": "x\ny"}, {"a": "2", "b\nb": 'say "hi"'}]
    assert [READER.row(path, Piece(0), number) for number in (0, 1)] == [3, 6]


def test_a_file_is_cut_at_ends_of_records_only(tmp_path: Path) -> None:
    rows = "".join(f'{i},"line\nof {i % 13 * "x"} ""q"""\n' for i in range(2000))
    path = file(tmp_path, f"a,b\n{rows}".encode())
    ranges = READER.cut(path, 4096)
    assert len(ranges) > 5
    assert [row for each in ranges for row in csv_records(path, *each)] == csv_records(path)
    middle = Piece(0, *ranges[3])
    first = csv_records(path, *ranges[3])[0]
    assert READER.row(path, middle, 0) == 2 + 2 * int(first["a"])


def test_a_file_whose_quotes_are_in_doubt_stays_whole(tmp_path: Path) -> None:
    path = file(tmp_path, b"a,b\n" + b'1,5" pipe\n' * 2000 + b'1,"two\nlines"\n')
    assert READER.cut(path, 1024) == [(0, END)]
    assert len(csv_records(path)) == 2001


@pytest.mark.parametrize("row", ['{},5" pipe', '{},"a ""b"", c"', "{},", "{},'it''s'"])
def test_a_file_without_values_of_several_lines_is_divided_at_lines(tmp_path, row):
    path = file(
        tmp_path, "".join(["a,b\n", *(row.format(at) + "\n" for at in range(900))]).encode()
    )
    pieces = READER.cut(path, 1024)
    assert len(pieces) > 3
    found = [row["a"] for each in pieces for row in csv_records(path, *each)]
    assert found == [str(number) for number in range(900)]


def test_compressed_files(tmp_path: Path) -> None:
    data = b"a,b\n1,2\n"
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(data))
    (tmp_path / "a.csv.bz2").write_bytes(bz2.compress(data))
    (tmp_path / "a.csv.xz").write_bytes(lzma.compress(data))
    with zipfile.ZipFile(tmp_path / "a.csv.zip", "w") as archive:
        archive.writestr("inner.csv", data)
    for path in sorted(tmp_path.iterdir()):
        assert csv_records(path) == [{"a": "1", "b": "2"}]


def test_what_is_damaged_or_expands_beyond_measure_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("flotilla.trainer.data.files.formats.raw_rows.FREE_BYTES", 1 << 16)
    bomb = file(tmp_path, gzip.compress(b"a,b\n" + b"1,2\n" * 200_000), "a.csv.gz")
    assert "expands to more than 200 times its size" in refusal(bomb)
    whole = gzip.compress(b"a,b\n" + bytes(f"{'1,2' * 999}\n", "ascii"))
    cut = file(tmp_path, whole[:30], "cut.csv.gz")
    assert "cannot be decompressed" in refusal(cut)
    for data in (b"PK\3\4 none", b"\xfd7zXZ\0 none"):
        assert "cannot be decompressed" in refusal(file(tmp_path, data, "none.csv"))


def test_a_row_longer_than_a_block_is_read_and_what_is_before_it_once(tmp_path: Path) -> None:
    long = "x" * (3 << 20)
    lines = ["a,b", *(f"{number},y" for number in range(400_000)), "1,2,3", f"5,{long}", "6,z"]
    path = file(tmp_path, "\n".join(lines).encode())
    broken: list[int] = []
    found = list(READER.rows(path, Piece(0), ["a"], lambda number, _: broken.append(number)))
    numbers = [int(each) for rows in found for each in rows.numbers]
    assert numbers == [*range(400_000), 400_001, 400_002]
    assert broken == [400_000]
    assert found[-1].table["a"].to_pylist()[-2:] == ["5", "6"]
    longest = file(tmp_path, f"a,b\n1,{'x' * (20 << 20)}\n".encode())
    assert "a row is longer than 8 MiB, or a quote is not closed" in refusal(longest)


def test_what_is_read_ahead_of_a_large_file_is_bounded(tmp_path: Path) -> None:
    path = file(tmp_path, b"a,b\n" + (b"x" * 1022 + b",\n") * (96 << 10))
    before = pa.total_allocated_bytes()
    held = 0
    for _ in READER.rows(path, Piece(0), ["b"], lambda *_: None):
        held = max(held, pa.total_allocated_bytes() - before)
    assert held < 48 << 20

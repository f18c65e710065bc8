"""Tests CSV files with titles, comments, unusual quotes or unnamed columns."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import zipfile
import zlib
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from flotilla.trainer.data.files.formats import csv_layout
from flotilla.trainer.data.files.formats.csv_layout import _check, _Quotes, detect_layout
from flotilla.trainer.data.files.formats.delimited import CsvReader
from flotilla.trainer.data.files.formats.raw_rows import Piece
from flotilla.trainer.runtime.errors import UserError

READER = CsvReader()


def table(folder: Path, data: str | bytes) -> tuple[list[dict[str, str]], list[str]]:
    """Return the rows of a file, and messages about the broken ones."""
    path = folder / "t.csv"
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    broken: list[str] = []
    names = READER.names(path)
    found = READER.rows(
        path,
        Piece(0),
        names,
        lambda number, why: broken.append(f"{READER.row(path, Piece(0), number)}: {why}"),
    )
    return [row for rows in found for row in rows.table.to_pylist()], broken


def refusal(folder: Path, data: str | bytes) -> str:
    with pytest.raises(UserError) as refused:
        table(folder, data)
    return str(refused.value).replace(str(folder / "t.csv"), "FILE")


BODY = "".join(f"{i},w{i % 3},{'ab'[i % 2]}\n" for i in range(30))
PLAIN = f"n,word,kind\n{BODY}"


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        PLAIN.replace("\n", "\r\n"),
        PLAIN.replace("\n", "\r"),
        PLAIN.replace(",", ";"),
        PLAIN.replace(",", "\t"),
        PLAIN.replace(",", " "),
        f"sep=,\n{PLAIN}",
        "SEP=;\r\n" + PLAIN.replace(",", ";").replace("\n", "\r\n"),
        f"\n  \n,,\n{PLAIN}",
        f"# made by a tool\n# on 3 May, at noon\n{PLAIN}",
        f"# n,word,kind\n{PLAIN}",
        f"Sales of May\n{PLAIN}",
        f"Sales of May,,\n\n{PLAIN}",
        f"Sales of May\nfrom,Bonn\n{PLAIN}",
        f"n,word,kind,\n{BODY}".replace("a\n", "a,\n").replace("b\n", "b,\n"),
        f"n,word,kind\n{BODY}".replace("a\n", "a,\n").replace("b\n", "b,\n"),
        f"n,word,kind,,\n{BODY}",
        PLAIN + "\n\n",
        "\ufeff\ufeff" + PLAIN,
        "\ufeff" + PLAIN.replace("n,word,kind", '"n","word","kind"'),
        "'n','word','kind'\n" + "".join(f"{i},'w{i % 3}','{'ab'[i % 2]}'\n" for i in range(30)),
    ],
)  # fmt: skip
def test_what_is_around_a_table_is_not_read(tmp_path: Path, text: str) -> None:
    expected = [{"n": str(i), "word": f"w{i % 3}", "kind": "ab"[i % 2]} for i in range(30)]
    assert table(tmp_path, text) == (expected, [])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_texts_of_two_bytes_are_read(tmp_path: Path, encoding: str) -> None:
    text = PLAIN.replace("w1", "größe")
    mark = codecs.BOM_UTF16_BE if encoding == "utf-16-be" else b""
    for data in (text.encode(encoding), mark + text.encode(encoding)):
        rows, broken = table(tmp_path, data)
        assert len(rows) == 30
        assert rows[1]["word"] == "größe"
        assert not broken
    assert detect_layout(tmp_path / "t.csv").names == ("n", "word", "kind")


def test_what_is_compressed_is_known_by_its_content(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "z", "w") as archive:
        archive.writestr("__MACOSX/t.csv", b"x")
        archive.writestr("a/.hidden", b"x")
        archive.writestr("a/t.csv", PLAIN)
    for data in (gzip.compress(PLAIN.encode()), zlib.compress(PLAIN.encode()),
                 (tmp_path / "z").read_bytes()):  # fmt: skip
        assert len(table(tmp_path, data)[0]) == 30


def test_names_of_rows_are_an_index(tmp_path: Path) -> None:
    rows = "".join(f'"{i + 1}",{i},"{"ab"[i % 2]}"\n' for i in range(30))
    for head in ('"","n","kind"', '"n","kind"'):
        found, broken = table(tmp_path, f"{head}\n{rows}")
        assert found[2] == {"n": "2", "kind": "a"}
        assert not broken
        assert "ignored as an index" in detect_layout(tmp_path / "t.csv").notes[0]
    again = ",n,kind\n" + "5,1,a\n" * 3
    assert refusal(tmp_path, again) == "data.source: FILE, row 1 has no name for column 1; name it"


def test_spaces_quotes_of_another_kind_and_lines_of_markdown(tmp_path: Path) -> None:
    rows = "".join(f'"r{i}" {i} "{"ab"[i % 2]} b"\n' for i in range(9))
    assert table(tmp_path, f'"n" "kind"\n{rows}')[0][3] == {"n": "3", "kind": "b b"}
    line = refusal(tmp_path, f'n "kind"\n{rows}')
    assert line.startswith("data.source: FILE, row 1: the header has 2 names (n, kind), but 9 of")
    assert line.endswith("add the missing names, or remove a title above the header")
    rows = "".join(f'"{i + 1}" {i} "{"ab"[i % 2]} b"\n' for i in range(9))
    assert table(tmp_path, f'"n" "kind"\n{rows}')[0][3] == {"n": "3", "kind": "b b"}
    rows = "".join(f"{i},'a, b',x\n" for i in range(9))
    assert table(tmp_path, f"n,t,y\n{rows}")[0][3] == {"n": "3", "t": "a, b", "y": "x"}
    rows = "".join(f"| {i} | a |\n" for i in range(9))
    assert len(table(tmp_path, f"| n | kind |\n|---|:--|\n{rows}")[0]) == 9


@pytest.mark.parametrize(
    ("head", "is_odd"),
    [
        ("n,2019,2020", False),
        ("0,1,y", False),
        ("0,1,2", True),
        ("5.1,3.5,a", True),
        ("150,4,setosa", True),
    ],
)
def test_names_that_are_numbers_are_said(tmp_path: Path, head: str, is_odd: bool) -> None:
    table(tmp_path, f"{head}\n" + "1,2,b\n2,3,c\n" * 9)
    assert [each for each in detect_layout(tmp_path / "t.csv").notes if "are numbers" in each] == [
        each for each in detect_layout(tmp_path / "t.csv").notes if is_odd
    ]


@pytest.mark.parametrize(
    ("row", "is_second"),
    [
        ("When?,How is it?,Which?", True),
        ("1,w1,a", False),
        ("0,w9,a", False),
        ("--,--,--", False),
        ("5,7,8", False),
        ("5,z,", False),
    ],
)
def test_a_second_header_is_said(tmp_path: Path, row: str, is_second: bool) -> None:
    table(tmp_path, f"n,word,kind\n{row}\n{BODY}")
    value = row.split(",")[1]
    said = f"row 2 has values that no row below it has, such as {value!r}; remove it if it is a"
    notes = detect_layout(tmp_path / "t.csv").notes
    assert [each[: len(said)] for each in notes] == [said] * is_second


def test_a_hash_may_name_a_column(tmp_path: Path) -> None:
    text = "#,Name,Type\n1,Bud,grass\n2,Ivy,grass\n3,Fox,fire\n"
    assert table(tmp_path, text)[0][2] == {"#": "3", "Name": "Fox", "Type": "fire"}


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "n,word\n1,5,a\n2,7,b\n",
            "FILE, row 1: the header has 2 names (n, word), but 2 of the first 2 rows have 3 "
            "values, such as row 2; quote numbers that have a comma, or add the missing names",
        ),
        ('x,t\n1, "a, b"\n2, "c, d"\n', "FILE, row 1: the header has 2 names (x, t), but 2 of"),
        (
            "n,word,kind\n1,2\n3,4\n",
            "FILE, row 1: the header has 3 names (n, word, kind), but 2 of the first 2 rows have 2 "
            "values, such as row 2; remove the extra names, or add the missing values",
        ),
        ("", "FILE is empty; write a header and rows"),
        (
            'a;b\nr1;"1,5";x\nr3;"2,5";y\n',
            "FILE, row 1: the header has 2 names (a, b), but 2 of the first 2 rows have 3 values, "
            "such as row 2; add the missing names, or remove a title above the header",
        ),
        (
            "red,small,yes\n" + "blue,small,no\nred,large,yes\n" * 3,
            "FILE seems to have no header, because values of its first row (red, small, yes) occur "
            "again in their columns; put a row with the names of the columns before it",
        ),
        ("17,red,8\n18,blue,9\n19,red,7\n", "FILE seems to have no header, because values of"),
        ("Al,red,yes\n" + "Bo,red,no\nCy,blue,yes\n", "FILE seems to have no header, because"),
        ("0,1\n3,4\n", "FILE has no header: its first row is 0, 1; put a row with the names"),
        ("1,2\n3,4\n", "FILE has no header: its first row is 1, 2; put a row with the names"),
        ("a,b,a\n1,2,3\n", "FILE, row 1 has two columns named 'a' ([1, 3]); rename one of them"),
        ("a,,b\n1,2,3\n", "FILE, row 1 has no name for column 2; name it"),
        ("a,b,,c\n" + "1,2\n1,2\n1,2,3,4\n" * 3, "FILE, row 1 has no name for column 3; name it"),
        ("a\0b,c\n", "FILE is not a CSV file, because it has binary data; set data.format"),
        ("   x  y\n 1.5  a\n-0.5  b\n 2.5  b\n", "FILE has columns of fixed width"),
        ('{"x": 1, "y": 2}\n{"x": 2, "y": 3}\n', "FILE is JSON; set data.format: jsonl"),
        ('[\n{"x": 1}\n]', "FILE is JSON; set data.format: jsonl"),
        ("<!DOCTYPE html>\n<html>", "FILE is an HTML page; download the file itself, as CSV"),
        ("version https://git-lfs.github.com/spec/v1\n", "FILE is a Git LFS pointer"),
        (b"PAR1\x15\x04", "FILE is Parquet; set data.format: parquet"),
        (b"x,gr\xf6\xdfe\n1,2\n", "FILE, row 1 is not UTF-8; write the file as UTF-8"),
        (b"x,y\r1,2\r3,K\xf6ln\r", "FILE, row 3 is not UTF-8: perhaps 'Köln' in Windows-1252"),
        (b"x,y\n" + b"1,2\n" * 9 + b"3,\x80\n", "FILE, row 11 is not UTF-8"),
        (
            b"a,b\n1,x\n2,\xfc\n",
            "FILE, row 3 is not UTF-8: perhaps 'ü' in Windows-1252; write",
        ),
    ],
)
def test_what_is_laid_out_otherwise_is_one_line(tmp_path, text, line):
    assert refusal(tmp_path, text).startswith(f"data.source: {line}")


@pytest.mark.filterwarnings("ignore:Exception ignored in")
def test_a_long_row_that_is_no_text_is_named(tmp_path: Path) -> None:
    line = refusal(tmp_path, b"x,y\n1,a\n2,\xff,c\n3,b\n" + b"4,d\n" * 100)
    assert line.startswith("data.source: FILE, row 3 is not UTF-8: perhaps")


def test_a_column_without_a_name_is_empty_in_each_row(tmp_path: Path) -> None:
    lines = [f"{i},b,\n" for i in range(500)]
    lines[400] = "400,b,more\n"
    rows, broken = table(tmp_path, "n,word,\n" + "".join(lines))
    assert len(rows) == 499
    assert broken == ["402: a value ('more') in column 3, which has no name"]


def test_a_header_that_comes_again_is_broken(tmp_path: Path) -> None:
    rows, broken = table(tmp_path, PLAIN + PLAIN)
    assert len(rows) == 60
    assert broken == ["32: it repeats the header"]


def titles(**rows: str) -> str:
    lines = [f"{i},a thing,{'ab'[i % 2]}" for i in range(300)]
    for row, text in rows.items():
        lines[int(row.removeprefix("row"))] = text
    return "n,title,kind\n" + "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        ({"row20": '20,"Lost,a'}, "22 opens a quote that is not closed in 280 lines"),
        ({"row20": '20,"Lost,a', "row90": '90,27" disk,a'}, "22 opens a quote that ends in row 92"),
        ({"row20": '20,"Lost,a', "row90": '90,of 27",a'}, "22 opens a quote that ends in row 92"),
        ({"row9": '9,5" disk,a', "row280": '280,"Lost,a'}, "282 opens a quote that is not"),
        ({"row20": '20,"Lost,a', "row21": '21,27",a'}, "22 opens a quote that ends in row 23"),
    ],
)
def test_a_quote_that_would_take_rows_is_a_letter_where_rows_are_right_then(tmp_path, rows, where):
    found, broken = table(tmp_path, titles(**rows))
    assert len(found) == 300
    assert not broken
    assert found[int(next(iter(rows))[3:])]["title"] == next(iter(rows.values())).split(",")[1]
    assert detect_layout(tmp_path / "t.csv").notes[0].startswith(f"row {where}")
    # A quoted value elsewhere shows that quotes are not ordinary characters in this file.
    line = refusal(tmp_path, titles(**rows, row5='5,"a, b",a'))
    assert line.startswith(f"data.source: FILE: row {where}")
    assert "close or remove the quote, or write" in line


@pytest.mark.parametrize(
    "value", ['"one\ntwo"', '"a, b\nc, d, e\nf"', '"say ""hi""\nand go"', '"x\r\n\r\ny"', '"\n"']
)
def test_values_of_several_lines_are_values(tmp_path: Path, value: str) -> None:
    rows, broken = table(
        tmp_path, titles(**{f"row{i}": f"{i},{value},a" for i in range(0, 300, 7)})
    )
    assert len(rows) == 300
    assert rows[7]["title"] == value[1:-1].replace('""', '"')
    assert not broken


def test_quotes_after_a_backslash(tmp_path: Path) -> None:
    rows, _ = table(tmp_path, titles(row3=r'3,"say \"a, b\" \\ twice\"",a', row4='4,"x\ny",b'))
    assert len(rows) == 300
    assert rows[3]["title"] == r'say "a, b" \ twice"'
    # If backslashes escaped quotes, the backslash in this path would be lost.
    with pytest.raises(UserError, match="row 6 has a backslash outside"):
        table(tmp_path, titles(row3=r'3,"say \"hi\"",a', row4=r"4,C:\temp,b"))


@pytest.mark.parametrize("value", ['say \\"a, b\\" twice', 'say \\"a, b\\"'])
def test_a_delimiter_after_an_escaped_quote_in_each_row_is_text(tmp_path: Path, value: str) -> None:
    rows, broken = table(tmp_path, "n,t,y\n" + "".join(f'{i},"{value}",a\n' for i in range(30)))
    assert rows[3] == {"n": "3", "t": value.replace("\\", ""), "y": "a"}
    assert (len(rows), broken) == (30, [])


def test_one_value_may_be_as_its_column_is_called(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("n,word\n1,word\n2,other\n")
    broken: list[int] = []
    found = READER.rows(path, Piece(0), ["word"], lambda number, _: broken.append(number))
    assert [rows.table["word"].to_pylist() for rows in found] == [["word", "other"]]
    assert not broken


def test_a_row_with_a_value_that_is_missing_is_no_header(tmp_path: Path) -> None:
    rows, _ = table(tmp_path, "#name,score,target\na,NA,c\nb,0,u\nd,1,x\n")
    assert rows[0] == {"#name": "a", "score": "NA", "target": "c"}
    assert len(rows) == 3


def test_what_a_column_holds_is_found_once_for_all_quoted_values(tmp_path: Path) -> None:
    rows = "".join(f'{n},"{n} of ""them""\nin two lines"\n' for n in range(50))
    path = tmp_path / "t.csv"
    path.write_text(f"n,text\n{rows}")
    with patch.object(csv_layout, "_typical", wraps=csv_layout._typical) as typical:
        assert detect_layout(path).names == ("n", "text")
    assert typical.call_count == 2


def test_each_name_of_a_wide_table_is_looked_up_once(tmp_path: Path) -> None:
    class Name(str):
        compared = 0

        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            Name.compared += 1
            return str.__eq__(self, other)

    _check(tmp_path, "FILE", [Name(f"c{i}") for i in range(2000)], set())
    assert Name.compared < 10_000


def test_files_with_plain_quotes_have_one_row_in_each_line(tmp_path: Path) -> None:
    random, seen = np.random.RandomState(0), set()
    values = ["1", "x", '""', '"a"', '"a,"', '"a ""b"""', '5"', '"a\nb"', '"a"b', " 'c'"]
    for number in range(300):
        rows = [",".join(random.choice(values[: 4 + number % 7], 3)) for _ in range(8)]
        text = "".join(f"{row}\n" for row in ["n,m,k", "1,1,1", *rows])
        path = tmp_path / f"{number}.csv"
        path.write_text(text)
        try:
            layout = detect_layout(path)
        except UserError:
            continue
        found, lines = list(csv.reader(io.StringIO(text))), text.splitlines()
        quotes = _Quotes(path, layout, ())
        seen.add((layout.has_lines, quotes._has_plain_quotes(text.encode())))
        if quotes._has_plain_quotes(text.encode()) or (layout.has_lines and layout.quote):
            assert found == [next(csv.reader([line])) for line in lines]
    assert {(True, True), (True, False), (False, False)} <= seen

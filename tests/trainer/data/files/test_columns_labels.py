"""Tests how labels are read across files, spellings and formats."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla.trainer.data.files import conversion
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.data.files.sources import opened, read, source


def write_csv(folder: Path, labels: list[str], name: str = "a.csv") -> None:
    rows = [f"{place},{each}" for place, each in enumerate(labels)]
    (folder / name).write_text("\n".join(["x,y", *rows]) + "\n")


def labels_of(folder: Path, **keys: Any) -> tuple[tuple[str, ...], list[str], list[str]]:
    """Return the classes, each row's class in the order of `x`, and the notes."""
    made = source(folder, label="y", seed=1, **keys)
    selection = made.select()
    found = read(made, selection)
    names = selection.specs["y"].labels
    rows = sorted(zip(found["x"].tolist(), found["y"].tolist(), strict=True))
    return names, [names[each] if names else each for _, each in rows], list(made.notes())


@pytest.mark.parametrize(
    ("written", "classes"),
    [
        (["True", "TRUE", "false", "False"], ["true", "true", "false", "false"]),
        (["1.0", "0.0", "1", "0"], ["1", "0", "1", "0"]),
        (["Yes", "no", "NO ", "YES"], ["yes", "no", "no", "yes"]),
        (["cat", " cat", "dog ", "do\u200bg"], ["cat", "cat", "dog", "dog"]),
    ],
)
def test_spellings_of_a_class_are_one_between_files_as_well(tmp_path, written, classes):
    write_csv(tmp_path, written * 5)
    assert labels_of(tmp_path)[1] == classes * 5
    (tmp_path / "a.csv").unlink()
    for place, each in enumerate(written):
        rows = "".join(f"{20 * place + row},{each}\n" for row in range(20))
        (tmp_path / f"{place}.csv").write_text("x,y\n" + rows)
    assert labels_of(tmp_path)[1] == [each for each in classes for _ in range(20)]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([True, False], ("false", "true")),
        ([1.0, 0.0], ("0", "1")),
        ([Decimal("1"), Decimal("0")], ("0", "1")),
        ([3.0, 1.0, 2.0], ("1", "2", "3")),
        (["True", "False"], ("false", "true")),
        (["2", "10"], ("2", "10")),
    ],
)
def test_a_label_is_the_same_in_parquet_json_and_csv(tmp_path, values, names):
    rows = values * 6
    array = pa.array(rows, pa.decimal128(38, 0)) if isinstance(rows[0], Decimal) else pa.array(rows)
    for form in ("parquet", "jsonl", "csv"):
        (folder := tmp_path / form).mkdir()
        if form == "parquet":
            pq.write_table(pa.table({"x": range(len(rows)), "y": array}), folder / "a.parquet")
        elif form == "jsonl":
            plain = [float(each) if isinstance(each, Decimal) else each for each in rows]
            lines = [json.dumps({"x": place, "y": each}) for place, each in enumerate(plain)]
            (folder / "a.jsonl").write_text("\n".join(lines))
        else:
            write_csv(folder, [str(each) for each in rows])
        found, classes, _ = labels_of(folder)
        assert found == names, form
        expected = [names[sorted(set(values), key=lambda v: float(_as_number(v))).index(each)]
                    for each in rows]  # fmt: skip
        assert classes == expected, form


def _as_number(value: Any) -> float:
    return float(value == "True") if value in ("True", "False") else float(value)


SPELLINGS = "has several spellings of a class, which are read as one class"
TEXT_OR = "set data.types: {y: text}"


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (["Cat", "cat", "dog"], ["look alike: 'Cat' and 'cat'", TEXT_OR]),
        (["<=5", "<=5.", ">5"], ["look alike: '<=5' and '<=5.'", TEXT_OR]),
        (["1", "01", "2"], [f"{SPELLINGS}: '01' and '1'", TEXT_OR]),
        (["t", "1", "f"], [f"{SPELLINGS}: '1' and 't'", TEXT_OR]),
        (["1", "2", "3"], ["3 different whole numbers, which are read as classes; set data.types"]),
        (["?", "a", "b"], ["has '?' as a class; leave the cell empty"]),
        (["3 doors", "5 doors"], ["numbers stored as text", "set data.types: {y: number}"]),
        (["2025-01-01", "2025-02-01"], ["contains times"]),
        (["1/13/2025", "2/14/2025"], ["has dates or times of day"]),
        (["120/80", "135/90"], ["numbers in an unusual notation, such as '120/80'"]),
        (
            [*"abab" * 3, "Summe"],
            ["may mark rows of totals: 'Summe' (10 times); remove these rows"],
        ),
        (["yes", "'yes'", "no"], ["look alike: \"'yes'\" and 'yes'"]),
        (None, ["the label 'y' has 30 classes in 30 rows"]),
    ],
)
def test_what_is_doubtful_is_noted_with_the_key(tmp_path, written, says):
    write_csv(tmp_path, written * 10 if written else [f"name {place}" for place in range(30)])
    (note,) = labels_of(tmp_path)[2]
    assert not [each for each in says if each not in note]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (["red", "'red'"], "has values that look alike: \"'red'\" and 'red'"),
        (["red", "re\u200bd"], r"look alike: 'red' and 're\u200bd'"),
        ([*"abcd" * 5, "Subtotal:"], "may mark rows of totals: 'Subtotal:' (10 times)"),
        (["average", "poor"], ""),
        (["true", "1", "TRUE", "0"], "has values that look alike: 'TRUE' and 'true'"),
        (["01", "12", "123"], ""),
        (
            ['"=""1.5"""', '"=""2"""'],
            "numbers in an unusual notation, such as '=\"1.5\"', and is read",
        ),
        (["10:30 PST", "11:30 CET"], "has dates or times of day"),
    ],
)
def test_what_is_doubtful_in_an_input_is_noted(tmp_path, values, says):
    lines = [f"{each},{'ab'[row % 3 % 2]}\n" for row, each in enumerate(values * 10)]
    (tmp_path / "a.csv").write_text("c,y\n" + "".join(lines))
    made = source(tmp_path, label="y")
    made.select()
    assert [says] == [says for note in made.notes() if says in note] if says else not made.notes()


def test_many_whole_numbers_are_a_quantity_and_said(tmp_path):
    write_csv(tmp_path, [str(place % 25) for place in range(100)])
    names, values, (note,) = labels_of(tmp_path)
    assert (names, values[:3]) == ((), [0.0, 1.0, 2.0])
    assert note == (
        "the label 'y' has 25 different whole numbers, which are read as a quantity; set "
        "data.types: {y: class} if they are classes"
    )
    assert len(labels_of(tmp_path, types={"y": "class"})[0]) == 25


@pytest.mark.parametrize(
    ("written", "kind"),
    [
        (["$1,200", "$3"], "number"), (["5%", "7%", "9%"], "number"),
        (["1,5", "2,25"], "number_comma"), (["1 200", "3"], "number"),
        (["1.200,50 \u20ac", "3 \u20ac"], "number_comma"), (["(5)", "7"], "number"),
    ],
)  # fmt: skip
def test_numbers_in_writing_are_no_classes(tmp_path, written, kind):
    write_csv(tmp_path, [f'"{each}"' for each in written] * 10)
    with pytest.raises(UserError, match=rf"data.types: \{{y: {kind}\}}"):
        opened(tmp_path, label="y")
    names, values, _ = labels_of(tmp_path, types={"y": kind})
    assert names == ()
    assert all(isinstance(each, float) for each in values)
    assert len(labels_of(tmp_path, types={"y": "class"})[0]) == len(written)


def test_texts_are_kept_as_they_are_written_on_request(tmp_path):
    write_csv(tmp_path, ["Yes", "YES", "None", "no"] * 5)
    names, classes, notes = labels_of(tmp_path, types={"y": "text"})
    assert names == ("None", "YES", "Yes", "no")
    assert classes == ["Yes", "YES", "None", "no"] * 5
    assert not notes


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["", "NA", "nan"], "'y' has no value in any row"),
        (["a", "b", "", "", ""], "30 of 50 rows have no 'y'"),
    ],
)
def test_a_label_that_most_rows_lack_is_refused(tmp_path, labels, says):
    write_csv(tmp_path, labels * 10)
    with pytest.raises(UserError, match=says):
        opened(tmp_path, label="y")


@pytest.mark.parametrize("mark", ["", "NA", "nan", "None", "<NA>", "NaT", "#DIV/0!", "\\N"])
@pytest.mark.parametrize("others", [["a", "b", "c"], ["0", "1", "1"], ["1.5", "2.5", "7"]])
def test_rows_without_a_label_are_left_out_and_said(tmp_path, mark, others):
    write_csv(tmp_path, [*others, mark] * 10)
    names, classes, notes = labels_of(tmp_path)
    assert len(classes) == 30
    assert mark not in names
    is_class = f"; set data.types: {{y: text}} if {mark!r} is a class" if mark and names else ""
    assert notes[-1] == (
        "data.label: 10 of 40 rows have no 'y' (a.csv, row 5, a.csv, row 9, a.csv, row 13) and are "
        f"left out{is_class}"
    )


def test_a_mark_is_missing_among_numbers_and_a_class_among_texts(tmp_path):
    write_csv(tmp_path, ["1.5", "2.5", "-"] * 10)
    assert len(labels_of(tmp_path)[1]) == 20
    write_csv(tmp_path, ["+", "-"] * 10)
    assert labels_of(tmp_path)[0] == ("+", "-")


@pytest.mark.parametrize("word", ["unknown", "none", "-", "Missing", "?"])
def test_a_word_among_classes_is_a_class_of_an_input_as_well(tmp_path, word):
    rows = "".join(f"{each},{each != word}\n" for each in ["red", word, "blue"] * 8)
    (tmp_path / "a.csv").write_text("c,label\n" + rows)
    selection, found = opened(tmp_path, types={"c": "class"}, seed=1)
    assert set(selection.specs["c"].labels) == {"red", word, "blue"}
    assert sorted(found["c"].tolist()) == [0] * 8 + [1] * 8 + [2] * 8


@pytest.mark.parametrize("words", [["red", "NA", "blue"], ["red", "", "blue"], ["1", "?", "2"]])
def test_an_input_without_a_class_is_refused_with_the_number_of_rows(tmp_path, words):
    (tmp_path / "a.csv").write_text("c,label\n" + "".join(f"{each},1\n" for each in words * 4))
    with pytest.raises(UserError, match="'c' has 4 rows without a value"):
        opened(tmp_path, types={"c": "class"})


def test_classes_are_indexed_once_for_all_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    index = conversion.ClassIndex
    monkeypatch.setattr(conversion, "ClassIndex", lambda names: made.append(names) or index(names))
    classes = tuple(f"c{i}" for i in range(77))
    for start in range(5):
        found = conversion.class_ids(classes, pa.array(classes[start : start + 9]))
        assert found.tolist() == list(range(start, start + 9))
    assert len(made) == 1

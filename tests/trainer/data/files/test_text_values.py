"""Tests notations of numbers, and lists of numbers in text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.config.data import NUMBERS_IN_WRITING
from flotilla.trainer.data.files import text_values
from flotilla.trainer.data.files.text_values import parse_numbers
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.data.files.sources import opened, source


def read(kind: str, text: str, unit: str = "") -> float | None:
    values, bad = text_values.formatted_numbers(kind, pa.array([text]), unit)
    return None if bad[0] else float(values[0])


@pytest.mark.parametrize(
    ("text", "point", "comma"),
    [
        ("12", 12, 12), ("-7", -7, -7), ("+7", 7, 7), ("12.5", 12.5, None), ("12,5", None, 12.5),
        ("1,234", 1234, 1.234), ("1.234", 1.234, 1234), ("1,234,567.25", 1234567.25, None),
        ("1.234.567,25", None, 1234567.25), ("1 234", 1234, 1234), ("1'234.5", 1234.5, None),
        ("1\u2019234,5", None, 1234.5), ("1\u00a0234", 1234, 1234), ("1\u202f234,5", None, 1234.5),
        ("12,34,567", 1234567, None), ("1,23", None, 1.23), ("0,123", None, 0.123),
        ("45%", 0.45, 0.45), ("45,5 %", None, 0.455), ("\u22125", -5, -5), ("\u20135", -5, -5),
        ("(5)", -5, -5), ("5-", -5, -5), ("(-5)", None, None), ("-5-", None, None),
        ("(5", None, None), ("1_000", 1000, 1000),
        (".5", 0.5, None), ("5.", 5, None), (",5", None, 0.5), ("1e3", 1000, 1000),
        ("1,2345", None, 1.2345), ("12 34", None, None), ("abc", None, None), ("", None, None),
        ("5 5", None, None), ("5kg5", None, None), ("--5", None, None),
    ],
)  # fmt: skip
def test_each_reading_takes_what_it_means(text, point, comma):
    assert (read("number", text), read("number_comma", text)) == (point, comma)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("$5", "$"), ("-$5", "$"), ("$-5", "$"), ("($5)", "$"), ("$(5)", "$"),
        ("5 \u20ac", "\u20ac"), ("5 m\u00b2", "m\u00b2"),
        ("US$5", "US$"), ("EUR 5", "EUR"), ("5 EUR", "EUR"), ("Rs. 5", "Rs"), ("5 kg", "kg"),
        ("5kg", "kg"), ("5 \u00b0C", "\u00b0C"), ("5 km/h", "km/h"), ("5 sq ft", "sq ft"),
    ],
)  # fmt: skip
def test_a_unit_is_that_of_the_column_or_the_row_is_broken(text, unit):
    writing = text_values.count_writing(pa.array([text]))
    assert text_values.list_units(writing) == [unit]
    value = -5 if "-" in text or "(" in text else 5
    assert read("number", text, unit) == value
    assert read("number", text) is None
    assert read("number", "5", unit) == 5


@pytest.mark.parametrize(
    ("texts", "kind"),
    [
        (["45%", "7%"], "number"), (["1,50", "2,75"], "number_comma"), (["1,500.5", "2"], "number"),
        (["1.500,5", "2"], "number_comma"), (["3 kg", "4 kg"], "number"), (["3rd", "4th"], ""),
        (["a1", "b2"], ""), (["3 Elm St", "4 Oak St", "5 Ash St", "6 Fir St"], ""),
        (["10-20", "20-30"], ""), (["12:30"], ""), (["00123", "00456"], ""), (["1.2.3"], ""),
        (["1. low", "2. high"], ""), (["1.", "2."], "number"),
    ],
)  # fmt: skip
def test_a_column_asks_for_the_reading_that_takes_nearly_all(texts, kind):
    writing = text_values.count_writing(pa.array(texts))
    assert text_values.find_kind(writing, texts=len(texts)) == kind


def test_plain_numbers_count_and_others_do_not():
    writing = text_values.count_writing(pa.array(["1,5"] * 2))
    assert text_values.find_kind(writing, texts=2, whole=8) == "number_comma"
    assert not text_values.find_kind(writing, texts=2, whole=8, others=2)
    assert not text_values.find_kind(writing, texts=4, whole=80)
    assert not text_values.find_kind({}, texts=0, whole=80)


@pytest.mark.parametrize(
    "text",
    [
        "31/12/2025", "12/31/25 10:30", "31.12.2025", "31-Dec-2025", "Dec 31, 2025", "5 May 2025",
        "2025-12-31 10:30:00.000000 America/Argentina/Ushuaia", "2025-12-31T10:30+01:00[Asia/Aden]",
        "Wed, 31 Dec 2025 10:30:00 +0100", "Wed Dec 31 10:30:00 PST 2025", "Dec  1 10:30:00",
        "10:30 PST", "10:30:00+01:00",
        "3 days 00:10:00", "72:10:05", "12h30",
    ],
)  # fmt: skip
def test_dates_are_described(text):
    writing = text_values.count_writing(pa.array([text]))
    assert (text_values.describe(writing, 1) or [""])[0] == "dates or times of day"


@pytest.mark.parametrize(
    ("texts", "are_odd"),
    [
        (['="1.2"', "=3", '="-7"'], True), (["'1.2", "'-3"], True), (["1.2D+03", "4d-1"], True),
        (["\uff11\uff12", "\uff13\uff0e\uff14"], True), (["120/80", "135.5 / 90"], True),
        (["0x1f", "0XA0"], True), (["12*", "13 \u2020"], True), (["D1", "d2"], False),
        (["=A1+B2", "'tis"], False), (["2D3", "3D4"], False),
        (["10-20", "30-40"], False), (["1.2.3"], False),
    ],
)  # fmt: skip
def test_unusual_notations_of_numbers_are_described(texts, are_odd):
    found = text_values.describe(text_values.count_writing(pa.array(texts)), len(texts))
    assert (found is not None and found[0] == "numbers in an unusual notation") == are_odd


@pytest.mark.parametrize(
    ("text", "is_nested"),
    [
        ('{"a": 1,\n"b": {}}', True), ("['u', 'v']", True), ("[]", True), ("(0.1, -2)", True),
        ("[NAME]", False), ("(5)", False), ("{x}", False), ("(a, b)", False), ("1.3.2", False),
    ],
)  # fmt: skip
def test_lists_and_objects_in_texts_are_described(text, is_nested):
    found = text_values.describe(text_values.count_writing(pa.array([text])), 1)
    assert (found is not None and found[0] == "lists or objects") == is_nested


def test_words_for_totals_are_counted():
    texts = [
        "Total",
        "GRAND TOTAL:",
        "Zwischensumme",
        "Total g\u00e9n\u00e9ral",
        "Total recall",
        "x",
    ]
    writing = text_values.count_writing(pa.array(texts), np.arange(1, 7))
    assert text_values.list_totals(writing) == dict(zip(texts[:4], range(1, 5), strict=True))


@settings(max_examples=30)
@given(st.decimals(-(10**9), 10**9, places=3, allow_nan=False))
def test_what_a_spreadsheet_writes_is_read_back(number):
    english = f"{number:,}"
    german = english.translate(str.maketrans(",.", ".,"))
    expected = float(number)
    assert read("number", english) == pytest.approx(expected)
    assert read("number_comma", german) == pytest.approx(expected)
    assert read("number", f"({abs(number):,} kg)", "kg") == pytest.approx(-abs(expected))
    assert read("number", f"{english}%") == pytest.approx(expected / 100)


@settings(max_examples=20)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=20))
def test_no_text_breaks_it(texts):
    for kind in NUMBERS_IN_WRITING:
        values, bad = text_values.formatted_numbers(kind, pa.array(texts), "")
        assert (bad | ~np.isnan(values)).all()


def _opened(folder, form, texts):
    if form == "csv":
        rows = [f'"{each}",{place % 2}' for place, each in enumerate(texts)]
        (folder / "a.csv").write_text("\n".join(["x,label", *rows]))
    else:
        rows = [json.dumps({"x": each, "label": place % 2}) for place, each in enumerate(texts)]
        (folder / "a.jsonl").write_text("\n".join(rows))
    return opened(folder, types={"x": "number_comma" if "1,5%" in texts else "number"}, seed=1)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize(
    "texts", [["1%", "2%", "3", "4%"], ["1%", "2%", "1,234"], ["1,5%", "2%", "0,5"], ["1%", "2 kg"]]
)
def test_per_cent_among_other_numbers_is_refused(tmp_path, form, texts):
    with pytest.raises(UserError, match="'x' has numbers with and without a percent sign"):
        _opened(tmp_path, form, texts * 4)


@pytest.mark.parametrize("form", ["csv", "jsonl"])
@pytest.mark.parametrize("texts", [["1%", "2%", "0"], ["1,5%", "2%", "0"], ["1%", "2%", "NA"]])
def test_nothing_is_the_same_in_per_cent(tmp_path, form, texts):
    _, found = _opened(tmp_path, form, texts * 4)
    assert np.nanmax(found["x"]) == pytest.approx(0.02)


def test_texts_of_ascii_are_read_as_all_others_are(monkeypatch):
    texts = [
        "5 kg",
        "$5",
        "USD 7",
        "v3",
        "(5)",
        "1,234.5",
        "1.234,5",
        "May 3, 2024",
        "3 May 2024",
        "7:30",
    ]
    found = text_values.count_writing(pa.array(texts))
    monkeypatch.setattr(text_values, "_is_ascii", lambda _array: False)
    assert found == text_values.count_writing(pa.array(texts))


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("[0.5, 2]", [0.5, 2]), ("[1,2]", [1, 2]), ("[0.5 2.]", [0.5, 2.0]),
        ("[ 1  2\n 3]", [1, 2, 3]),
        ("[[1, 2], [3, 4]]", [[1, 2], [3, 4]]), ("[[1 2]\n [3 4]]", [[1, 2], [3, 4]]),
        ("[-1e-3 +2E5]", None), ("[-1e-3 2e5]", [-1e-3, 2e5]), ("[1., -2., .5]", None),
        ("[]", []), ("[1, NaN]", [1, np.nan]), ("[1 nan]", [1, np.nan]),
        ("[1, None]", [1, np.nan]),
        ("[1, null]", [1, np.nan]), ("[[1, 2], [3]]", None), ("[0.1 0.2 ... 0.9]", None),
        ("7", None),
        ("['a']", None), ("[1, 2", None), ("", None), ('{"a": 1}', None), ("true", None),
    ],
)  # fmt: skip
def test_numbers_in_a_text(text: str, want: list[float] | None) -> None:
    found = parse_numbers(text)
    if want is None:
        assert found is None
    else:
        np.testing.assert_array_equal(found, np.array(want))


def rows(lengths: list[int]) -> list[list[float]]:
    return [[i + k / 4 for k in range(lengths[i % len(lengths)])] for i in range(60)]


def write(folder: Path, form: str, lists: list[list[float]]) -> None:
    labels = ["ab"[i % 2] for i in range(len(lists))]
    if form == "jsonl":
        lines = (json.dumps({"v": v, "label": y}) for v, y in zip(lists, labels, strict=True))
        (folder / "t.jsonl").write_text("\n".join(lines) + "\n")
    elif form == "parquet":
        pq.write_table(pa.table({"v": lists, "label": labels}), folder / "t.parquet")
    else:
        texts = [json.dumps(v) if form == "csv" else f"[{' '.join(map(str, v))}]" for v in lists]
        body = "".join(f'"{v}",{y}\n' for v, y in zip(texts, labels, strict=True))
        (folder / "t.csv").write_text(f"v,label\n{body}")


FORMS = ("csv", "numpy", "jsonl", "parquet")


@pytest.mark.parametrize("form", FORMS)
def test_lists_of_one_length_are_the_same_in_each_format(tmp_path: Path, form: str) -> None:
    write(tmp_path, form, rows([3]))
    selection, found = opened(tmp_path)
    assert selection.inputs == ("v",)
    assert (selection.specs["v"].shape, selection.specs["v"].dtype) == ((3,), "float32")
    assert sorted(found["v"].tolist()) == sorted(rows([3]))


@pytest.mark.parametrize("form", FORMS)
def test_lists_of_several_lengths_keep_them(tmp_path: Path, form: str) -> None:
    lists = rows([2, 5, 3])
    write(tmp_path, form, lists)
    made = source(tmp_path)
    selection = made.select()
    assert selection.inputs == ("v", "v_length")
    assert (selection.specs["v"].shape, selection.specs["v"].stored) == ((None,), "sequence")
    assert "lists of 2 to 5 values, and the lengths are kept" in made.notes()[0]
    _, found = opened(tmp_path)
    assert sorted(each.tolist() for each in found["v"]) == sorted(lists)
    assert [len(each) for each in found["v"]] == found["v_length"].tolist()


@pytest.mark.parametrize("form", FORMS)
def test_lists_are_cut_and_padded_where_that_is_asked(tmp_path: Path, form: str) -> None:
    lists = rows([2, 5, 3])
    write(tmp_path, form, lists)
    selection, found = opened(tmp_path, shapes={"v": (4,)})
    assert selection.inputs == ("v",)
    assert sorted(found["v"].tolist()) == sorted(([*each, 0, 0, 0])[:4] for each in lists)
    with pytest.raises(ConfigError, match=r"data\.shapes: v: \[4, 2\] does not match"):
        opened(tmp_path, shapes={"v": (4, 2)})


@pytest.mark.parametrize(
    ("lists", "advice"),
    [
        ([[], [[1, 2]], [[1, 2, 3], [4, 5, 6]]], r"\[1, 2\] and \[2, 3\]; set .*\{v: \[2, 3\]\}"),
        ([[1, 2], [[1, 2]]], r"\[1, 2\] and \[2\]; set data\.drop: \[v\], or write lists"),
    ],
)
def test_lists_of_several_shapes_are_refused(tmp_path: Path, lists: list[Any], advice: str) -> None:
    write(tmp_path, "csv", [lists[i % len(lists)] for i in range(60)])
    with pytest.raises(UserError, match=advice):
        opened(tmp_path)


def test_a_length_that_is_a_column_too_is_refused(tmp_path: Path) -> None:
    lines = (json.dumps({"v": v, "v_length": 1, "label": 0}) for v in rows([1, 2]))
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match=r"set data\.drop: \[v_length\]"):
        opened(tmp_path)


def test_a_text_among_lists_is_a_text(tmp_path: Path) -> None:
    body = "".join(f'"[{i}, 1]",{i % 2}\n' for i in range(30))
    (tmp_path / "t.csv").write_text(f"v,label\n{body}x,1\n")
    selection, _ = opened(tmp_path)
    assert selection.specs["v"].dtype == "string"


def test_a_label_of_several_classes_is_said(tmp_path: Path) -> None:
    tags = ["red|blue", "red", "blue|big", "big|red"]
    body = "".join(f"{i},{tags[i % 4]}\n" for i in range(40))
    (tmp_path / "t.csv").write_text(f"v,label\n{body}")
    made = source(tmp_path)
    made.select()
    assert any("write one column of 0 and 1 for each" in each for each in made.notes())
    (tmp_path / "t.csv").unlink()
    lines = (json.dumps({"v": i, "label": tags[i % 4].split("|")}) for i in range(40))
    (tmp_path / "t.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(UserError, match="write one column of 0 and 1 for each class"):
        source(tmp_path, label=("label",)).select()

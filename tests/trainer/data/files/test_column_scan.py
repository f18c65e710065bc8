"""Tests that a column scan parses each distinct text once and plain numbers in one pass."""

import dataclasses
import random

import numpy as np
import pyarrow as pa
import pytest

from flotilla.trainer.data.files import column_scan
from flotilla.trainer.data.files.column_scan import ColumnScan

CELLS = [
    "", "NA", "?", "5", " 5 ", "-3", "+7", "007", "0", "-0", "0x10", "1.5", "-.5", "5.", "1e5",
    "1e12345", "inf", "1,5", "12 kg", "7 kg", "$5", "12%", "true", "2020-01-05", "2020-01-05 10:30",
    "May 3, 2024", "7:30", "[1,2]", "[1, 2.5]", "[a", "town 5", "9223372036854775807",
    "9223372036854775808", "123456789012345678901234", "\u00a05", "\u22125", "caf\u00e9 3",
    "nan(1)",
]  # fmt: skip
NUMBERS = [each for each in CELLS if each.strip("+-.0123456789e") == ""]


def scanned(cells, size, *, parsed=True, first=0):
    found = ColumnScan(most=20, gathers=True)
    for start in range(0, len(cells), size):
        one = ColumnScan(most=20, gathers=True)
        rows = np.arange(start, min(start + size, len(cells)))
        one.add(
            pa.array(cells[start : start + size], pa.string()), "a", first + rows, parsed=parsed
        )
        found.merge(one)
    # Compare as floats, because integers are kept exactly only in blocks without fractions.
    lowest, highest = float(found.lowest), float(found.highest)
    return vars(dataclasses.replace(found, lowest=lowest, highest=highest))


@pytest.mark.parametrize("parsed", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_many_rows_together_give_what_few_give(seed, parsed):
    draw = random.Random(seed)
    few = draw.sample(CELLS if seed % 2 else NUMBERS, draw.randint(1, 5))
    cells = [draw.choice(few) for _ in range(300)]
    whole = scanned(cells, 300, parsed=parsed)
    assert whole == scanned(cells, 100, parsed=parsed)
    assert whole == scanned(cells, 7, parsed=parsed)


def test_the_first_texts_have_their_rows():
    cells = ["1"] * 300 + ["b", "1", "a", "b"] * 10
    found = scanned(cells, 400, first=7)
    assert found["texts"] == [("a", 307, "b"), ("a", 309, "a"), ("a", 310, "b")]
    assert found["kinds"] == {"int": 310, "text": 30}


def test_categories_that_no_row_has_are_no_values():
    scan = ColumnScan()
    places = pa.array([0, None] * 300, pa.int8())
    array = pa.DictionaryArray.from_arrays(places, pa.array(["red", "blue"]))
    scan.add(array, "a", np.arange(600), parsed=False)
    assert (scan.values, scan.empty, scan.kinds) == ({"red", ""}, 300, {"text": 300})


def test_a_large_integer_among_fractions_is_one_of_its_kind():
    found = scanned(["1.5", "3", "-9223372036854775808", "99999999999999999999"], 4)
    assert found["kinds"] == {"float": 1, "int": 2, "huge": 1}


def test_an_image_of_another_size_is_seen_after_many_of_one_size(monkeypatch):
    monkeypatch.setattr(column_scan, "_SEEN", 3)
    scan, sizes = ColumnScan(), [(6, 8, 1)] * 5 + [(10, 20, 3)]
    scan.add_images(sizes, 1)
    assert scan.shapes == set(sizes)
    assert (scan.rows, scan.kinds) == (7, {"image": 6})
    scan.add_images([(each, 1, 1) for each in range(1, 9)], 0)
    assert (scan.rows, len(scan.shapes)) == (15, 3)

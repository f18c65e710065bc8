"""Tests that column values are converted without losing digits, and equally in every format."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pytest

from flotilla.trainer.data.files.columns import Column
from flotilla.trainer.data.files.conversion import convert_rows, read_times

LARGE = 2**53 + 1


def values(kind: str, array: pa.Array, **keys: object) -> list[object]:
    """Return a column's values, with None for an invalid row."""
    found = convert_rows(Column(name="c", type=kind, why="", **keys), array, required=False)  # type: ignore[arg-type]
    return [
        None if bad else each for each, bad in zip(found.values.tolist(), found.bad, strict=True)
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("30.0", 30), ("3e1", 30), (" 30 ", 30), ("+30", 30), (str(LARGE), LARGE), ("30.5", None),
        (f"{LARGE}.0", None), ("inf", None), (str(2**63), None), (str(-(2**63)), -(2**63)),
    ],
)  # fmt: skip
def test_a_whole_number_does_not_depend_on_its_neighbours(text, value):
    for other in ("", "abc", "1.5", "NA", str(LARGE), "-7"):
        assert values("int", pa.array([text, other, text]))[::2] == [value, value], other


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["5", "", str(LARGE)]),
        pa.array([5, None, LARGE]),
        pa.array([5, None, LARGE], pa.uint64()),
        pa.array([Decimal(5), None, Decimal(LARGE)], pa.decimal128(38, 0)),
        pa.array([Decimal(5), None, Decimal(LARGE)], pa.decimal128(38, 2)).cast(
            pa.decimal256(40, 0)
        ),
        pa.array([5, None, LARGE]).dictionary_encode(),
    ],
)
def test_whole_numbers_keep_their_digits_where_another_is_missing(array):
    assert values("int", array) == [5, None, LARGE]


@pytest.mark.parametrize(
    ("kind", "array", "expected"),
    [
        ("int", pa.array([2**63, 1], pa.uint64()), [None, 1]),
        ("text", pa.array([" a b\t", "\u00a0c\u3000", None, "d"]), [b"a b", b"c", b"", b"d"]),
        ("text", pa.array([b"a", b"\xff", None]), [b"a", None, b""]),
    ],
)
def test_values_are_trimmed_and_those_that_do_not_fit_break_their_own_row(kind, array, expected):
    assert values(kind, array) == expected


@pytest.mark.parametrize(("dtype", "most"), [("", 2**24), ("float64", 2**53)])
def test_with_gaps_they_are_floats_that_hold_them(dtype, most):
    array = pa.array([str(most), str(most - 1), ""])
    found = values("int", array, gaps=True, dtype=dtype)
    assert found[:2] == [most, most - 1]
    assert np.isnan(found[2])


def test_decimals_are_as_their_texts():
    texts = ["0.1", "123456789.12", "-7.000", "99999999999999.999"]
    exact = pa.array([Decimal(each) for each in texts], pa.decimal128(30, 10))
    assert values("float", exact, dtype="float64") == [float(each) for each in texts]


MOMENT = datetime(2026, 3, 1, 12, 30, 15, 123456, UTC)
SECOND = MOMENT.replace(microsecond=0)
BEFORE = datetime(1969, 12, 31, 23, 59, 59, 999999, UTC)
DAY = datetime(1903, 5, 6, tzinfo=UTC)


@pytest.mark.parametrize(
    ("array", "moment"),
    [
        (pa.array(["2026-03-01 12:30:15.123456"]), MOMENT),
        (pa.array(["2026-03-01T12:30:15.123456789Z"]), MOMENT),
        (pa.array(["2026-03-01T18:00:15+05:30"]), SECOND),
        (pa.array(["2026/03/01 13:30:15,000+01"]), SECOND),
        (pa.array(["2026-03-01 12:30:15 UTC"]), SECOND),
        (pa.array(["2026-03-01 12:30:15.123456 +00:00"]), MOMENT),
        (pa.array([int(SECOND.timestamp()) * 10**9 + 123456789], pa.timestamp("ns")), MOMENT),
        (pa.array([MOMENT], pa.timestamp("us", "Asia/Kolkata")), MOMENT),
        (pa.array([SECOND], pa.timestamp("ms")), SECOND),
        (pa.array([SECOND], pa.timestamp("s")), SECOND),
        (pa.array([-1], pa.timestamp("ns")), BEFORE),
        (pa.array(["1969-12-31 23:59:59.999999"]), BEFORE),
        (pa.array([date(1903, 5, 6)]), DAY),
        (pa.array([date(1903, 5, 6)]).cast(pa.date64()), DAY),
        (pa.array(["1903-05-06"]), DAY),
    ],
)
def test_times_are_seconds_to_the_microsecond(array, moment):
    assert values("time", array) == [moment.timestamp()]
    both = pa.concat_arrays([pa.nulls(1, array.type), array])
    assert values("time", both)[1] == moment.timestamp()


def test_examples_are_put_in_order_by_what_was_read():
    nanoseconds = [1700000000000000001, 1700000000000000002, None]
    assert read_times(pa.array(nanoseconds)) == nanoseconds[:2]
    assert read_times(pa.array(["1700000000000000001", "NA"])) == nanoseconds[:1]
    assert read_times(pa.array(["1.5", "", "2"])) == [1.5, 2.0]
    assert read_times(pa.array(["1970-01-02", "1970-01-01 00:00:01"])) == [86400.0, 1.0]


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32(), pa.float16()])
def test_a_whole_number_is_one_text_whatever_its_type(kind):
    array = pa.array([7.0, None, 2.5], pa.float64()).cast(kind)
    assert values("text", array) == [b"7", b"", b"2.5"]
    assert values("text", pa.array([7, None])) == [b"7", b""]
    assert values("text", pa.array([1234567890123456.0, 947080963129.2422])) == [
        b"1234567890123456",
        b"947080963129.2422",
    ]
    assert values("text", pa.array([1e300, float("inf")])) == [b"1e+300", b"inf"]


def test_lists_of_texts_keep_their_lengths_or_are_padded():
    array = pa.array([["a ", None], [], None, ["ü"]], pa.list_(pa.string()))
    varying = values("tensor", array, shape=(None,), dtype="string")
    encoded = "ü".encode()
    assert varying == [[b"a", b""], [], [], [encoded]]
    padded = values("tensor", array[:1], shape=(3,), dtype="string", pads=True)
    assert padded == [[b"a", b"", b""]]
    assert values("tensor", array, shape=(1,), dtype="string")[::3] == [None, [encoded]]
    mixed = values("tensor", pa.array([[1, 2]]), shape=(None,), dtype="string")
    assert mixed[0] == [b"1", b"2"]

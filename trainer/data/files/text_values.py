"""Parse strings of a file as numbers, bools, timestamps, or lists of numbers."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flotilla.trainer.features.statistics.hashing import values_repeat

# Missing values as written by R, pandas, databases and spreadsheets.
_WRITTEN = (
    "", "NA", "N/A", "n/a", "<NA>", "#N/A", "#NA", "#N/A N/A", "nan", "NaN", "NAN", "-nan", "-NaN",
    "1.#IND", "-1.#IND", "1.#QNAN", "-1.#QNAN", "null", "NULL", "Null", "None", "NaT", "\\N",
    "#DIV/0!", "#VALUE!", "#REF!", "#NUM!", "#NAME?", "#NULL!",
)  # fmt: skip
# Missing values as people write them, in lower case. They count as missing in columns of numbers,
# bools and timestamps, and as ordinary strings elsewhere.
_AMONG_NUMBERS = (
    "-", "--", "---", "\u2013", "\u2014", "?", "??", ".", "..", "...", "*", "none", "nil", "na",
    "''", '""', "na.", "n.a.", "n.a", "n.d.", "n/d", "nd", "(null)", "<null>", "(none)", "(na)",
    "missing", "(missing)", "unknown", "(unknown)", "not available", "not applicable", "no data",
    "empty", "(empty)", "blank", "(blank)", "tbd", "undefined",
)  # fmt: skip
_HEAD = 256
_WHOLE = 2.0**53
_MOST = str(2**63 - 1)
# A number of 19 digits fits in 64 bits if its first digit that differs from `_MOST` is smaller.
_BELOW = "|".join(
    rf"{_MOST[:place]}[0-{int(digit) - 1}]\d{{{len(_MOST) - 1 - place}}}"
    for place, digit in enumerate(_MOST)
    if digit != "0"
)
INT = rf"^([+-]?(\d{{1,{len(_MOST) - 1}}}|{_BELOW}|{_MOST})|-{2**63})$"
NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?$|^(?i:[+-]?inf(inity)?)$"
# 007 is a code, not a number. Arrow would parse 0x10 as a number.
_CODE = r"^[+-]?0[0-9xX]"
# Arrow parses more notations of floats than `NUMBER` allows.
_NOT_PLAIN = rf"[^0-9.eE+\n-]|[eE][+-]?\d{{5}}|{_CODE}"
WHOLE = r"^[+-]?\d+$"
CODE = r"^0\d+([eE]\d+)?$"
BOOL = r"^(?i:true|false)$"
_DAY = r"\d{4}(-\d{2}-|/\d{2}/)\d{2}"
_ZONE = r" ?(Z|UTC|GMT|[+-]\d{2}(:?\d{2})?)"
TIME = rf"^{_DAY}([ T]\d{{2}}:\d{{2}}(:\d{{2}}([.,]\d{{1,9}})?)?({_ZONE})?)?$"
# These words are in lower case. A column is inferred as bool only from true and false.
_TRUE = pa.array(["true", "yes", "on", "t", "y", "1", "1.0"])
_FALSE = pa.array(["false", "no", "off", "f", "n", "0", "0.0"])

#: A string that may be a list, such as [0.1, 2] or [[1 2] [3 4]].
LIST = r"^\[(?:[\[\]\s\d.,+\-eE]|nan|NaN|null|None)*\]$"
# NumPy separates numbers with spaces, and writes 1. for 1.0.
_GAP = re.compile(r"(?<=[\d.\]naN])\s+(?=[\d.\[+\-nN])")
_POINT = re.compile(r"(\d)\.(?!\d)")
_NO_NUMBER = re.compile("nan|None|null")


class Counted(NamedTuple):
    """Trimmed strings of some rows, "" for null, and the number of rows with each string.

    `places` has the index in `values` for each row. It is None if each row has its own entry.
    """

    values: pa.Array
    counts: NDArray[np.int64]
    places: NDArray[np.int64] | None


def count_texts(array: pa.Array) -> Counted:
    """Trim the strings of some rows and count them, so that each string is processed only once."""
    if not values_repeat(array):
        return Counted(trim_texts(array), np.ones(len(array), np.int64), None)
    coded = array.dictionary_encode(null_encoding="encode")
    places = coded.indices.to_numpy().astype(np.int64)
    counts = np.bincount(places, minlength=len(coded.dictionary))
    return Counted(trim_texts(coded.dictionary), counts, places)


def trim_texts(array: pa.Array) -> pa.Array:
    """Return strings without surrounding spaces, and "" for null."""
    # Convert the large strings that pandas writes, because few Arrow functions accept them.
    short = array.cast(pa.string()) if pa.types.is_large_string(array.type) else array
    return pc.fill_null(pc.utf8_trim_whitespace(short), "")


def format_float(value: Any) -> str:
    """Format a float as text. Whole numbers are formatted like ints."""
    wide = float(value)
    return str(int(wide)) if abs(wide) < _WHOLE and wide == int(wide) else str(value)


def is_missing(array: pa.Array) -> pa.Array:
    """Return a mask of the trimmed strings that mean a missing number, bool or timestamp."""
    return pc.is_in(pc.utf8_lower(array), value_set=_MISSING)


def is_null(text: str) -> bool:
    """Return whether software such as R or pandas writes this string for a missing value."""
    return text in _WRITTEN


def matches(array: pa.Array, pattern: str) -> pa.Array:
    """Return a mask of the strings that match a pattern."""
    return pc.match_substring_regex(array, pattern)


def _any_matches(array: pa.Array, pattern: str) -> bool:
    """Return whether any string matches a pattern. Search one joined string, for speed."""
    given = array.drop_null().cast(pa.large_string())
    newline = pa.scalar("\n", given.type)
    lines = pc.binary_join(pa.ListArray.from_arrays([0, len(given)], given), newline)
    return bool(matches(lines, f"(?m){pattern}")[0].as_py())


def parse_plain(array: pa.Array) -> pa.Array | None:
    """Parse strings as int64 or float64, or return None unless all are numbers.

    This is the fast path for most columns. A few strings are tried first, because Arrow is slow to
    report strings that are not numbers.
    """
    if not _any_matches(array, _NOT_PLAIN):
        for kind in (pa.int64(), pa.float64()):
            with suppress(pa.ArrowInvalid):
                pc.cast(array[:_HEAD], kind)
                return pc.cast(array, kind)
    return None


def is_fraction(array: pa.Array) -> pa.Array:
    """Return a mask of the numbers that have a decimal point or an exponent."""
    found = pc.match_substring(array, ".")
    # Matching this pattern is slower than searching for a point, and rarely needed.
    return found if pc.all(found).as_py() else matches(array, "[.eE]")


def numbers(array: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Parse trimmed strings as numbers, NaN if missing, and return a mask of the invalid ones."""
    found, bad = _cast_floats(array), np.zeros(len(array), np.bool_)
    if found is None:
        present = pc.invert(is_missing(array))
        known = pc.if_else(present, array, pa.scalar(None, array.type))
        found = _cast_floats(known)
    if found is None:
        right = matches(array, NUMBER)
        bad = pc.and_not(present, right).to_numpy(zero_copy_only=False)
        # Arrow accepts a plus sign and leading zeros only in floats.
        found = pc.cast(pc.if_else(right, known, pa.scalar(None, array.type)), pa.float64())
    return _fill(found, np.nan), bad


def _cast_floats(array: pa.Array) -> pa.Array | None:
    """Parse strings as floats, or return None if a string is not a number or may be a code."""
    try:
        found = pc.cast(array, pa.float64())
    except pa.ArrowInvalid:
        return None
    return None if _any_matches(array, _CODE) else found


def ints(array: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Parse trimmed strings as ints, and return a mask of those that are invalid or missing."""
    plain = parse_plain(array)
    if plain is not None and pa.types.is_int64(plain.type):
        return plain.to_numpy(), np.zeros(len(array), np.bool_)
    right = matches(array, INT)
    known = pc.if_else(right, pc.ascii_ltrim(array, "+"), pa.scalar(None, array.type))
    found = pc.cast(known, pa.int64())
    return _fill(found, 0), pc.invert(right).to_numpy(zero_copy_only=False)


def bools(array: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Parse trimmed strings as 0 and 1, NaN if missing, and return a mask of the invalid ones."""
    true, false = (
        pc.is_in(pc.utf8_lower(array), value_set=words).to_numpy(zero_copy_only=False)
        for words in (_TRUE, _FALSE)
    )
    missing = is_missing(array).to_numpy(zero_copy_only=False)
    values = np.where(true, 1.0, np.where(false, 0.0, np.nan))
    return values, ~(true | false | missing)


def times(array: pa.Array) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Parse strings as Unix timestamps, NaN if missing, and return a mask of the invalid ones."""
    present = pc.invert(is_missing(array))
    right = matches(array, TIME)
    known = pc.if_else(right, array, pa.scalar(None, array.type))
    for pattern, plain in (("/", "-"), (" ?(UTC|GMT)$", "Z"), (r" ([+-])(\d)", r"\1\2")):
        known = pc.replace_substring_regex(known, pattern, plain)
    bad = pc.and_not(present, right).to_numpy(zero_copy_only=False)
    try:
        found = _fill(pc.cast(pc.cast(known, pa.timestamp("us")), pa.int64()), 0) / 1e6
        found[known.is_null().to_numpy(zero_copy_only=False)] = np.nan
    except pa.ArrowInvalid:
        found = np.array([_seconds(each) for each in known.to_pylist()], np.float64)
        bad |= np.isnan(found) & right.to_numpy(zero_copy_only=False)
    return found, bad


def _seconds(text: str | None) -> float:
    if text is None:
        return np.nan
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return np.nan
    # A timestamp without a time zone is in UTC.
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


def _fill(array: pa.Array, value: Any) -> NDArray[Any]:
    filled: NDArray[Any] = pc.fill_null(array, value).to_numpy(zero_copy_only=False).copy()
    return filled


_MISSING = pa.array(sorted({*(each.lower() for each in _WRITTEN), *_AMONG_NUMBERS}))
#: Words for a missing value that are hardly ever classes, unlike `-`, `none` or `unknown`.
DOUBTFUL = {
    "''", '""', "--", "?", "??", ".", "..", "...", "na", "n.a.", "n/d", "(null)", "missing",
}  # fmt: skip


def parse_numbers(value: Any) -> NDArray[Any] | None:
    """Return the numbers of a list, or of a string that contains a list. Other values give None.

    Nested lists of equal length become one array. Missing values are NaN.
    """
    try:
        found = np.asarray(_parse(value) if isinstance(value, str | bytes) else value)
        if found.dtype == object:
            found = found.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found.ndim and found.dtype.kind in "iubf" else None


def _parse(text: str | bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        plain = text.decode() if isinstance(text, bytes) else text
        spaced = _POINT.sub(r"\1.0", _GAP.sub(", ", plain.strip()))
        return json.loads(_NO_NUMBER.sub("NaN", spaced))

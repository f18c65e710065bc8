"""Parse strings of a file as numbers, bools, timestamps, or lists of numbers.

Formatted numbers have units, currencies, percentages or thousands separators. `number` has a
decimal point, and `number_comma` a decimal comma. Both accept `1'234`, `1 234`, `$5`, `5 kg`, `(5)`
and `5-` for negative numbers, and 12 % for 0.12. All values must have the same unit, or none.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flotilla.trainer.config.data import NUMBERS_IN_WRITING
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
# These words are in lower case. A column is inferred as bool only from true and false. They are
# tuples, because `pa.array` imports pandas, which not every process that imports this module needs.
_TRUE = ("true", "yes", "on", "t", "y", "1", "1.0")
_FALSE = ("false", "no", "off", "f", "n", "0", "0.0")

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
    return pc.is_in(pc.utf8_lower(array), value_set=pa.array(_MISSING))


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
        pc.is_in(pc.utf8_lower(array), value_set=pa.array(words)).to_numpy(zero_copy_only=False)
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


_MISSING = sorted({*(each.lower() for each in _WRITTEN), *_AMONG_NUMBERS})
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


#: A column has a type if at least this share of its values has it.
NEARLY_ALL = 0.9
# A column with more units probably has strings that only begin with a number, such as addresses.
_MOST_UNITS = 3
_LONGEST = 64
_UNIT_OF = "unit "
_TOTAL_OF = "total "
_BARE = "without unit"
# A percent sign divides the number by 100 and is not a unit.
PER_CENT = "%"
_CODES = (
    "AUD|BRL|CAD|CHF|CNY|CZK|DKK|EUR|GBP|HKD|HUF|INR|JPY|KRW|MXN|NOK|NZD|PLN|RUB|SEK|SGD|TRY|USD|ZAR"
    "|Rs\\.?|kr\\.?"
)
_CURRENCY = rf"[A-Za-z]{{0,3}}\p{{Sc}}|(?:{_CODES})"
_UNIT = r"(?:[%‰]|\p{Sc}|[\p{L}°µ][\p{L}\p{M}°µ²³/.*^ -]{0,15})"
_MONEY = re.compile(rf"[A-Za-z]{{0,3}}[$\u00a2-\u00a5\u20a0-\u20c0]|{_CODES}")
# Groups of three digits or, as in India, of two digits before the last three.
_GROUPED = r"[1-9]\d{{0,2}}(?:{0}\d{{3}})+"
_SHARED = "|".join(_GROUPED.format(each) for each in (" ", "'", "_"))
_DIGITS = {
    "number": rf"(?:(?:{_GROUPED.format(',')}|[1-9]\d?(?:,\d{{2}})+,\d{{3}}|{_SHARED}|\d+)"
    r"(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d{1,3})?",
    "number_comma": rf"(?:(?:{_GROUPED.format('[.]')}|{_SHARED}|\d+)(?:,\d*)?|,\d+)"
    r"(?:[eE][+-]?\d{1,3})?",
}
_NUMBER = (
    r"^(?P<sign>[+-]?) ?(?P<open>\(?) ?(?P<before>(?:{currency})?) ?(?P<inner>[+-]?)(?P<late>\(?) ?"
    r"(?P<digits>{digits}) ?(?P<after>{unit}?) ?(?P<close>\)?) ?(?P<trailing>-?)$"
)
_PATTERNS = {
    kind: _NUMBER.format(currency=_CURRENCY, digits=digits, unit=_UNIT)
    for kind, digits in _DIGITS.items()
}
_SEPARATORS = {"number": r"[ ,'_]", "number_comma": r"[ .'_]"}
_DATE = (
    r"^([\p{L}]{3,9},? )?(\d{1,2}[/.-]\d{1,2}[/.-](\d{2}|\d{4})|\d{4}[/.-]\d{1,2}[/.-]\d{1,2}"
    r"|\d{1,2}(st|nd|rd|th)?[ .-]{1,2}[\p{L}]{3,9}[ .,-]{1,2}\d{2,4}|[\p{L}]{3,9}[ -]\d{4}"
    r"|[\p{L}]{3,9}\.? \d{1,2},? \d{4}|[\p{L}]{3} {1,2}\d{1,2} \d{2}:\d{2}(:\d{2})?)"
    r"([ T].{1,20}|[ T]\d{1,2}:.{1,40})?$"
)
_CLOCK = (
    r"^(-?\d{1,5} days? \+?)?\d{1,3}[:h]\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp]\.?[Mm]\.?)?"
    r"( ?[A-Z]{1,4}| ?[+-]\d{2}:?\d{2})?$"
)
# Numbers as formulas and texts of a spreadsheet, in Fortran, as ratios, in hexadecimal, with
# footnotes, and in full-width digits.
_ODD = (
    r"""^(?:=?"[+-]?[\d.,]+"|=[+-]?[\d.,]+|'[+-]?[\d.,]+'?|[+-]?\d*\.?\d+[dD][+-]\d{1,3}"""
    r"|\d+(?:[.,]\d+)? ?/ ?\d+(?:[.,]\d+)?|0[xX][\da-fA-F]{1,8}|[+-]?[\d.,]+ ?[*\x{2020}\x{2021}]+"
    r"|[\x{ff10}-\x{ff19}.,+\x{ff0b}-\x{ff0e}-]+)$"
)
# Lists and objects of JSON and Python, and pairs of numbers.
_NESTED = r"""(?s)^(\[(.*[,'"].*)?\]|\{.*:.*\}|\(-?[\d.]+[,;].*\))$"""
# The words of a row with totals.
_TOTAL = (
    r"^(?i:(?:grand |sub[ -]?|sous-)?totals?(?: g[e\x{e9}]n[e\x{e9}]ral)?|(?:gesamt|zwischen)?summe"
    r"|gesamt|insgesamt|durchschnitt|mittelwert|sum|average|somme|moyenne):?$"
)
# Parts of the patterns that are slow to compile, with their ASCII equivalents.
_IN_ASCII = ((r"\p{L}", "A-Za-z"), (r"\p{M}", ""), (r"\p{Sc}", "[$]"))
# `2nd` is not a number with the unit nd.
_ORDINALS = {"st", "nd", "rd", "th"}
_SPACES = "[\u00a0\u2007\u2009\u202f]"
_MINUS = "[\u2212\u2012\u2013\ufe63\uff0d]"


def formatted_numbers(
    kind: str, array: pa.Array, unit: str
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Parse trimmed strings, NaN if invalid or in another unit, and return a mask of the NaNs."""
    found = _parts(kind, array)
    if found is None:
        return np.full(len(array), np.nan), np.ones(len(array), np.bool_)
    fields, right = found
    units = _units(fields)
    values = np.full(len(array), np.nan)
    values[right] = _values(kind, fields)[right]
    values[right & (units == PER_CENT)] /= 100
    right &= np.isin(units, ("", PER_CENT, unit)) & np.isfinite(values)
    values[~right] = np.nan
    return values, ~right


def count_writing(array: pa.Array, counts: NDArray[np.int64] | None = None) -> Counter[str]:
    """Count the strings of each notation. A unit such as kg is counted as `unit kg`.

    A word such as Sum, which may mark a row of totals, is counted as `total Sum`. Strings without a
    unit are counted too, except 0, which is the same in all units. `counts` has the number of times
    that each string occurs. If it is None, each string occurs once.
    """
    found: Counter[str] = Counter()
    counts = np.ones(len(array), np.int64) if counts is None else counts
    nested, totals = (matches(array, pattern) for pattern in (_NESTED, _TOTAL))
    found["nested"] = int(counts[nested.to_numpy(zero_copy_only=False)].sum())
    at = np.flatnonzero(totals.to_numpy(zero_copy_only=False))
    for each, count in zip(array.take(pa.array(at)).to_pylist(), counts[at].tolist(), strict=True):
        found[f"{_TOTAL_OF}{each}"] += count
    # A string without a digit is not a number, and 007 is a code.
    digits = matches(array, r"[1-9\x{ff10}-\x{ff19}]|0$|0\D")
    kept = pc.and_not(digits, matches(array, r"^0\d+$"))
    kept = pc.and_(kept, pc.less_equal(pc.utf8_length(array), _LONGEST))
    short, counts = array.filter(kept), counts[kept.to_numpy(zero_copy_only=False)]
    bare = np.zeros(len(short), np.bool_)
    for kind in NUMBERS_IN_WRITING:
        parts = _parts(kind, short)
        if parts is None:
            continue
        fields, right = parts
        units = _units(fields)
        right &= ~np.isin(units, list(_ORDINALS))
        found[kind] += int(counts[right].sum())
        bare |= right & (units == "")
        if kind == NUMBERS_IN_WRITING[0] or not found[NUMBERS_IN_WRITING[0]]:
            names, places = np.unique(units[right], return_inverse=True)
            total = np.bincount(places, counts[right], len(names)).astype(int).tolist()
            given = zip(names.tolist(), total, strict=True)
            found.update({f"{_UNIT_OF}{each}": count for each, count in given if each})
    for name, pattern in (("date", _DATE), ("clock", _CLOCK), ("odd", _ODD)):
        there = matches(short, _choose_pattern(pattern, is_ascii=_is_ascii(short)))
        found[name] += int(counts[there.to_numpy(zero_copy_only=False)].sum())
    bare &= matches(short, "[1-9]").to_numpy(zero_copy_only=False)
    found[_BARE] = int(counts[bare].sum())
    return +found


def list_totals(writing: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of the words that may mark rows of totals."""
    size = len(_TOTAL_OF)
    return {name[size:]: n for name, n in writing.items() if name[:size] == _TOTAL_OF}


def find_kind(
    writing: Mapping[str, int], *, texts: int, whole: int = 0, fractions: int = 0, others: int = 0
) -> str:
    """Return the type that reads nearly all values of a column as numbers, or an empty string.

    `writing` is the result of `count_writing`. The other arguments are numbers of values: strings
    (`texts`), plain numbers (`whole` and `fractions`), and `others`.
    """
    plain = {"number": whole + fractions, "number_comma": whole}
    best = max(NUMBERS_IN_WRITING, key=lambda kind: writing.get(kind, 0) + plain[kind])
    found, total = writing.get(best, 0), texts + whole + fractions + others
    are_numbers = found >= NEARLY_ALL * texts and found + plain[best] >= NEARLY_ALL * total
    return best if found and are_numbers and len(list_units(writing)) <= _MOST_UNITS else ""


def describe(
    writing: Mapping[str, int], total: int, *, numbers: int = 0, times: int = 0
) -> list[str] | None:
    """Return what nearly all values of a text column are, and how to write them, or None.

    `total` counts all values, of which `numbers` and `times` are written in the right way.
    """
    clocks = writing.get("date", 0) + writing.get("clock", 0)
    kinds = (
        (clocks, times, "dates or times of day", "write dates as 2026-11-23 and durations as 90.5"),
        (writing.get("odd", 0), numbers, "numbers in an unusual notation", "write plain numbers"),
        (
            writing.get("nested", 0),
            0,
            "lists or objects",
            "write a column for each of their values",
        ),
    )
    nearly = NEARLY_ALL * total
    return next((says for n, plain, *says in kinds if n and n + plain >= nearly), None)


def list_units(writing: Mapping[str, int]) -> list[str]:
    """Return the counted units except percent, the most frequent first."""
    found = {name.removeprefix(_UNIT_OF): n for name, n in writing.items() if name[:5] == _UNIT_OF}
    return sorted(found.keys() - {PER_CENT}, key=lambda unit: (-found[unit], unit))


def has_per_cent(writing: Mapping[str, int], *, plain: bool) -> bool:
    """Return whether percentages are mixed with other numbers: formatted ones, or `plain` ones."""
    others = plain or writing.get(_BARE) or list_units(writing)
    return bool(others and f"{_UNIT_OF}{PER_CENT}" in writing)


def advise(writing: Mapping[str, int], as_number: str, as_other: str, *, plain: bool) -> str:
    """Return how to read formatted numbers. The arguments `as_` are items of `data.types`.

    A column with several units cannot be read as numbers. `plain` is as in `has_per_cent`.
    """
    units = list_units(writing)
    units += [PER_CENT] if has_per_cent(writing, plain=plain) else []
    if len(units) > 1 or PER_CENT in units:
        named = ", ".join(units[:_MOST_UNITS])
        return f"write all of them in one unit ({named}), or set data.types: {as_other}"
    return f"set data.types: {as_number} to read them as numbers, or {as_other}"


def is_amount(writing: Mapping[str, int]) -> bool:
    """Return whether no value has a unit, or some are amounts of money or percentages."""
    units = list_units(writing)
    return not units or PER_CENT in "".join(writing) or any(map(_MONEY.fullmatch, units))


def _parts(kind: str, array: pa.Array) -> tuple[dict[str, Any], NDArray[np.bool_]] | None:
    is_ascii = _is_ascii(array)
    if not is_ascii:
        for odd, plain in ((_SPACES, " "), (_MINUS, "-"), ("[\u2019\u02bc]", "'")):
            array = pc.replace_substring_regex(array, odd, plain)
    pattern = _choose_pattern(_PATTERNS[kind], is_ascii=is_ascii)
    # Match without groups first, because extracting groups is several times slower.
    matched = matches(array, pattern)
    right = matched.to_numpy(zero_copy_only=False).copy()
    if not right.any():
        return None
    found = pc.extract_regex(pc.if_else(matched, array, pa.scalar(None, array.type)), pattern)
    fields = {
        field.name: pc.fill_null(pc.struct_field(found, field.name), "") for field in found.type
    }
    brackets = _is_there(fields["open"], "(") | _is_there(fields["late"], "(")
    closed = _is_there(fields["close"], ")")
    minus = sum(_is_there(fields[name], "-").astype(int) for name in ("sign", "inner", "trailing"))
    fields["negative"] = minus + closed > 0
    # `2. Bonn` is an item of a list, not a number with the unit Bonn.
    items = pc.and_(pc.ends_with(fields["digits"], "."), pc.not_equal(fields["after"], ""))
    right &= ~items.to_numpy(zero_copy_only=False)
    return fields, right & (brackets == closed) & (minus + closed <= 1)


def _is_ascii(array: pa.Array) -> bool:
    return bool(pc.all(pc.string_is_ascii(array)).as_py())


def _choose_pattern(pattern: str, *, is_ascii: bool) -> str:
    for name, letters in _IN_ASCII if is_ascii else ():
        pattern = pattern.replace(name, letters)
    return pattern


def _is_there(array: pa.Array, text: str) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.equal(array, text).to_numpy(zero_copy_only=False)
    return found


def _values(kind: str, fields: dict[str, Any]) -> NDArray[np.float64]:
    digits = pc.replace_substring_regex(fields["digits"], _SEPARATORS[kind], "")
    digits = pc.replace_substring(digits, ",", ".")
    empty = pc.equal(digits, "")
    values = pc.cast(pc.if_else(empty, pa.scalar(None, digits.type), digits), pa.float64())
    found: NDArray[np.float64] = pc.fill_null(values, np.nan).to_numpy(zero_copy_only=False)
    return np.where(fields["negative"], -found, found)


def _units(fields: dict[str, Any]) -> NDArray[Any]:
    joined = pc.binary_join_element_wise(fields["before"], fields["after"], "")
    units: NDArray[Any] = pc.utf8_trim(joined, " .").to_numpy(zero_copy_only=False)
    return units.astype(str)

"""Parse formatted numbers: units, currencies, percentages, thousands separators, decimal commas.

`number` has a decimal point, and `number_comma` a decimal comma. Both accept `1'234`, `1 234`,
`$5`, `5 kg`, `(5)` and `5-` for negative numbers, and 12 % for 0.12. All values must have the same
unit, or none.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flotilla.trainer.config.data import NUMBERS_IN_WRITING
from flotilla.trainer.data.files.text_values import matches

#: A column has a type if at least this share of its values has it.
NEARLY_ALL = 0.9
# A column with more units probably has strings that only begin with a number, such as addresses.
_MOST_UNITS = 3
_LONGEST = 40
_UNIT_OF = "unit "
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
    r"^(\d{1,4}[/.]\d{1,2}[/.]\d{1,4}|\d{1,2}-\d{1,2}-(\d{2}|\d{4})|\d{4}-\d{1,2}-\d{1,2}"
    r"|\d{1,2}(st|nd|rd|th)?[ .-]{1,2}[\p{L}]{3,9}[ .,-]{1,2}\d{2,4}"
    r"|([\p{L}]{3,9},? )?[\p{L}]{3,9}\.? \d{1,2},? \d{4}|[\p{L}]{3,9}[ -]\d{4})([ T].{1,20})?$"
)
_CLOCK = r"^\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?( ?[AaPp]\.?[Mm]\.?)?$"
# Parts of the patterns that are slow to compile, with their ASCII equivalents.
_IN_ASCII = ((r"\p{L}", "A-Za-z"), (r"\p{M}", ""), (r"\p{Sc}", "[$]"))
# `2nd` is not a number with the unit nd.
_ORDINALS = {"st", "nd", "rd", "th"}
_SPACES = "[\u00a0\u2007\u2009\u202f]"
_MINUS = "[\u2212\u2012\u2013\ufe63\uff0d]"


def numbers(kind: str, array: pa.Array, unit: str) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
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

    Strings without a unit are counted too, except 0, which is the same in all units. `counts` has
    the number of times that each string occurs. If it is None, each string occurs once.
    """
    found: Counter[str] = Counter()
    counts = np.ones(len(array), np.int64) if counts is None else counts
    # A string without a digit is not a number, and 007 is a code.
    kept = pc.and_not(matches(array, r"[1-9]|0$|0\D"), matches(array, r"^0\d+$"))
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
    for name, pattern in (("date", _DATE), ("clock", _CLOCK)):
        there = matches(short, _choose_pattern(pattern, is_ascii=_is_ascii(short)))
        found[name] += int(counts[there.to_numpy(zero_copy_only=False)].sum())
    bare &= matches(short, "[1-9]").to_numpy(zero_copy_only=False)
    found[_BARE] = int(counts[bare].sum())
    return +found


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


def list_units(writing: Mapping[str, int]) -> list[str]:
    """Return the counted units except percent, the most frequent first."""
    found = {name.removeprefix(_UNIT_OF): n for name, n in writing.items() if name[:5] == _UNIT_OF}
    return sorted(found.keys() - {PER_CENT}, key=lambda unit: (-found[unit], unit))


def has_per_cent(writing: Mapping[str, int], *, plain: bool) -> bool:
    """Return whether percentages are mixed with other numbers: formatted ones, or `plain` ones."""
    others = plain or writing.get(_BARE) or list_units(writing)
    return bool(others and f"{_UNIT_OF}{PER_CENT}" in writing)


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

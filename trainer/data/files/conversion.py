"""Convert columns of files to arrays of features. A row with an unsuitable value is broken."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flotilla.trainer.config.data import NUMBERS_IN_WRITING
from flotilla.trainer.data.columns import Column, make_column
from flotilla.trainer.data.files import text_values
from flotilla.trainer.data.files.column_scan import EXACT, is_list, is_text
from flotilla.trainer.data.files.columns import Column as FileColumn
from flotilla.trainer.data.files.text_values import parse_numbers
from flotilla.trainer.features.class_names import ClassIndex
from flotilla.trainer.features.feature_spec import FeatureSpec

_DTYPES = {
    "int": ("int64", "int"),
    "float": ("float32", "float"),
    "bool": ("bool", "int"),
    "text": ("string", "bytes"),
    "class": ("int64", "int"),
    "time": ("float64", "raw"),
}
_LARGEST = float(np.finfo(np.float32).max)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6}


class Values(NamedTuple):
    """Converted values of a column by row, a mask of the broken ones, and why they are broken.

    `missing` is a mask of missing numbers and classes. A missing value is also broken if it is
    required, or if the type cannot represent it.
    """

    values: Column
    bad: NDArray[np.bool_]
    why: str
    missing: NDArray[np.bool_] | np.bool_ = np.False_


def make_spec(column: FileColumn) -> FeatureSpec:
    """Return the spec of a column's feature, including its stored form."""
    if column.type in ("tensor", "image"):
        whole = "bytes" if column.dtype == "string" else "raw"
        stored = column.stored or ("sequence" if None in column.shape else whole)
        return FeatureSpec(shape=column.shape, dtype=column.dtype, stored=stored)
    # Store an int or a bool with missing values as a float, which can be NaN.
    is_float = column.type in NUMBERS_IN_WRITING or (column.gaps and column.type in ("int", "bool"))
    kind = "float" if is_float else column.type
    dtype, stored = _DTYPES[kind]
    if column.dtype == "float64":
        dtype, stored = _DTYPES["time"]
    return FeatureSpec(
        shape=(), dtype=dtype, stored=stored, num_classes=len(column.classes), labels=column.classes
    )


def convert_rows(column: FileColumn, array: pa.Array, *, required: bool) -> Values:
    """Convert the values of some rows. A missing value that is `required` makes a row broken."""
    if pa.types.is_dictionary(array.type):
        array = pc.cast(array, array.type.value_type)
    if column.type == "tensor":
        return _tensor(column, array)
    if is_list(array.type):
        array = _only_values(array)
    if column.type in ("text", "class"):
        return _texts(column, array, required=required)
    values, missing, bad = read_numbers(column.type, array, column.unit)
    dtype = make_spec(column).dtype
    why = f"is not of type {column.type}"
    if dtype in ("int64", "bool"):
        # Broken rows are dropped, so their values do not matter.
        return Values(values.astype(dtype), bad | missing, why, missing)
    wide = values.astype(np.float64)
    wide[missing | bad] = np.nan
    if required:
        bad = bad | missing | np.isinf(wide)
    if dtype == "float32":
        large = np.abs(wide) > _LARGEST
        bad = bad | (large & np.isfinite(wide))
        wide[large] = np.nan
    return Values(wide.astype(dtype), bad, why, missing)


def read_times(array: pa.Array, said: str = "") -> list[int | float]:
    """Return the timestamps or numbers by which examples are ordered, in full precision.

    Missing and invalid values are left out. `said` is the configured kind. If it is empty, strings
    are read as the kind that most of them have.
    """
    kind = said or ("int" if pa.types.is_integer(array.type) else "float")
    if is_text(array.type) and not said:
        short = text_values.trim_texts(array)
        kind = min(("int", "float", "time"), key=lambda each: read_numbers(each, short).bad.sum())
    found = read_numbers(kind, array)
    values = found.values[~(found.missing | found.bad)]
    return values[np.isfinite(values)].tolist()  # type: ignore[no-any-return]


class Numbers(NamedTuple):
    """Numbers by row (int64 for whole types), and masks of the missing and the invalid ones."""

    values: NDArray[Any]
    missing: NDArray[np.bool_]
    bad: NDArray[np.bool_]


def read_numbers(kind: str, array: pa.Array, unit: str = "") -> Numbers:
    """Parse values as numbers of a kind: int, float, bool, time, or a kind of formatted numbers."""
    if pa.types.is_decimal(array.type):
        # Parse a decimal as a string, because a conversion to float would lose digits.
        array = pc.cast(array, pa.string())
    if is_text(array.type):
        return _parse(kind, text_values.trim_texts(array), unit)
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        return _check_kind(kind, _seconds(array))
    if pa.types.is_boolean(array.type):
        array = pc.cast(array, pa.int8())
    missing = array.is_null().to_numpy(zero_copy_only=False)
    if pa.types.is_integer(array.type) and kind == "int":
        whole = pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int64)
        # The cast makes an unsigned value beyond int64 negative. Mark it as invalid.
        return Numbers(whole, missing, (whole < 0) & pa.types.is_unsigned_integer(array.type))
    if not (pa.types.is_integer(array.type) or pa.types.is_floating(array.type)):
        return Numbers(np.full(len(array), np.nan), missing, ~missing)
    wide = pc.fill_null(pc.cast(array, pa.float64(), safe=False), np.nan)
    return _check_kind(kind, wide.to_numpy(zero_copy_only=False))


def _parse(kind: str, short: pa.Array, unit: str) -> Numbers:
    if kind != "int" and kind not in NUMBERS_IN_WRITING:
        parse = {"bool": text_values.bools, "time": text_values.times}
        return _check_kind(kind, *parse.get(kind, text_values.numbers)(short))
    values: NDArray[Any]
    if kind == "int":
        values, bad = text_values.ints(short)
    else:
        values, bad = text_values.formatted_numbers(kind, short, unit)
    if not bad.any():
        return Numbers(values, bad, bad)
    missing = text_values.is_missing(short).to_numpy(zero_copy_only=False)
    left = bad & ~missing
    if kind == "int" and left.any():
        # Accept other notations of whole numbers, such as 30.0 and 3e1.
        others = _check_kind(kind, *text_values.numbers(short.filter(pa.array(left))))
        values[left], left[left] = others.values, others.bad
    return Numbers(values, missing, left)


def _check_kind(kind: str, values: NDArray[np.float64], bad: Any = False) -> Numbers:
    """Convert floats to a kind. NaN is missing, and numbers of another kind are invalid."""
    missing = np.isnan(values) & ~np.broadcast_to(bad, values.shape)
    known = ~np.isnan(values)
    if kind == "bool":
        bad = bad | (known & ~np.isin(values, (0, 1)))
    if kind != "int":
        return Numbers(values, missing, np.broadcast_to(bad, values.shape))
    # From 2^53 on, whole numbers may have lost digits when they were converted to float.
    whole = known & (np.abs(values) < EXACT["float64"]) & (values == np.floor(values))
    bad = bad | (known & ~whole)
    return Numbers(np.where(whole, values, 0).astype(np.int64), missing, bad)


def _seconds(array: pa.Array) -> NDArray[np.float64]:
    if pa.types.is_date(array.type):
        array = pc.cast(array, pa.timestamp("s"))
    units = pc.cast(array, pa.int64())
    known = pc.fill_null(units, 0).to_numpy(zero_copy_only=False)
    # Round down to microseconds, as for strings, because a float of seconds cannot resolve more.
    if array.type.unit == "ns":
        found = (known // 1000) / 10**6
    else:
        found = known / _PER_SECOND[array.type.unit]
    return np.where(units.is_null().to_numpy(zero_copy_only=False), np.nan, found)


def _texts(column: FileColumn, array: pa.Array, *, required: bool) -> Values:
    texts, broken = _decode_texts(array)
    texts = text_values.trim_texts(texts)
    if column.type == "class":
        ids = class_ids(column.classes, texts)
        missing = (ids < 0) & text_values.is_missing(texts).to_numpy(zero_copy_only=False)
        return Values(ids, ids < 0, "is not one of the classes, or is missing", missing)
    bad = broken
    if required:
        bad = bad | pc.equal(texts, "").to_numpy(zero_copy_only=False)
    why = "is neither a string nor an image" if broken.any() else "is missing"
    return Values(texts.cast(pa.large_binary()), bad, why)


@lru_cache(maxsize=16)
def _index(classes: tuple[str, ...]) -> ClassIndex:
    # Cache the index, because indexing a million classes takes seconds and each block of rows needs
    # the index.
    return ClassIndex(classes)


def class_ids(classes: Sequence[str], texts: pa.Array) -> NDArray[np.int64]:
    """Return the class indices of strings, or -1 for an unknown class."""
    index = _index(tuple(classes))
    coded = pc.dictionary_encode(texts)
    known = np.array([index.number(each) for each in coded.dictionary.to_pylist()], np.int64)
    if not len(known):
        return np.full(len(texts), -1, np.int64)
    found: NDArray[np.int64] = known[coded.indices.to_numpy(zero_copy_only=False)]
    return found


def _decode_texts(array: pa.Array) -> tuple[pa.Array, NDArray[np.bool_]]:
    """Return values as strings, and a mask of bytes that are not valid UTF-8."""
    good = np.zeros(len(array), np.bool_)
    if is_text(array.type):
        return array, good
    if pa.types.is_floating(array.type):
        found = [text_values.format_float(each) for each in array.to_numpy(zero_copy_only=False)]
        missing = array.is_null().to_numpy(zero_copy_only=False)
        return pa.array(found, pa.string(), mask=missing), good
    try:
        return pc.cast(array, pa.string()), good
    except pa.ArrowInvalid:
        found = pa.array([_decode(each) for each in array.to_pylist()], pa.string())
        return found, pc.and_not(found.is_null(), array.is_null()).to_numpy(zero_copy_only=False)


def _decode(value: bytes | None) -> str | None:
    with suppress(UnicodeDecodeError):
        return value.decode() if value is not None else None
    return None


def _tensor(column: FileColumn, array: pa.Array) -> Values:
    level = array
    if pa.types.is_fixed_size_list(array.type):
        level = pc.cast(array, pa.list_(array.type.value_type))
    found = _plain_lists(column, level) if is_list(level.type) else None
    if found is not None:
        return Values(found, np.zeros(len(level), np.bool_), "")
    rows = [_fit(column, row) for row in level.to_pylist()]
    bad = np.array([each is None for each in rows], np.bool_)
    empty = _nothing(column)
    kept = [empty if each is None else each for each in rows]
    if None not in column.shape and column.dtype != "string":
        values: Column = np.stack(kept) if kept else empty[np.newaxis][:0]
    else:
        values = make_column(make_spec(column), kept)
    sizes = ", ".join("any" if size is None else str(size) for size in column.shape)
    return Values(values, bad, f"does not have the shape [{sizes}]")


def _plain_lists(column: FileColumn, array: pa.Array) -> Column | None:
    """Convert all lists together, or return None if one may need padding or conversion."""
    fixed, of_texts = None not in column.shape, column.dtype == "string"
    is_nested = is_list(array.type.value_type)
    # Inner lists may differ in shape, so each row must be converted separately.
    if len(column.shape) > 1 and (of_texts or not fixed):
        return None
    whole = math.prod(size or 0 for size in column.shape) if fixed else None
    sizes = column.shape if is_nested else (whole,)
    flat, lengths = array, np.zeros(0, np.int64)
    for size in sizes:
        if not is_list(flat.type):
            return None
        lengths = pc.fill_null(pc.list_value_length(flat), 0).to_numpy(zero_copy_only=False)
        if size is not None and (lengths != size).any():
            return None
        flat = pc.list_flatten(flat)
    values = _plain_values(column.dtype, flat)
    if values is None:
        return None
    if fixed and not of_texts:
        return values.reshape(len(array), *column.shape)
    return pa.LargeListArray.from_arrays(np.cumsum([0, *lengths]), pa.array(values))


def _plain_values(dtype: str, flat: pa.Array) -> Any:
    """Return the elements of lists in stored form, or None if one needs conversion."""
    if dtype == "string":
        return text_values.trim_texts(flat).cast(pa.large_binary()) if is_text(flat.type) else None
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
    if flat.null_count or not any(test(flat.type) for test in tests):
        return None
    numbers = flat.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind == "f" and "float" not in dtype and np.isnan(numbers).any():
        return None
    return numbers.astype(dtype)


def _fit(column: FileColumn, row: Any) -> NDArray[Any] | None:
    """Convert a list to its column's shape, or return None if it does not fit."""
    # Treat a missing list as empty if lists may have any length.
    given = [] if None in column.shape and row in (None, "") else row
    of_texts = column.dtype == "string"
    found = _of_texts(given) if of_texts else parse_numbers(given)
    if found is None:
        return None
    if found.size == 0:
        found = _nothing(column, 0)
    lacks = not (of_texts or "float" in column.dtype) and np.isnan(found.astype(np.float64)).any()
    if lacks or found.ndim != len(column.shape):
        return None
    sizes = tuple(
        there if size is None else size
        for size, there in zip(column.shape, found.shape, strict=True)
    )
    if column.pads:
        found = pad_values(found, sizes)
    if found.shape != sizes:
        return None
    return found if of_texts else found.astype(column.dtype)


def _nothing(column: FileColumn, length: int | None = None) -> NDArray[Any]:
    """Return a placeholder for a missing value. If given, `length` is its first size."""
    sizes = [size or 0 for size in column.shape]
    shape = sizes if length is None else [length, *sizes[1:]]
    of_texts = column.dtype == "string"
    return np.full(shape, b"", object) if of_texts else np.zeros(shape, column.dtype)


def _of_texts(row: Any) -> NDArray[Any] | None:
    """Return the strings of a list as bytes (empty if missing), or None for any other value."""
    found = np.array(row if isinstance(row, list) else None, object)
    if not found.ndim or any(isinstance(each, list) for each in found.flat):
        return None
    return np.array(
        [b"" if each is None else str(each).strip().encode() for each in found.flat], object
    ).reshape(found.shape)


def pad_values(values: NDArray[Any], sizes: tuple[int, ...]) -> NDArray[Any]:
    """Crop values to `sizes`, or pad them at the end with zeros or empty strings."""
    found = np.full(sizes, b"" if values.dtype == object else 0, values.dtype)
    here = tuple(slice(min(each)) for each in zip(sizes, values.shape, strict=True))
    found[here] = values[here]
    return found


def _only_values(array: pa.Array) -> pa.Array:
    """Unpack lists of one value. Other lists become null."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    places = np.cumsum(lengths) - lengths
    flat = pc.list_flatten(array)
    return flat.take(pa.array(places, mask=lengths != 1))

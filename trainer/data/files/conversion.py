"""Columns of files become arrays of features; a value that does not fit breaks its row."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from trainer.data.files import text_values
from trainer.data.files.column_scan import is_list
from trainer.data.files.columns import Column
from trainer.data.spec import FeatureSpec

_DTYPES = {
    "int": ("int64", "int"),
    "float": ("float32", "float"),
    "bool": ("bool", "int"),
    "text": ("string", "bytes"),
    "class": ("int64", "int"),
    "time": ("float64", "raw"),
}
_LARGEST = float(np.finfo(np.float32).max)
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)


class Values(NamedTuple):
    """The values of a column by row, which of them are broken, and what is wrong with these."""

    values: NDArray[Any]
    bad: NDArray[np.bool_]
    why: str


def spec_of(column: Column) -> FeatureSpec:
    """Return how a column is stored."""
    if column.type in ("tensor", "image"):
        stored = column.stored or "raw"
        return FeatureSpec(shape=column.shape, dtype=column.dtype, stored=stored)
    # An int or a bool has no form for a missing value.
    kind = "float" if column.gaps and column.type in ("int", "bool") else column.type
    dtype, stored = _DTYPES[kind]
    return FeatureSpec(
        shape=(),
        dtype=dtype,
        stored=stored,
        num_classes=len(column.classes),
        labels=column.classes,
    )


def converted(column: Column, array: pa.Array, *, required: bool) -> Values:
    """Return the values of some rows.

    Args:
        column: what the values are.
        array: the values as they are in the file.
        required: whether a missing value makes a row a broken one, as that of a label.
    """
    if pa.types.is_dictionary(array.type):
        array = pc.cast(array, array.type.value_type)
    if column.type == "tensor":
        return _tensor(column, array)
    if is_list(array.type):
        array = _only_values(array)
    if column.type in ("text", "class"):
        return _texts(column, array, required=required)
    values, bad = _numbers(column.type, array)
    missing = np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), np.bool_)
    dtype = spec_of(column).dtype
    if required:
        bad = bad | missing | (np.isinf(values) if dtype.startswith("float") else False)
    if dtype == "float32":
        large = np.abs(values) > _LARGEST
        bad = bad | (large & np.isfinite(values))
        values = np.where(large, np.nan, values)
    elif dtype in ("int64", "bool"):
        # None of these is kept: the row is broken.
        bad = bad | missing
        values = np.where(missing, 0, values)
    return Values(values.astype(dtype), bad, f"is no {column.type}")


def seconds_of(array: pa.Array) -> NDArray[np.float64]:
    """Return times, or numbers, by which examples are put in order; NaN where missing."""
    kind = "float"
    if _is_text(array.type):
        short = text_values.trimmed(array)
        kind = "float" if not text_values.numbers(short)[1].any() else "time"
    return _numbers(kind, array)[0].astype(np.float64)


def _numbers(kind: str, array: pa.Array) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return numbers, NaN where missing, and which of them are not of their kind."""
    if _is_text(array.type):
        return _parsed(kind, text_values.trimmed(array))
    if pa.types.is_timestamp(array.type) or pa.types.is_date(array.type):
        return _seconds(array), np.zeros(len(array), np.bool_)
    if pa.types.is_boolean(array.type):
        array = pc.cast(array, pa.int8())
    if pa.types.is_integer(array.type) and not array.null_count and kind == "int":
        # Of an unsigned one that is too large the sign is what shows it.
        whole = array.to_numpy(zero_copy_only=False).astype(np.int64)
        return whole, (whole < 0) & pa.types.is_uint64(array.type)
    if not any(test(array.type) for test in _NUMBERS):
        return np.full(len(array), np.nan), pc.is_valid(array).to_numpy(zero_copy_only=False)
    values = pc.fill_null(pc.cast(array, pa.float64(), safe=False), np.nan)
    found = values.to_numpy(zero_copy_only=False)
    return found, _of_another_kind(kind, found)


def _parsed(kind: str, short: pa.Array) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    if kind == "int" and not pc.any(text_values.is_missing(short)).as_py():
        return text_values.ints(short)
    parse = {"bool": text_values.bools, "time": text_values.times}.get(kind, text_values.numbers)
    values, bad = parse(short)
    return values, bad | _of_another_kind(kind, values)


def _of_another_kind(kind: str, values: NDArray[np.float64]) -> NDArray[np.bool_]:
    known = ~np.isnan(values)
    if kind == "int":
        fractional: NDArray[np.bool_] = known & (values != np.floor(values))
        return fractional
    if kind == "bool":
        return known & ~np.isin(values, (0, 1))
    return np.zeros(len(values), np.bool_)


def _seconds(array: pa.Array) -> NDArray[np.float64]:
    if pa.types.is_date(array.type):
        array = pc.cast(array, pa.timestamp("s"))
    wide = pc.cast(pc.cast(array, pa.int64()), pa.float64(), safe=False)
    seconds = pc.fill_null(wide, np.nan).to_numpy(zero_copy_only=False)
    found: NDArray[np.float64] = seconds / _PER_SECOND[array.type.unit]
    return found


def _texts(column: Column, array: pa.Array, *, required: bool) -> Values:
    why = "is missing"
    # Of bytes that are no texts in a column that is said to hold texts, all are broken.
    try:
        texts = array if _is_text(array.type) else pc.cast(array, pa.string())
    except pa.ArrowInvalid:
        texts, required = pa.nulls(len(array), pa.string()), True
        why = "is neither a text nor an image"
    texts = pc.fill_null(texts, "")
    if column.type == "class":
        found = pc.index_in(text_values.trimmed(texts), value_set=pa.array(column.classes))
        ids = pc.fill_null(found, -1).to_numpy(zero_copy_only=False).astype(np.int64)
        return Values(ids, ids < 0, "is none of the classes, or missing")
    bad = np.zeros(len(texts), np.bool_)
    if required:
        bad = pc.equal(texts, "").to_numpy(zero_copy_only=False)
    values = texts.cast(pa.binary()).to_numpy(zero_copy_only=False)
    return Values(values.astype(object), bad, why)


def _tensor(column: Column, array: pa.Array) -> Values:
    """Return lists as one array; one of another length is broken."""
    level, bad = array, np.zeros(len(array), np.bool_)
    if pa.types.is_fixed_size_list(array.type):
        level = pc.cast(array, pa.list_(array.type.value_type))
    rows = level.to_pylist()
    size = int(np.prod(column.shape))
    values = np.zeros((len(rows), *column.shape), column.dtype)
    if not is_list(level.type.value_type) and level.null_count == 0:
        lengths = pc.list_value_length(level).to_numpy(zero_copy_only=False)
        flat = pc.list_flatten(level)
        if (lengths == size).all() and not flat.null_count:
            values = flat.to_numpy(zero_copy_only=False).reshape(values.shape)
            return Values(values.astype(column.dtype), bad, "")
    for place, row in enumerate(rows):
        try:
            found = np.asarray(row, column.dtype)
        except (TypeError, ValueError):
            found = np.zeros(0)
        if found.shape == column.shape:
            values[place] = found
        else:
            bad[place] = True
    return Values(values, bad, f"has not the shape {list(column.shape)}")


def _only_values(array: pa.Array) -> pa.Array:
    """Return the values of lists of one value; null for one that is empty."""
    lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    places = np.cumsum(lengths) - lengths
    flat = pc.list_flatten(array)
    return flat.take(pa.array(places, mask=lengths != 1))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))

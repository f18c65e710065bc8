"""Columns and tables of examples in memory, without a Python object per row.

A column has one of three forms:

- numbers of a fixed shape: a NumPy array whose first axis is the example;
- strings and encoded images: an Arrow array of bytes without nulls (pixels are encoded as PNG);
- sequences, and arrays of strings: an Arrow array of lists of numbers or bytes, one flat list per
  example (`bfloat16` is stored as `float32`).

A table has the same columns in their stored form: int64, float32 or bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf
from numpy.typing import NDArray

from flotilla.trainer.data.images import encode_png
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name

#: An `NDArray` or a `pa.Array`. The type is `Any`, because PyArrow has no type stubs.
Column: TypeAlias = Any
Columns = Mapping[str, Column]
# Neither NumPy nor Arrow has this type. Its values are truncated float32 values.
_SHORT_FLOAT = "bfloat16"


def make_columns(features: Mapping[str, FeatureSpec], given: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arrays and lists to columns in the forms of this module, and add length columns.

    A feature of variable length, or an array of strings, may be given as an array or as a list of
    arrays.
    """
    found = {
        name: make_column(feature, given[name])
        for name, feature in features.items()
        if name in given
    }
    return {**found, **count_lengths(features, found)}


def make_column(feature: FeatureSpec, values: Any) -> Column:
    """Convert the values of one feature to a column."""
    if isinstance(values, pa.Array):
        return values
    if feature.stored == "sequence" or (feature.dtype == "string" and feature.shape):
        return _make_lists(feature, values)
    if feature.stored == "image":
        # Encode pixels as PNG, because it is lossless.
        return make_texts(each if isinstance(each, bytes) else encode_png(each) for each in values)
    if feature.dtype == "string":
        return make_texts(values)
    return np.asarray(values, numpy_type(feature))


def make_texts(values: Iterable[Any]) -> pa.Array:
    """Convert bytes to an Arrow array of binary values."""
    flat = np.ravel(values).tolist() if isinstance(values, np.ndarray) else list(values)
    return pa.array(flat, pa.large_binary())


def count_lengths(
    features: Mapping[str, FeatureSpec], columns: Mapping[str, Column]
) -> dict[str, NDArray[np.int64]]:
    """Return the sequence lengths of each column, keyed by the name of its length feature."""
    return {
        length_name(name): _lengths(columns[name]) // math.prod(feature.sizes[1:])
        for name, feature in features.items()
        if feature.varies and name in columns
    }


def make_table(features: Mapping[str, FeatureSpec], columns: Columns) -> pa.RecordBatch:
    """Convert columns to a table that has each column in its stored form."""
    names = list(features)
    return pa.record_batch([_store(features[name], columns[name]) for name in names], names)


def select_rows(columns: Columns, chosen: NDArray[np.bool_]) -> Columns:
    """Return the rows of the columns for which `chosen` is true."""
    if chosen.all():
        return columns
    mask = pa.array(chosen)
    return {
        name: values[chosen] if isinstance(values, np.ndarray) else values.filter(mask)
        for name, values in columns.items()
    }


def make_rows(feature: FeatureSpec, column: Any) -> Any:
    """Convert a column to NumPy for user code. Strings become bytes, sequences become arrays."""
    if not isinstance(column, pa.Array):
        return column
    if not pa.types.is_large_list(column.type):
        return column.to_numpy(zero_copy_only=False)
    flat = column.flatten().to_numpy(zero_copy_only=False)
    if feature.dtype != "string":
        flat = flat.astype(numpy_type(feature))
    ends = np.cumsum(_lengths(column))
    if not feature.varies:
        return flat.reshape(len(column), *feature.sizes)
    found = np.empty(len(column), object)
    for place, row in enumerate(np.split(flat, ends[:-1]) if len(column) else ()):
        found[place] = row.reshape(-1, *feature.sizes[1:])
    return found


def numpy_type(feature: FeatureSpec) -> np.dtype[Any]:
    """Return the NumPy type of a numeric feature."""
    found: np.dtype[Any] = np.dtype(tf.as_dtype(feature.dtype).as_numpy_dtype)
    return found


def _make_lists(feature: FeatureSpec, values: Any) -> pa.Array:
    is_text = feature.dtype == "string"
    kind = object if is_text else numpy_type(feature)
    rows = [np.ravel(np.asarray(each, kind)) for each in values]
    ends = np.cumsum([0, *map(len, rows)])
    flat = np.concatenate(rows) if rows else np.zeros(0, kind)
    if is_text:
        inner = pa.array(flat.tolist(), pa.large_binary())
    else:
        inner = pa.array(flat.astype(np.float32) if feature.dtype == _SHORT_FLOAT else flat)
    return pa.LargeListArray.from_arrays(pa.array(ends, pa.int64()), inner)


def _lengths(column: Column) -> NDArray[np.int64]:
    found = pc.list_value_length(column).to_numpy(zero_copy_only=False)
    return found.astype(np.int64)  # type: ignore[no-any-return]


def _store(feature: FeatureSpec, column: Column) -> pa.Array:
    if feature.dtype == "string" or feature.stored == "image":
        is_list = feature.stored == "sequence" or (feature.shape and feature.stored != "image")
        binary = pa.large_binary()
        return column.cast(pa.large_list(binary) if is_list else binary)
    kind = numpy_type(feature)
    if feature.stored == "sequence":
        with np.errstate(invalid="ignore"):
            flat = column.flatten().to_numpy(zero_copy_only=False).astype(kind)
        ends = np.cumsum([0, *_lengths(column)]) * kind.itemsize
        buffers = [None, pa.py_buffer(ends.astype(np.int64)), pa.py_buffer(flat.tobytes())]
        return pa.Array.from_buffers(pa.large_binary(), len(column), buffers)
    values = np.asarray(column, kind)
    if feature.stored == "int":
        return pa.array(values.astype(np.int64))
    if feature.stored == "float":
        return pa.array(values.astype(np.float32))
    size = math.prod(feature.sizes) * kind.itemsize
    return pa.Array.from_buffers(
        pa.binary(size), len(values), [None, pa.py_buffer(values.tobytes())]
    )

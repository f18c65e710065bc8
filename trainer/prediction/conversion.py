"""Converts columns of a file to the inputs of a model. Rows with invalid values are marked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import images
from flotilla.trainer.data.columns import make_rows
from flotilla.trainer.data.files.column_scan import EXACT, is_list
from flotilla.trainer.data.files.columns import RecordedInput
from flotilla.trainer.data.files.conversion import Values, convert_rows, pad_values
from flotilla.trainer.data.files.pictures import Pictures
from flotilla.trainer.data.files.text_values import parse_numbers
from flotilla.trainer.features.feature_spec import FeatureSpec


@dataclass(frozen=True)
class Converted:
    """The values of an input. For each row, `bad` marks an invalid value, and `why` explains it."""

    values: Sequence[Any] | NDArray[Any]
    bad: NDArray[np.bool_]
    why: Sequence[str]


def convert(wanted: RecordedInput, array: pa.Array, config: DataConfig, folder: str) -> Converted:
    """Convert the values of some rows.

    Args:
        wanted: the input of the model.
        array: the values from the file.
        config: settings for decoding images and padding lists.
        folder: URI of the folder that image paths are relative to.
    """
    column, spec = wanted.column, wanted.spec
    if column.type == "image" and not is_list(array.type):
        values, bad, why = Pictures(config.image, folder).decode_all(spec, array.to_pylist())
        return Converted(make_rows(spec, values), bad, why)
    if spec.shape:
        return _lists(spec, array, pads=wanted.feature in config.shapes)
    try:
        return _check_range(spec, array, convert_rows(column, array, required=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        size = len(array)
        words = f"is {array.type}, but the model needs type {column.type}"
        return Converted(np.zeros(size), np.ones(size, np.bool_), [words] * size)


def make_input(spec: FeatureSpec, values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    """Convert values of valid rows to the model's input. Images are decoded, and lists padded."""
    if spec.stored == "image" and not isinstance(values[0], np.ndarray):
        pixels: NDArray[Any] = images.decode(spec, tf.constant(list(values))).numpy()
        return pixels
    if spec.varies:
        return _pad(spec, values)
    return np.asarray(values, object if spec.dtype == "string" else None).astype(_dtype(spec))


def _dtype(spec: FeatureSpec) -> Any:
    return object if spec.dtype == "string" else tf.as_dtype(spec.dtype).as_numpy_dtype


def _pad(spec: FeatureSpec, values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    longest = max(1, *(len(each) for each in values))
    fill: Any = b"" if spec.dtype == "string" else spec.padding
    found = np.full((len(values), longest, *spec.sizes[1:]), fill, _dtype(spec))
    for place, each in enumerate(values):
        found[place, : len(each)] = each
    return found


def _check_range(spec: FeatureSpec, array: pa.Array, found: Values) -> Converted:
    values, bad = make_rows(spec, found.values), found.bad
    dtype = tf.as_dtype(spec.dtype)
    if dtype.is_integer and values.dtype.kind in "iu":
        bad = bad | (values < dtype.min) | (values > dtype.max)
    why = [""] * len(bad)
    for place in np.flatnonzero(bad):
        why[place] = f"{found.why} ({str(array[int(place)].as_py())[:40]!r})"
    return Converted(values, bad, why)


def _lists(spec: FeatureSpec, array: pa.Array, *, pads: bool) -> Converted:
    """Convert lists, or strings with JSON lists, to arrays of the feature's shape."""
    is_text, dtype = spec.dtype == "string", _dtype(spec)
    empty = np.zeros(tuple(0 if size is None else size for size in spec.shape), dtype)
    found: list[NDArray[Any]] = []
    why: list[str] = []
    for row in array.to_pylist():
        try:
            values = np.asarray(_parse_list(row, spec))
            if values.size:
                values = _cast(values, spec)
            values = np.vectorize(str.encode, otypes=[object])(values) if is_text else values
            values = values.astype(dtype) if values.size or not spec.varies else empty
            if pads and not spec.varies and values.ndim == len(spec.shape):
                values = pad_values(values, spec.sizes)
        except (TypeError, ValueError, OverflowError):
            values = None
        if values is None or not _fits(spec, values.shape):
            sizes = ", ".join("any" if size is None else str(size) for size in spec.shape)
            what = f"is not {spec.dtype} of shape ({sizes})"
            why.append(what if values is None else f"{what}: its shape is {list(values.shape)}")
            values = empty
        else:
            why.append("")
        found.append(values)
    bad = np.array([bool(each) for each in why], np.bool_)
    return Converted(found, bad, why)


def _parse_list(row: Any, spec: FeatureSpec) -> Any:
    if spec.varies and row in (None, ""):
        return []
    if not isinstance(row, str | bytes):
        return row
    if spec.dtype == "string":
        return json.loads(row)
    if (found := parse_numbers(row)) is None:
        raise ValueError
    return found


def _cast(values: NDArray[Any], spec: FeatureSpec) -> NDArray[Any]:
    """Convert the values of a row as in training. Raises `TypeError` or `OverflowError`."""
    is_float = "float" in spec.dtype
    if is_float and all(each is None or isinstance(each, int | float) for each in values.flat):
        values = values.astype(np.float64)
    if "int" in spec.dtype and values.dtype.kind == "f":
        # Accept whole floats: a fraction in one row makes all numbers of a file floats.
        if not (np.abs(values) < EXACT["float64"]).all() or (values != np.floor(values)).any():
            raise TypeError
        values = values.astype(np.int64)
    kinds = {"string": "U", "bool": "b"}.get(spec.dtype, "iub")
    if values.dtype.kind not in ("iubf" if is_float else kinds):
        raise TypeError
    if "int" in spec.dtype:
        limits = np.iinfo(spec.dtype)
        if values.min() < limits.min or values.max() > limits.max:
            raise OverflowError
    return values


def _fits(spec: FeatureSpec, shape: tuple[int, ...]) -> bool:
    return len(shape) == len(spec.shape) and all(
        size in (None, found) for size, found in zip(spec.shape, shape, strict=True)
    )

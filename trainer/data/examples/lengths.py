"""Sequences of variable length: stored unpadded, and padded to the longest of a batch.

The length of an example is stored next to the sequence, as an integer feature: a model takes it
where `data.inputs` names it, and batches are bucketed by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from flotilla.trainer.data.windows import Rows, gather_rows
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name

# `tf.io` pads few types when it decodes: chosen by the size of one value in bytes.
_SAME_SIZE = {1: tf.uint8, 2: tf.uint16, 4: tf.int32, 8: tf.int64}


def add_lengths(features: Mapping[str, FeatureSpec], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return columns with the lengths of variable features, which become arrays of arrays."""
    found = dict(columns)
    for name, feature in features.items():
        if feature.varies:
            values = columns[name]
            found[name] = np.empty(len(values), object)
            for index, value in enumerate(values):
                found[name][index] = value
            found[length_name(name)] = np.array([len(value) for value in values], np.int64)
    return found


def wire(feature: FeatureSpec) -> Any:
    """Return the `tf.io.parse_example` feature of a sequence."""
    if feature.dtype != "string":
        return tf.io.FixedLenFeature((), tf.string)
    inner = [tf.io.RaggedFeature.UniformRowLength(size) for size in feature.sizes[1:]]
    return tf.io.RaggedFeature(tf.string, partitions=inner, row_splits_dtype=tf.int64)


def pad_column(feature: FeatureSpec, column: Any) -> tf.Tensor:
    """Return a parsed column, (batch, length, ...), padded or cut to one length.

    For a variable feature this is the longest of the batch, and at least 1: a layer cannot reduce
    an empty axis.
    """
    first, *inner = feature.shape
    if feature.dtype == "string":
        values = column.to_tensor("", shape=(None, first, *inner))
        lacking = tf.maximum(1 - tf.shape(values)[1], 0)
        values = tf.pad(values, [[0, 0], [0, lacking], *[[0, 0]] * len(inner)], constant_values="")
        return tf.ensure_shape(values, (None, *feature.shape))
    dtype = tf.as_dtype(feature.dtype)
    raw = _SAME_SIZE[dtype.size]
    row = math.prod(feature.sizes[1:]) * raw.size
    lengths = tf.strings.length(column) // row
    size = first or tf.maximum(tf.reduce_max(lengths), 1)
    values = tf.io.decode_raw(column, raw, fixed_length=size * row)
    values = tf.cast(values, dtype) if dtype == tf.bool else values
    values = tf.bitcast(values, dtype) if values.dtype != dtype else values
    values = tf.reshape(values, (tf.shape(column)[0], size, *feature.sizes[1:]))
    if feature.padding:
        known = tf.reshape(tf.sequence_mask(lengths, size), (-1, size, *[1] * len(inner)))
        values = tf.where(known, values, tf.constant(feature.padding, dtype))
    return tf.ensure_shape(values, (column.shape[0], *feature.shape))


def varying(spec: DatasetSpec) -> tuple[str, ...]:
    """Return the names of the features of a batch that vary in length."""
    return tuple(name for name in spec.roles if spec.features[name].varies)


def fix_lengths(spec: DatasetSpec, lengths: Mapping[str, int]) -> DatasetSpec:
    """Return a spec by which all batches are padded to the same lengths."""
    fixed = {
        name: replace(spec.features[name], shape=(size, *spec.features[name].shape[1:]))
        for name, size in lengths.items()
    }
    return replace(spec, features={**spec.features, **fixed})


def length_names(spec: DatasetSpec) -> tuple[str, ...]:
    """Return the names of the lengths of these features."""
    return tuple(map(length_name, varying(spec)))


def longest(spec: DatasetSpec, windows: tf.data.Dataset) -> dict[str, int]:
    """Return the length of the longest example of each variable feature, at least 1."""
    found = dict.fromkeys(varying(spec), 1)
    for rows in windows:
        for name in found:
            found[name] = max(found[name], int(tf.reduce_max(rows[length_name(name)])))
    return found


def fill_batches(
    spec: DatasetSpec, windows: tf.data.Dataset, buckets: Sequence[int], batch_size: int
) -> tf.data.Dataset:
    """Return windows of full batches of rows whose longest inputs fall into the same bucket.

    Batches come in the order in which they are full. No row of an endless dataset is dropped: those
    of an incomplete batch wait for more.
    """
    inputs = [name for name in spec.inputs if spec.features[name].varies]
    names = [length_name(name) for name in inputs or varying(spec)]
    bounds = tf.constant(list(buckets), tf.int64)

    def fill(left: tuple[tf.Tensor, ...], new: Rows) -> tuple[tuple[tf.Tensor, ...], Rows]:
        waiting = tf.nest.pack_sequence_as(new, left, expand_composites=True)
        rows = {name: tf.concat([waiting[name], new[name]], 0) for name in new}
        length = tf.reduce_max(tf.stack([rows[name] for name in names]), 0)
        bucket = tf.searchsorted(bounds, length, out_type=tf.int64)
        order = tf.argsort(bucket, stable=True)
        bucket = tf.gather(bucket, order)
        counts = tf.math.bincount(tf.cast(bucket, tf.int32), minlength=len(buckets) + 1)
        first = tf.gather(tf.cumsum(counts, exclusive=True), bucket)
        whole = counts // batch_size * batch_size
        full = tf.range(tf.size(order)) - first < tf.gather(whole, bucket)
        batches = tf.reshape(order[full], (-1, batch_size))
        batches = tf.gather(batches, tf.argsort(batches[:, -1]))
        waiting = gather_rows(rows, order[~full])
        filled = gather_rows(rows, tf.reshape(batches, [-1]))
        return tuple(tf.nest.flatten(waiting, expand_composites=True)), filled

    return windows.scan(_no_rows(windows), fill)


def _no_rows(windows: tf.data.Dataset) -> tuple[tf.Tensor, ...]:
    """Return the tensors of a window without rows."""
    found = {}
    for name, spec in windows.element_spec.items():
        if isinstance(spec, tf.RaggedTensorSpec):
            values = tf.zeros((0, *spec.shape[2:]), spec.dtype)
            found[name] = tf.RaggedTensor.from_row_lengths(values, tf.zeros(0, tf.int64))
        else:
            found[name] = tf.zeros((0, *spec.shape[1:]), spec.dtype)
    return tuple(tf.nest.flatten(found, expand_composites=True))

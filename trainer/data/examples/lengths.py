"""Sequences of variable length: stored without padding, and padded to the longest one in a batch.

The length of each example is stored as an integer feature. A model gets the length only if this
feature is one of its inputs. Batches are bucketed by length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import tensorflow as tf

from flotilla.trainer.data.blocks import Rows, gather_rows
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.names import length_name


def varying(spec: DatasetSpec) -> tuple[str, ...]:
    """Return the names of the features of a batch that vary in length."""
    return tuple(name for name in spec.roles if spec.features[name].varies)


def fix_lengths(spec: DatasetSpec, lengths: Mapping[str, int]) -> DatasetSpec:
    """Return a spec that pads the features in `lengths` to the given lengths in every batch."""
    fixed = {
        name: replace(spec.features[name], shape=(size, *spec.features[name].shape[1:]))
        for name, size in lengths.items()
    }
    return replace(spec, features={**spec.features, **fixed})


def length_names(spec: DatasetSpec) -> tuple[str, ...]:
    """Return the names of the length features of a batch."""
    return tuple(map(length_name, varying(spec)))


def longest(spec: DatasetSpec, windows: tf.data.Dataset) -> dict[str, int]:
    """Return the maximum length of each variable-length feature, but at least 1."""
    found = dict.fromkeys(varying(spec), 1)
    for rows in windows:
        for name in found:
            found[name] = max(found[name], int(tf.reduce_max(rows[length_name(name)])))
    return found


def fill_batches(
    spec: DatasetSpec, windows: tf.data.Dataset, buckets: Sequence[int], batch_size: int
) -> tf.data.Dataset:
    """Return windows of full batches. The rows of a batch have lengths in the same bucket.

    The length of a row is the length of its longest input or, if no input varies in length, of its
    longest label. Batches are in the order in which they fill up. No row of an endless dataset is
    dropped: rows of an incomplete batch wait until it is full.
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
    found = {}
    for name, spec in windows.element_spec.items():
        if isinstance(spec, tf.RaggedTensorSpec):
            values = tf.zeros((0, *spec.shape[2:]), spec.dtype)
            found[name] = tf.RaggedTensor.from_row_lengths(values, tf.zeros(0, tf.int64))
        else:
            found[name] = tf.zeros((0, *spec.shape[1:]), spec.dtype)
    return tuple(tf.nest.flatten(found, expand_composites=True))

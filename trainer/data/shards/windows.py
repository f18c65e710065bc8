"""Windows: the rows of consecutive blocks, as one element of a dataset.

An element maps each feature to its rows. Every operation handles all rows of a window at once,
because an operation per row would cost more than all parsing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import tensorflow as tf

from flotilla.trainer.data.blocks import parse_blocks
from flotilla.trainer.features.feature_spec import FeatureSpec

# Number of blocks whose rows are permuted together. A larger window mixes better, and windows of 8
# to 256 blocks take the same time.
MIXED = 128
# Number of blocks that are parsed together when files are read in order.
IN_ORDER = 32
Rows = Mapping[str, Any]


def parse_windows(
    features: Mapping[str, FeatureSpec], blocks: tf.data.Dataset, count: int
) -> tf.data.Dataset:
    """Return windows of `count` blocks, in the order of the blocks."""
    return blocks.batch(count).map(partial(parse_blocks, features))


def permute_windows(
    features: Mapping[str, FeatureSpec], windows: tf.data.Dataset, seed: int | tf.Tensor
) -> tf.data.Dataset:
    """Parse windows of blocks, and shuffle the rows of each window in a different order."""

    def permute(blocks: tf.Tensor, number: tf.Tensor) -> Rows:
        rows = parse_blocks(features, blocks)
        order = tf.range(count_rows(rows))
        order = tf.random.experimental.stateless_shuffle(order, (seed, number))
        return gather_rows(rows, order)

    return tf.data.Dataset.zip((windows, tf.data.Dataset.counter())).map(permute)


def number_windows(windows: tf.data.Dataset) -> tf.data.Dataset:
    """Return pairs of a window and the index of its first row."""

    def number(before: tf.Tensor, rows: Rows) -> tuple[tf.Tensor, tuple[Rows, tf.Tensor]]:
        return before + count_rows(rows), (rows, before)

    return windows.scan(tf.constant(0, tf.int64), number)


def slice_windows(
    windows: tf.data.Dataset, skip: int | tf.Tensor, take: int | tf.Tensor
) -> tf.data.Dataset:
    """Return `take` rows after the first `skip` ones, without reading further."""
    end = skip + take

    def cut(rows: Rows, before: tf.Tensor) -> Rows:
        first, last = (tf.clip_by_value(at - before, 0, count_rows(rows)) for at in (skip, end))
        return {name: values[first:last] for name, values in rows.items()}

    return number_windows(windows).take_while(lambda _, before: before < end).map(cut)


def count_rows(rows: Rows) -> tf.Tensor:
    """Return the number of rows, as int64."""
    values = next(iter(rows.values()))
    if isinstance(values, tf.RaggedTensor):
        return values.nrows(tf.int64)
    return tf.shape(values, tf.int64)[0]


def gather_rows(rows: Rows, order: tf.Tensor) -> Rows:
    """Return rows by their indices."""
    return {name: tf.gather(values, order) for name, values in rows.items()}

"""The rows of variables that changed since the base of a checkpoint: found, written, assigned.

Of each row of the base its server keeps a fingerprint of 64 bits: a difference needs no hook in any
update, and is exact for every optimizer and layer. That a changed row keeps its fingerprint has a
probability of 2^-64 at each save.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow as tf

# In front of the key of a variable, of which a difference holds rows: int64 [n], and their values.
ROWS, VALUES = "changed/rows/", "changed/values/"
# A variable with fewer rows is written whole.
FEWEST_ROWS = 512
_ROW_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Marked:
    """A whole checkpoint that is published, and the fingerprints of its rows by path."""

    uri: str
    created: str
    marks: Mapping[str, tf.Tensor]


def is_large(value: tf.Tensor) -> bool:
    """Say whether a difference may hold rows of a value."""
    return bool(value.shape.rank) and value.shape[0] >= FEWEST_ROWS


def marks(value: tf.Tensor) -> tf.Tensor:
    """Return the fingerprint of each row: int64 [rows]."""
    return tf.bitcast(tf.raw_ops.Fingerprint(data=value, method="farmhash64"), tf.int64)


def changed(now: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
    """Return the rows [n] whose fingerprints differ."""
    return tf.where(tf.not_equal(now, before))[:, 0]


def bytes_of(value: tf.Tensor, rows: tf.Tensor | None = None) -> int:
    """Return the size of a value, or of some rows of it with their numbers."""
    if rows is None:
        return int((value.shape.num_elements() or 0) * value.dtype.size)
    row = math.prod(value.shape[1:]) * value.dtype.size
    return int(rows.shape[0] * (row + _ROW_BYTES))


def assign(variable: tf.Variable, prefix: str, key: str) -> None:
    """Assign the rows that a difference has to a variable that has the values of the base."""
    rows, values = tf.raw_ops.RestoreV2(
        prefix=prefix,
        tensor_names=[f"{ROWS}{key}", f"{VALUES}{key}"],
        shape_and_slices=["", ""],
        dtypes=[tf.int64, variable.dtype],
    )
    # A scatter into the variable would make each later read of it a copy.
    variable.assign(tf.tensor_scatter_nd_update(variable.read_value(), rows[:, None], values))

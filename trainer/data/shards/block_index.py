"""An index of the blocks in a task's shards, so that the blocks can be read in any order.

The index is a file next to the shards. Each row has the number of a shard and the offset of a
block, as little-endian int64.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flotilla.trainer.data.shards.shard_store import AT_ONCE
from flotilla.trainer.data.tfrecords import places

INDEX_FILE = "blocks.index"
SHARD, OFFSET = range(2)
# Number of consecutive blocks to read together. Even slow disks read this amount, about 1 MiB,
# efficiently.
TOGETHER = 8
_READ_AHEAD = 256 << 10


def write_index(paths: Sequence[Path]) -> None:
    """Write the index of verified shards to a file next to the shards."""
    (paths[0].parent / INDEX_FILE).write_bytes(find_blocks(paths))


def find_blocks(paths: Sequence[Path]) -> bytes:
    """Return the block index of the shards at `paths`, as the content of an index file."""
    found = []
    for number, path in enumerate(paths):
        with path.open("rb") as file:
            found.append(np.array([[number, at] for at in places(file)[:-1]], "<i8"))
    return b"".join(each.tobytes() for each in found)


def decode_index(content: bytes | tf.Tensor) -> tf.Tensor:
    """Decode the content of an index file, and return it with shape (blocks, 2)."""
    return tf.reshape(tf.io.decode_raw(content, tf.int64), (-1, 2))


def shuffle_blocks(
    paths: tf.Tensor, index: tf.Tensor, seed: tuple[Any, tf.Tensor]
) -> tf.data.Dataset:
    """Return all blocks in random order. `AT_ONCE` runs of `TOGETHER` blocks are interleaved."""
    shard = index[:, SHARD]
    within = tf.range(tf.size(shard)) - tf.searchsorted(shard, shard)
    begins = tf.boolean_mask(index, within % TOGETHER == 0)
    order = tf.random.experimental.stateless_shuffle(begins, seed)
    names = tf.gather(paths, order[:, SHARD])
    return tf.data.Dataset.from_tensor_slices((names, order[:, OFFSET])).interleave(
        lambda name, offset: read_blocks(name, offset).take(TOGETHER),
        cycle_length=AT_ONCE,
        block_length=1,
    )


def read_blocks(name: tf.Tensor, offset: tf.Tensor) -> tf.data.Dataset:
    """Return the blocks of a file, starting at an offset."""
    variant = tf.raw_ops.TFRecordDatasetV2(
        filenames=[name], compression_type="", buffer_size=_READ_AHEAD, byte_offsets=[offset]
    )
    return tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))

"""TFRecord files as bytes, and an index of their records, so that they can be read in any order.

A record is its length (8 bytes, little-endian), the masked crc32c of the length, the data, and the
masked crc32c of the data (https://www.tensorflow.org/tutorials/load_data/tfrecord, "TFRecords
format details").

The index is a file next to the shards. Each row has the number of a shard and the offset of a
block, as little-endian int64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import google_crc32c
import numpy as np
import tensorflow as tf

from flotilla.trainer.data.shard_feed import AT_ONCE

_HEAD = struct.Struct("<QI")
_FOOT = struct.Struct("<I")
_MASK = 0xA282EAD8
_LARGEST = 1 << 30


class DamagedError(ValueError):
    """A record is corrupted. The message states the number of the record and the reason."""


def frame_record(record: bytes) -> bytes:
    """Return a record in the format of a TFRecord file."""
    head = struct.pack("<Q", len(record))
    return b"".join((head, _FOOT.pack(_mask_crc(head)), record, _FOOT.pack(_mask_crc(record))))


def records(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the verified records of a file. Raises `DamagedError`."""
    number = 0
    while head := file.read(_HEAD.size):
        number += 1
        bad = f"record {number} cannot be read:"
        if len(head) < _HEAD.size:
            raise DamagedError(f"{bad} it is truncated")
        length, crc = _HEAD.unpack(head)
        if _mask_crc(head[:8]) != crc or length > _LARGEST:
            raise DamagedError(f"{bad} its length is corrupted, or the file is not a TFRecord file")
        data, foot = file.read(length), file.read(_FOOT.size)
        if len(data) < length or len(foot) < _FOOT.size:
            raise DamagedError(f"{bad} it is truncated")
        if _mask_crc(data) != _FOOT.unpack(foot)[0]:
            raise DamagedError(f"{bad} its checksum differs")
        yield data


def places(file: Any) -> list[int]:
    """Return the offset of each record, then the end of the last. Checksums are not verified."""
    found = [0]
    while head := file.read(_HEAD.size):
        found.append(found[-1] + _HEAD.size + _HEAD.unpack(head)[0] + _FOOT.size)
        file.seek(found[-1])
    return found


def _mask_crc(data: bytes) -> int:
    crc = google_crc32c.value(data)
    return int(((crc >> 15 | crc << 17) + _MASK) & 0xFFFFFFFF)


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

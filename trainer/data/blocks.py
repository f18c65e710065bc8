"""Blocks, which are the records of a shard, and batches of rows that vary in length.

A block is a `tf.train.Example` that stores many rows column by column. Each feature is one list
with the values of all rows: numbers as int64 or float32, strings and encoded images as bytes.
Tensors, and sequences of numbers, are stored as a single value: the concatenated bytes of all rows.
The number of rows is a separate entry, and so are the lengths of each sequence.

A block is written from Arrow columns and parsed by a few ops, without per-row work. It has only one
row if examples are large. A window maps each feature to the rows of consecutive blocks.

A record of a TFRecord file is its length (8 bytes, little-endian), the masked crc32c of the length,
the data, and the masked crc32c of the data (https://www.tensorflow.org/tutorials/load_data/tfrecord,
"TFRecords format details"). The index of shards is a file next to them, with which blocks can be
read in any order. Each row has the number of a shard and the offset of a block, as little-endian
int64.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import tensorflow as tf
from numpy.typing import NDArray

from flotilla.trainer.data import images
from flotilla.trainer.data.shard_feed import AT_ONCE
from flotilla.trainer.features.dataset_spec import BLOCK_ROWS, DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name

# Number of blocks whose rows are permuted together. More blocks mix the rows better. Reading takes
# the same time with 8 to 256 blocks.
MIXED = 128
# Number of blocks that are parsed together when files are read in order.
IN_ORDER = 32
Rows = Mapping[str, Any]
#: Approximate size of a block in bytes. Larger blocks are not faster to read.
BYTES = 128 << 10
# Maximum size of a block in bytes if all its rows were as large as the largest row.
_LARGEST_BYTES = 64 << 20
_COUNT = "\0rows"
# TensorFlow types of the features that are stored as numbers. All others are stored as strings.
_SCALARS = {"int": tf.int64, "float": tf.float32}
# `decode_raw` does not support these types, so the signed type of the same size is decoded.
_SIGNED = {"uint32": tf.int32, "uint64": tf.int64}


def choose_rows(rows: int, size: int, largest: int) -> int:
    """Return the number of rows per block of a dataset with `rows` rows.

    `size` is the total size of the rows and `largest` is the size of the largest row, in bytes. All
    blocks of a dataset have this number of rows, except the last block of each shard.
    """
    mean, bound = BYTES * rows // max(1, size), _LARGEST_BYTES // max(1, largest)
    return max(1, min(BLOCK_ROWS, mean, bound))


def encode_blocks(
    features: Mapping[str, FeatureSpec], table: pa.RecordBatch, size: int
) -> Iterator[bytes]:
    """Yield blocks of `size` rows of a table. The last block may have fewer rows."""
    # Sort the features, so that equal rows give equal bytes. The entries of a protobuf map have no
    # defined order.
    packed = [(_key(name), _pack(features[name], table[name])) for name in sorted(features)]
    for first in range(0, table.num_rows, size):
        last = min(first + size, table.num_rows)
        entries = [_entry(_COUNT, _INTS, _varint(last - first))]
        for key, column in packed:
            content = column.data[column.starts[first] : column.starts[last]]
            entries.append(_entry(key, column.kind, content))
        yield _frame(_FIRST, b"".join(entries))


def parse_blocks(features: Mapping[str, FeatureSpec], blocks: tf.Tensor) -> dict[str, tf.Tensor]:
    """Parse blocks (strings of shape (n,)) to a tensor of shape (rows, ...) for each feature.

    Images remain encoded and sequences are ragged. `complete` decodes and pads them.
    """
    of_lengths = {length_name(name) for name, each in features.items() if _is_sequence(each)}
    wire = {_key(name): _wire(feature) for name, feature in features.items()}
    wire |= {_key(name): tf.io.RaggedFeature(tf.int64) for name in of_lengths}
    wire[_COUNT] = tf.io.FixedLenFeature((), tf.int64)
    parsed = tf.io.parse_example(blocks, wire)
    rows = tf.reduce_sum(parsed[_COUNT])
    return {
        name: _unpack(
            feature,
            parsed[_key(name)],
            parsed[_key(length_name(name))].values if _is_sequence(feature) else rows,
        )
        for name, feature in features.items()
    }


def complete(
    features: Mapping[str, FeatureSpec], rows: Mapping[str, tf.Tensor]
) -> dict[str, tf.Tensor]:
    """Convert the result of `parse_blocks` to a batch: decode images, and pad sequences."""
    return {name: _complete(features[name], values) for name, values in rows.items()}


def parse_rows(features: Mapping[str, FeatureSpec], records: tf.Tensor) -> dict[str, tf.Tensor]:
    """Parse a batch of one-row records (strings of shape (n,)), as sent by clients.

    A record has the format of a block with one row, but needs no row count and no lengths: the
    lengths of sequences are inferred from their content.
    """
    if not features:
        return {}
    wire = {name: _row_wire(feature) for name, feature in features.items()}
    parsed = tf.io.parse_example(records, wire)
    count = tf.size(records, tf.int64)
    return {
        name: _complete(feature, _unpack_rows(feature, parsed[name], count))
        for name, feature in features.items()
    }


class _Packed(NamedTuple):
    """A serialized column with the tag `kind`. Row `i` begins at byte `starts[i]` of `data`."""

    kind: bytes
    data: memoryview
    starts: NDArray[np.int64]


# Protobuf tags of length-delimited fields with the numbers 1 and 2
# (https://protobuf.dev/programming-guides/encoding).
_FIRST, _SECOND = b"\x0a", b"\x12"
# The first bytes of a `Feature` that contains a list of strings, one bytes value, packed floats or
# packed ints, respectively.
_TEXTS, _BYTES, _FLOATS, _INTS = b"\x0a", b"\x0a\x0a", b"\x12\x0a", b"\x1a\x0a"
_BITS, _MORE = 7, 0x80


def _pack(feature: FeatureSpec, column: pa.Array) -> _Packed:
    if feature.stored == "int":
        return _Packed(_INTS, *_varints(column.to_numpy()))
    if feature.stored == "float":
        return _Packed(_FLOATS, *_fixed(column, np.dtype(np.float32).itemsize))
    if pa.types.is_fixed_size_binary(column.type):
        return _Packed(_BYTES, *_fixed(column, column.type.byte_width))
    if feature.dtype == "string" or feature.stored == "image":
        if not pa.types.is_large_list(column.type):
            return _Packed(_TEXTS, *_frame_all(column))
        data, starts = _frame_all(column.flatten())
        ends = column.offsets.to_numpy()
        return _Packed(_TEXTS, data, starts[ends - ends[0]])
    return _Packed(_BYTES, *_content(column))


def _fixed(column: pa.Array, size: int) -> tuple[memoryview, NDArray[np.int64]]:
    starts = (np.arange(len(column) + 1) + column.offset) * size
    return memoryview(column.buffers()[1]), starts


def _content(column: pa.Array) -> tuple[memoryview, NDArray[np.int64]]:
    _, ends, data = column.buffers()
    starts = np.frombuffer(ends, np.int64)[column.offset : column.offset + len(column) + 1]
    return memoryview(data if data is not None else b""), starts


def _frame_all(texts: pa.Array) -> tuple[memoryview, NDArray[np.int64]]:
    """Encode strings as the values of a list, each preceded by its tag and its length."""
    sizes = pc.dictionary_encode(pc.binary_length(texts))
    heads = pa.array(
        [_FIRST + _varint(size) for size in sizes.dictionary.to_pylist()], pa.large_binary()
    )
    nothing = pa.scalar(b"", pa.large_binary())
    return _content(pc.binary_join_element_wise(heads.take(sizes.indices), texts, nothing))


def _varints(values: NDArray[np.int64]) -> tuple[memoryview, NDArray[np.int64]]:
    left = values.astype(np.int64).view(np.uint64)
    sizes = np.ones(len(left), np.int64)
    for bits in range(_BITS, 64, _BITS):
        more = left >> np.uint64(bits) != 0
        if not more.any():
            break
        sizes += more
    starts = np.concatenate([[0], np.cumsum(sizes)])
    found = np.empty(starts[-1], np.uint8)
    for place in range(int(sizes.max(initial=0))):
        here = sizes > place
        low = (left[here] >> np.uint64(_BITS * place)).astype(np.uint8) & np.uint8(_MORE - 1)
        found[starts[:-1][here] + place] = low | np.where(sizes[here] > place + 1, _MORE, 0)
    return found.data, starts


def _entry(key: str, kind: bytes, content: Any) -> bytes:
    value = _frame(kind[:1], content if len(kind) == 1 else _frame(kind[1:], content))
    return _frame(_FIRST, _frame(_FIRST, key.encode()) + _frame(_SECOND, value))


def _frame(tag: bytes, content: Any) -> bytes:
    return b"".join((tag, _varint(len(content)), content))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= _MORE:
        found.append(value & (_MORE - 1) | _MORE)
        value >>= _BITS
    found.append(value)
    return bytes(found)


def _key(name: str) -> str:
    return f"{_COUNT[0]}{name}" if name.startswith(_COUNT[0]) else name


def _is_sequence(feature: FeatureSpec) -> bool:
    return feature.stored == "sequence"


def _is_one_value(feature: FeatureSpec) -> bool:
    return feature.stored == "raw" or (_is_sequence(feature) and feature.dtype != "string")


def _wire(feature: FeatureSpec) -> Any:
    if _is_one_value(feature):
        return tf.io.FixedLenFeature((), tf.string)
    return tf.io.RaggedFeature(_SCALARS.get(feature.stored, tf.string), row_splits_dtype=tf.int64)


def _unpack(feature: FeatureSpec, column: Any, count: tf.Tensor) -> Any:
    """Return a column's rows. `count` is the row count, or the row lengths of a sequence column."""
    if not _is_one_value(feature):
        values = column.values
        if feature.stored in _SCALARS:
            return tf.cast(values, feature.dtype)
        if feature.stored == "image":
            return values
    else:
        values = _decode(feature, tf.strings.reduce_join(column))
    if not _is_sequence(feature):
        return tf.reshape(values, (count, *feature.shape))
    inner = tf.reshape(values, (-1, *feature.sizes[1:]))
    return tf.RaggedTensor.from_row_lengths(inner, count, validate=False)


def _row_wire(feature: FeatureSpec) -> Any:
    if _is_sequence(feature) and feature.dtype == "string":
        return tf.io.RaggedFeature(tf.string, row_splits_dtype=tf.int64)
    shape = feature.shape if feature.stored == "bytes" else ()
    return tf.io.FixedLenFeature(shape, _SCALARS.get(feature.stored, tf.string))


def _unpack_rows(feature: FeatureSpec, column: Any, count: tf.Tensor) -> Any:
    if feature.stored in _SCALARS:
        return tf.cast(column, feature.dtype)
    if not _is_sequence(feature):
        return _unpack(feature, column, count) if feature.stored == "raw" else column
    values = math.prod(feature.sizes[1:])
    if feature.dtype == "string":
        return _unpack(feature, column, column.row_lengths() // values)
    size = values * tf.as_dtype(feature.dtype).size
    return _unpack(feature, column, tf.strings.length(column) // size)


def _decode(feature: FeatureSpec, data: tf.Tensor) -> tf.Tensor:
    dtype = tf.as_dtype(feature.dtype)
    values = tf.io.decode_raw(data, _SIGNED.get(feature.dtype, dtype))
    return tf.bitcast(values, dtype) if feature.dtype in _SIGNED else values


def _complete(feature: FeatureSpec, values: Any) -> tf.Tensor:
    if feature.stored == "image":
        return images.decode(feature, values)
    if not _is_sequence(feature):
        return values
    first, *inner = feature.shape
    # Pad to a length of at least 1, because layers cannot reduce along an empty axis.
    longest = tf.cast(first or tf.maximum(values.bounding_shape(axis=1), 1), tf.int64)
    padding = "" if feature.dtype == "string" else tf.cast(feature.padding, feature.dtype)
    padded = values.to_tensor(padding, shape=tf.stack([-1, longest, *inner]))
    return tf.ensure_shape(padded, (None, *feature.shape))


def permute_windows(
    features: Mapping[str, FeatureSpec], windows: tf.data.Dataset, seed: int | tf.Tensor
) -> tf.data.Dataset:
    """Parse windows of blocks, and shuffle the rows of each window with a different seed."""

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
    """Skip the first `skip` rows, and return the next `take` rows without reading further."""
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
    """Return the rows at the indices in `order`."""
    return {name: tf.gather(values, order) for name, values in rows.items()}


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


# The parts of a record before and after its data.
HEAD, FOOT = struct.Struct("<QI"), struct.Struct("<I")
_MASK = 0xA282EAD8


def frame_record(record: bytes) -> bytes:
    """Return a record in the format of a TFRecord file."""
    head = struct.pack("<Q", len(record))
    return b"".join((head, FOOT.pack(mask_crc(head)), record, FOOT.pack(mask_crc(record))))


def mask_crc(data: bytes) -> int:
    """Return the masked crc32c of a TFRecord file."""
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
            while head := file.read(HEAD.size):
                found.append((number, file.tell() - HEAD.size))
                file.seek(HEAD.unpack(head)[0] + FOOT.size, os.SEEK_CUR)
    return np.array(found, "<i8").tobytes()


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

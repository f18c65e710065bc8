"""Records: a `tf.train.Example` per example, written one at a time, read in batches.

Reading is the inner loop of training. One op parses a batch, and one `decode_raw` per feature
restores a tensor, five to ten times as fast as example by example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from flotilla.trainer.data.examples import images, lengths
from flotilla.trainer.features.feature_spec import FeatureSpec

# `decode_raw` does not know these types; it reads the signed type of the same size.
_SIGNED = {"uint32": tf.int32, "uint64": tf.int64}


def encode(features: Mapping[str, FeatureSpec], batch: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a record for each example of a batch of arrays by feature name.

    An encoded image is given as bytes from `images.stored_image`, or as pixels.
    """
    # The order of a map is free, and equal content has to give equal bytes: protobuf's order, in
    # which a name comes after the longer names that begin with it.
    names = sorted(features, key=lambda name: name.encode() + b"\xff")
    columns = [_entries(name, features[name], batch[name]) for name in names]
    for values in zip(*columns, strict=True):
        content = b"".join(values)
        yield b"".join((_MAP, _varint(len(content)), content)) if content else b""


def parse(features: Mapping[str, FeatureSpec], records: tf.Tensor) -> dict[str, tf.Tensor]:
    """Return the tensors of `features`, by name, from records: strings of shape (batch,)."""
    if not features:
        return {}
    wire = {name: _wire(feature) for name, feature in features.items()}
    parsed = tf.io.parse_example(records, wire)
    return {name: _restore(feature, parsed[name]) for name, feature in features.items()}


# Protobuf: field 1 of a message, with a length (https://protobuf.dev/programming-guides/encoding).
_MAP = _FIRST = b"\x0a"
_SECOND, _THIRD = b"\x12", b"\x1a"
_BITS, _MORE, _WORD = 7, 0x80, (1 << 64) - 1
_KNOWN = 4096


def _entries(name: str, feature: FeatureSpec, values: Any) -> Iterator[bytes]:
    """Yield one feature of each example as a protobuf map entry.

    Protobuf messages take several times as long, more than the rest of preparation.
    """
    if feature.stored == "float":
        # All have the same length, so that only their last bytes differ.
        numbers = np.asarray(values, _dtype(feature)).astype("<f4").tobytes()
        fixed = _entry(name, _SECOND, _frame(_FIRST, b"0000"))[:-4]
        return (fixed + numbers[at : at + 4] for at in range(0, len(numbers), 4))
    if feature.stored == "int":
        kind = np.asarray(values, _dtype(feature))
        known: dict[int, bytes] = {}
        return (_int_entry(name, int(value), known) for value in kind.tolist())
    return (_entry(name, _FIRST, body) for body in _bodies(feature, values))


def _int_entry(name: str, value: int, known: dict[int, bytes]) -> bytes:
    found = known.get(value)
    if found is None:
        found = _entry(name, _THIRD, _frame(_FIRST, _varint(value & _WORD)))
        if len(known) < _KNOWN:
            known[value] = found
    return found


def _bodies(feature: FeatureSpec, values: Any) -> Iterator[bytes]:
    if feature.stored == "image":
        # PNG is lossless.
        given = (each if isinstance(each, bytes) else images.encode(each) for each in values)
        return (_frame(_FIRST, each) for each in given)
    dtype, is_text = _dtype(feature), feature.dtype == "string"
    varies = feature.stored == "sequence"
    rows = (np.asarray(each, dtype) for each in values) if varies else np.asarray(values, dtype)
    if is_text:
        return (b"".join(_frame(_FIRST, each) for each in np.ravel(row).tolist()) for row in rows)
    return (_frame(_FIRST, row.tobytes()) for row in rows)


def _dtype(feature: FeatureSpec) -> Any:
    return object if feature.dtype == "string" else tf.as_dtype(feature.dtype).as_numpy_dtype


def _entry(name: str, kind: bytes, body: bytes) -> bytes:
    return _frame(_FIRST, _frame(_FIRST, name.encode()) + _frame(_SECOND, _frame(kind, body)))


def _frame(tag: bytes, content: bytes) -> bytes:
    return b"".join((tag, _varint(len(content)), content))


def _varint(value: int) -> bytes:
    found = bytearray()
    while value >= _MORE:
        found.append(value & (_MORE - 1) | _MORE)
        value >>= _BITS
    found.append(value)
    return bytes(found)


def _wire(feature: FeatureSpec) -> Any:
    if feature.stored == "sequence":
        return lengths.wire(feature)
    shape = feature.shape if feature.stored == "bytes" else ()
    kinds = {"int": tf.int64, "float": tf.float32}
    return tf.io.FixedLenFeature(shape, kinds.get(feature.stored, tf.string))


def _restore(feature: FeatureSpec, column: tf.Tensor) -> tf.Tensor:
    if feature.stored == "bytes":
        return column
    if feature.stored == "image":
        return images.decode(feature, column)
    if feature.stored == "sequence":
        return lengths.pad_column(feature, column)
    dtype = tf.as_dtype(feature.dtype)
    if feature.stored != "raw":
        return tf.cast(column, dtype)
    values = tf.io.decode_raw(column, _SIGNED.get(feature.dtype, dtype))
    if feature.dtype in _SIGNED:
        values = tf.bitcast(values, dtype)
    # Keeps the batch size static if it is known.
    size = -1 if column.shape[0] is None else column.shape[0]
    return tf.reshape(values, (size, *feature.shape))

"""TFRecord files of `tf.train.Example`, or of `SequenceExample` with its lists as features."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import tensorflow as tf

from flotilla.trainer.data.blocks import FOOT, HEAD, mask_crc
from flotilla.trainer.data.files.formats.raw_rows import (
    END,
    OnOpen,
    Piece,
    Record,
    RecordReader,
    open_file,
)
from flotilla.trainer.runtime.errors import UserError

_FIRST = 100
_LARGEST = 1 << 30


class ExampleReader(RecordReader):
    """Reads records with Python's protobuf. A single value is read as a list of one."""

    at_once = 2048
    lists = True

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the features of the first records. Later records may have more."""
        found: dict[str, None] = {}
        for example in islice(self.records(path, Piece(0), lambda _file: None), _FIRST):
            if isinstance(example, dict):
                found.update(dict.fromkeys(sorted(example)))
        if not found:
            raise UserError(
                f"data.source: {path} has no tf.train.Example with features in its first {_FIRST} "
                "records"
            )
        return tuple(found)

    def cut(self, _path: Path, _size: int) -> list[tuple[int, int]]:
        """Return the whole file, because a record's position depends on the records before it."""
        return [(0, END)]

    def records(self, path: Path, _piece: Piece, on_open: OnOpen) -> Iterator[Record]:
        """Yield the features of each example."""
        with open_file(path) as file:
            on_open(file)
            yield from map(_example, _records(path, file))

    def array(self, path: Path, name: str, values: list[Any]) -> tuple[pa.Array, bool]:
        """Convert values to lists of numbers or strings, or to single bytes values."""
        of_bytes = any(value and isinstance(value[0], bytes) for value in values)
        if of_bytes and all(value is None or len(value) < len("ab") for value in values):
            return pa.array([value[0] if value else None for value in values], pa.binary()), False
        if of_bytes:
            # Treat lists of several values as strings, because an image is a single value.
            with suppress(pa.ArrowInvalid, pa.ArrowTypeError):
                return pa.array(values, pa.list_(pa.binary())).cast(pa.list_(pa.string())), False
        try:
            return pa.array(values), False
        except (pa.ArrowInvalid, pa.ArrowTypeError):
            raise UserError(
                f"data.source: the feature {name!r} of {path} is bytes in some records and numbers "
                f"in others; set data.drop: [{name}]"
            ) from None


def _records(path: Path, file: IO[bytes]) -> Iterator[bytes]:
    """Yield the verified records of a TFRecord file."""
    number = 0
    while head := file.read(HEAD.size):
        number += 1
        bad = f"data.source: {path}, record {number} cannot be read:"
        if len(head) < HEAD.size:
            raise UserError(f"{bad} it is truncated")
        length, crc = HEAD.unpack(head)
        if mask_crc(head[:8]) != crc or length > _LARGEST:
            raise UserError(f"{bad} its length is corrupted, or the file is not a TFRecord file")
        data, foot = file.read(length), file.read(FOOT.size)
        if len(data) < length or len(foot) < FOOT.size:
            raise UserError(f"{bad} it is truncated")
        if mask_crc(data) != FOOT.unpack(foot)[0]:
            raise UserError(f"{bad} its checksum differs")
        yield data


def _example(data: bytes) -> dict[str, Any] | str:
    # Parse an `Example` as a `SequenceExample`, whose context has the same format.
    try:
        found = tf.train.SequenceExample.FromString(data)
    # Catch any error, because the error class differs between implementations of protobuf.
    except Exception:
        return "it is not a tf.train.Example"
    context = found.context.feature
    values = {name: _values(one) for name, one in context.items() if one.WhichOneof("kind")}
    for name, steps in found.feature_lists.feature_list.items():
        if name in values:
            return f"{name!r} is both a feature and a list of features"
        each = [_values(step) for step in steps.feature]
        flat = all(len(step) == 1 for step in each)
        values[name] = [step[0] for step in each] if flat else each
    return values


def _values(feature: Any) -> list[Any]:
    kind = feature.WhichOneof("kind")
    return list(getattr(feature, kind).value) if kind else []

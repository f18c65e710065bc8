"""TFRecord files of `tf.train.Example`, or of `SequenceExample` with its lists as features."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf

from flotilla.trainer.data.files.formats.decompression import bytes_read, open_file, position
from flotilla.trainer.data.files.formats.raw_rows import (
    END,
    Broken,
    Piece,
    Reader,
    Rows,
    blocks,
    list_keys,
)
from flotilla.trainer.data.tfrecords import DamagedError, records
from flotilla.trainer.runtime.errors import UserError

_AT_ONCE = 2048
_FIRST = 100


class ExampleReader(Reader):
    """Reads records with Python's protobuf; a single value is read as a list of one."""

    varies = True
    at_once = _AT_ONCE
    lists = True

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the features of the first records; later ones may have more."""
        found: dict[str, None] = {}
        for data in islice(_records(path), _FIRST):
            example = _example(data)
            if not isinstance(example, str):
                found.update(dict.fromkeys(sorted(example)))
        if not found:
            raise UserError(
                f"data.source: {path} has no tf.train.Example with features in its first {_FIRST} "
                "records"
            )
        return tuple(found)

    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Return the whole file, because a record's position depends on the records before it."""
        del path, size
        return [(0, END)]

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records, with all features of each block if no columns are named."""
        del piece
        # The open file, and its position after each block.
        files: list[Any] = []
        positions = [0]
        numbered = enumerate(_records(path, files.append))
        for block in blocks(numbered, self.at_once, lambda: bytes_read(files[0])):
            examples, numbers = [], []
            for number, data in block:
                example = _example(data)
                if isinstance(example, str):
                    broken(number, example)
                else:
                    examples.append(example)
                    numbers.append(number)
            names = columns or list_keys(path, examples)
            arrays = {
                name: _array(path, name, [each.get(name) for each in examples]) for name in names
            }
            table = pa.table(arrays) if arrays else pa.table({"": pa.nulls(len(examples))})
            positions.append(position(files[0]) or path.stat().st_size)
            size = positions[-1] - positions[-2]
            yield Rows(table, np.array(numbers, np.int64), size=size)


def _example(data: bytes) -> dict[str, Any] | str:
    # Parse an `Example` as a `SequenceExample`, whose context has the same format.
    try:
        found = tf.train.SequenceExample.FromString(data)
    # The class of protobuf's error differs between its implementations.
    except Exception:
        return "it is not a tf.train.Example"
    context = found.context.feature
    values = {name: _values(one) for name, one in context.items() if one.WhichOneof("kind")}
    for name, steps in found.feature_lists.feature_list.items():
        if name in values:
            return f"{name!r} is both a feature and a list of features"
        each = [_values(step) for step in steps.feature]
        # If every step has one value, the steps become a flat list.
        flat = all(len(step) == 1 for step in each)
        values[name] = [step[0] for step in each] if flat else each
    return values


def _values(feature: Any) -> list[Any]:
    kind = feature.WhichOneof("kind")
    return list(getattr(feature, kind).value) if kind else []


def _array(path: Path, name: str, values: list[list[Any] | None]) -> pa.Array:
    """Convert the values of a feature to lists of numbers or texts, or to single bytes values."""
    of_bytes = any(value and isinstance(value[0], bytes) for value in values)
    if of_bytes and all(value is None or len(value) < len("ab") for value in values):
        return pa.array([value[0] if value else None for value in values], pa.binary())
    if of_bytes:
        # Treat lists of several values as texts, because an image is a single value.
        with suppress(pa.ArrowInvalid, pa.ArrowTypeError):
            return pa.array(values, pa.list_(pa.binary())).cast(pa.list_(pa.string()))
    try:
        return pa.array(values)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        raise UserError(
            f"data.source: the feature {name!r} of {path} is bytes in some records and numbers in "
            f"others; set data.drop: [{name}]"
        ) from None


def _records(path: Path, on_open: Callable[[Any], None] = lambda _file: None) -> Iterator[bytes]:
    with open_file(path) as file:
        on_open(file)
        try:
            yield from records(file)
        except DamagedError as error:
            raise UserError(f"data.source: {path}, {error}") from None

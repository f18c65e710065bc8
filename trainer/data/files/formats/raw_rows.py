"""Rows of a file, before types are known: the common result of all readers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flotilla.trainer.data.files.formats.decompression import bytes_read, position
from flotilla.trainer.runtime.errors import UserError

#: Called with the number of a broken record, and the reason.
Broken = Callable[[int, str], None]
END = -1
#: Maximum number of columns. Reading a table with this many takes a minute.
MOST_COLUMNS = 10_000
# With more than `_SOME` columns, at least the share `_FILLED` of the cells must have values.
_SOME, _FILLED = 1000, 0.02
#: Maximum size of the decompressed data of a file in memory, in bytes.
BLOCK_BYTES = 64 << 20
#: The values of a record by name, or the reason why it is broken, or None for an empty line.
Record = dict[str, Any] | str | None
OnOpen = Callable[[IO[bytes]], None]


@dataclass(frozen=True, order=True)
class Piece:
    """A range of a file: bytes of text, row groups of Parquet, or rows of npz.

    `END` is the end of the file. For a folder of images, a piece is a range of files, and `file` is
    the first one.
    """

    file: int
    start: int = 0
    stop: int = END


@dataclass(frozen=True)
class Rows:
    """Records of a piece, and their numbers within the piece.

    Columns in `mixed` had values of several types, which were converted to strings. `size` is the
    number of bytes that the records take in the file, or 0 if unknown.
    """

    table: pa.Table
    numbers: NDArray[np.int64]
    mixed: frozenset[str] = frozenset()
    size: int = 0


def require_few(count: int, where: str) -> None:
    """Raise `UserError` if there are more columns than allowed."""
    if count > MOST_COLUMNS:
        raise UserError(
            f"data.source: {where} has {count} columns, but at most {MOST_COLUMNS} can be read; "
            "keep the ones that matter, or write numbers that belong together as a list"
        )


class Reader(ABC):
    """A reader of one file format. It keeps no file open.

    Attributes:
        parsed: whether all values are strings, from which numbers must be parsed.
        varies: whether records may have different columns.
        lists: whether a single value is stored as a list of one.
        at_once: approximate number of records per block, or 0 if blocks are limited only by bytes.
    """

    parsed = False
    varies = False
    lists = False
    at_once = 0

    @abstractmethod
    def names(self, path: Path) -> tuple[str, ...]:
        """Return the columns of a file."""

    def notes(self, _path: Path) -> tuple[str, ...]:
        """Return remarks on how a file is read, without the file name."""
        return ()

    def index(self, _path: Path) -> tuple[str, ...]:
        """Return the columns that a file declares as an index."""
        return ()

    @abstractmethod
    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Return consecutive ranges of about `size` bytes that can be read independently."""

    @abstractmethod
    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records of a piece. Raises `UserError`."""

    def row(self, _path: Path, piece: Piece, number: int) -> int:
        """Return the row number of a record, counted from 1 as in an editor."""
        return piece.start + number + 1


class RecordReader(Reader):
    """Reads a format whose records are parsed one by one. A block has up to `at_once` records."""

    varies = True

    @abstractmethod
    def records(self, path: Path, piece: Piece, on_open: OnOpen) -> Iterator[Record]:
        """Yield the records of a piece. `on_open` is called with the open file."""

    @abstractmethod
    def array(self, path: Path, name: str, values: list[Any]) -> tuple[pa.Array, bool]:
        """Convert values to an array. Return whether values of several types became strings."""

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records, with all keys of each block if no columns are named."""
        files: list[Any] = []
        numbered = enumerate(self.records(path, piece, files.append))
        before, end = piece.start, path.stat().st_size if piece.stop == END else piece.stop
        for block in _blocks(numbered, self.at_once, lambda: bytes_read(files[0])):
            found, numbers = [], []
            for number, record in block:
                if isinstance(record, dict):
                    found.append(record)
                    numbers.append(number)
                elif record is not None:
                    broken(number, record)
            arrays, mixed = {}, set()
            for name in columns or _list_keys(path, found):
                arrays[name], is_mixed = self.array(path, name, [each.get(name) for each in found])
                mixed |= {name} if is_mixed else set()
            table = pa.table(arrays) if arrays else pa.table({"": pa.nulls(len(found))})
            here = position(files[0]) or end
            yield Rows(table, np.array(numbers, np.int64), frozenset(mixed), size=here - before)
            before = here


def _blocks(
    records: Iterator[tuple[int, Record]], most: int, read: Callable[[], int]
) -> Iterator[list[tuple[int, Record]]]:
    """Yield lists of at most `most` records and about `BLOCK_BYTES`, as counted by `read`."""
    block: list[tuple[int, Record]] = []
    start = 0
    for record in records:
        block.append(record)
        if len(block) == most or read() - start > BLOCK_BYTES:
            yield block
            block, start = [], read()
    if block:
        yield block


def _list_keys(path: Path, records: Sequence[Mapping[str, Any]]) -> list[str]:
    names = list(dict.fromkeys(name for record in records for name in record))
    require_few(len(names), str(path))
    if len(names) > _SOME and sum(map(len, records)) < _FILLED * len(names) * len(records):
        raise UserError(
            f"data.source: records of {path} have different keys: {len(records)} records have "
            f"{len(names)} keys in total, such as {names[-1]!r}; write records with the same keys, "
            "or put the varying part into a list of values"
        )
    return names

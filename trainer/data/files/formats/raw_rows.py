"""Rows of a file, before types are known: the common result of all readers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flotilla.trainer.runtime.errors import UserError

#: Called with the number of a broken record, and the reason.
Broken = Callable[[int, str], None]
END = -1
#: Maximum number of columns. Reading this many takes a minute.
MOST_COLUMNS = 10_000
# With more than `_SOME` columns, at least the share `_FILLED` of a block's cells must be filled.
_SOME, _FILLED = 1000, 0.02
#: Maximum size of the decompressed data of a file in memory, in bytes.
BLOCK_BYTES = 64 << 20
_Record = TypeVar("_Record")


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
    """Records of a piece.

    Attributes:
        table: the columns that were read.
        numbers: numbers of the records within the piece.
        mixed: columns with values of several types, which were converted to texts.
        size: number of bytes that the records take in the file; 0 if unknown.
    """

    table: pa.Table
    numbers: NDArray[np.int64]
    mixed: frozenset[str] = frozenset()
    size: int = 0


def list_keys(path: Path, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of all records; raises `UserError` if they are too many or too different."""
    names = list(dict.fromkeys(name for record in records for name in record))
    require_few(len(names), str(path))
    if len(names) > _SOME and sum(map(len, records)) < _FILLED * len(names) * len(records):
        raise UserError(
            f"data.source: records of {path} have different keys: {len(records)} have {len(names)} "
            f"keys, such as {names[-1]!r}; write records with the same keys, or put the varying "
            "part into a list of values"
        )
    return names


def require_few(count: int, where: str) -> None:
    """Raise `UserError` if there are more columns than allowed."""
    if count > MOST_COLUMNS:
        raise UserError(
            f"data.source: {where} has {count} columns, but at most {MOST_COLUMNS} can be read; "
            "keep the ones that matter, or write numbers that belong together as a list"
        )


def blocks(records: Iterator[_Record], most: int, read: Callable[[], int]) -> Iterator[list[Any]]:
    """Yield lists of at most `most` records and about `BLOCK_BYTES`, as counted by `read`."""
    block: list[_Record] = []
    start = 0
    for record in records:
        block.append(record)
        if len(block) == most or read() - start > BLOCK_BYTES:
            yield block
            block, start = [], read()
    if block:
        yield block


class Reader(ABC):
    """Reads one format. A reader holds no open file.

    Attributes:
        parsed: whether a file has only texts, in which numbers have to be parsed.
        varies: whether records may have different columns.
        lists: whether a single value is stored as a list of one.
        at_once: approximate number of records per block; 0 if blocks are limited only by bytes.
    """

    parsed = False
    varies = False
    lists = False
    at_once = 0

    @abstractmethod
    def names(self, path: Path) -> tuple[str, ...]:
        """Return the columns of a file."""

    def notes(self, path: Path) -> tuple[str, ...]:
        """Return remarks on how a file is read, without the file name."""
        del path
        return ()

    def index(self, path: Path) -> tuple[str, ...]:
        """Return the columns that a file declares as an index."""
        del path
        return ()

    @abstractmethod
    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Return ranges of about `size` bytes, in order, which can be read independently."""

    @abstractmethod
    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records of a piece; raises `UserError`."""

    def row(self, path: Path, piece: Piece, number: int) -> int:
        """Return the row number of a record, counted from 1 as in an editor."""
        del path
        return piece.start + number + 1

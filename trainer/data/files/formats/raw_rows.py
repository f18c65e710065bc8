"""Rows as they are in files, before they have types: what each format is read into."""

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

#: Called with the number of a record and what is wrong with it.
Broken = Callable[[int, str], None]
END = -1
#: Each is an input of the model. As many take a minute to read, and no model has more.
MOST_COLUMNS = 10_000
# Of a block with more columns than it, records fill this share at least.
_SOME, _FILLED = 1000, 0.02
#: Of a file, decompressed, that are held at once.
BLOCK_BYTES = 64 << 20
_Record = TypeVar("_Record")


@dataclass(frozen=True, order=True)
class Piece:
    """A range of a file: bytes of texts, row groups of parquet; all of it up to `END`.

    Of a folder of images it is a range of its files, and `file` is the first one.
    """

    file: int
    start: int = 0
    stop: int = END


@dataclass(frozen=True)
class Rows:
    """Some records of a piece.

    Attributes:
        table: a column for each column of the file.
        numbers: of the records within the piece.
        mixed: columns whose values are of several types, and texts here.
        size: how many bytes of the file they take, 0 where that is not known.
    """

    table: pa.Table
    numbers: NDArray[np.int64]
    mixed: frozenset[str] = frozenset()
    size: int = 0


def list_keys(path: Path, records: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys of some records.

    Raises:
        UserError: they have too many, or each has others: a table of them would be their square.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    require_few(len(names), str(path))
    if len(names) > _SOME and sum(map(len, records)) < _FILLED * len(names) * len(records):
        raise UserError(
            f"data.source: records of {path} have different keys: {len(records)} have "
            f"{len(names)} keys, such as {names[-1]!r}; write records with the same keys, or "
            "what varies as a list of values"
        )
    return names


def require_few(count: int, where: str) -> None:
    """Raise `UserError` where there are more columns than are read."""
    if count > MOST_COLUMNS:
        raise UserError(
            f"data.source: {where} has {count} columns, and {MOST_COLUMNS} are read at most; "
            "keep those that matter, or write numbers that belong together as a list"
        )


def blocks(records: Iterator[_Record], most: int, read: Callable[[], int]) -> Iterator[list[Any]]:
    """Yield records in lists of at most so many, and of about `BLOCK_BYTES` of what was `read`."""
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
    """Reads one format. It holds no open file.

    Attributes:
        parsed: whether there is nothing but texts in a file, so that numbers have to be inferred.
        varies: whether each record has names of its own.
        lists: whether a single value is a list as well.
        at_once: about how many records are held at once; 0: by their bytes.
    """

    parsed = False
    varies = False
    lists = False
    at_once = 0

    @abstractmethod
    def names(self, path: Path) -> tuple[str, ...]:
        """Return the columns of a file."""

    def notes(self, path: Path) -> tuple[str, ...]:
        """Return what is noteworthy of how a file is read, each without the name of the file."""
        del path
        return ()

    def index(self, path: Path) -> tuple[str, ...]:
        """Return the columns which a file says are an index, and not data."""
        del path
        return ()

    @abstractmethod
    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Return ranges of about `size` bytes that can be read alone, in order."""

    @abstractmethod
    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records of a piece.

        Raises:
            UserError: the file cannot be read.
        """

    @abstractmethod
    def row(self, path: Path, piece: Piece, number: int) -> int:
        """Return the row of a record as an editor shows it, from 1."""

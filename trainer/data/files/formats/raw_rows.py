"""Rows as they are in files, before they have types: what each format is read into."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

#: Called with the number of a record and what is wrong with it.
Broken = Callable[[int, str], None]
END = -1


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

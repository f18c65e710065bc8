"""The first pass over files: rows, types and classes over all rows, broken rows, times.

What it found is remembered with the parts of a preparation, which goes on without a second scan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa

from trainer.data.files.broken_rows import BrokenRows
from trainer.data.files.column_roles import ColumnRoles
from trainer.data.files.column_scan import MOST_CLASSES, ColumnScan, kind_of
from trainer.data.files.conversion import seconds_of
from trainer.data.files.formats.columnar import ParquetReader
from trainer.data.files.formats.raw_rows import Piece, Reader
from trainer.errors import UserError

# Beyond it the times by which splits are drawn are thinned out.
_MOST_TIMES = 1 << 21


@dataclass
class Scan:
    """Sums over pieces; those of a later piece are merged into those before."""

    names: tuple[str, ...] = ()
    columns: dict[str, ColumnScan] = field(default_factory=dict)
    broken: BrokenRows = field(default_factory=BrokenRows)
    times: dict[float, int] = field(default_factory=dict)

    def merge(self, other: Scan) -> None:
        """Add the sums of a later piece."""
        for name, column in other.columns.items():
            if name in self.columns:
                self.columns[name].merge(column)
            else:
                self.columns[name] = column
        self.broken.merge(other.broken)
        for time, count in other.times.items():
            self.times[time] = self.times.get(time, 0) + count
        if len(self.times) > _MOST_TIMES:
            self.times = _thinned(self.times)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a scan looks for: columns that are read, by role, and those that are classes."""

    roles: ColumnRoles
    gathered: frozenset[str]
    file_name: Callable[[Piece], str]


def scan_piece(reader: Reader, path: Path, piece: Piece, wanted: Wanted) -> Scan:
    """Return the sums of one piece.

    Raises:
        UserError: the file cannot be read, or has other columns.
    """
    roles = wanted.roles
    found = Scan(columns={name: _column(name, wanted) for name in roles.kept})
    _check_columns(reader, path, piece, wanted)
    names: Sequence[str] = roles.kept
    if isinstance(reader, ParquetReader):
        names = _by_metadata(reader, path, piece, wanted, found)

    def broken(number: int, why: str) -> None:
        found.broken.add(piece, number, why)
        found.broken.rows += 1

    for rows in reader.rows(path, piece, names, broken) if names else ():
        for name in names:
            array = pa.chunked_array(rows.table[name]).combine_chunks()
            if kind_of(array.type) == "":
                raise UserError(
                    f"data.source: the column {name!r} of {path} is {array.type}, which cannot be "
                    "read; set data.drop, or data.inputs without it"
                )
            found.columns[name].add(array, piece, rows.numbers, parsed=reader.parsed)
            if name == roles.time:
                _add_times(found.times, array)
        if not isinstance(reader, ParquetReader):
            found.broken.rows += len(rows.numbers)
    return found


def _column(name: str, wanted: Wanted) -> ColumnScan:
    if name in wanted.gathered:
        return ColumnScan(most=MOST_CLASSES, gathers=True)
    return ColumnScan()


def _check_columns(reader: Reader, path: Path, piece: Piece, wanted: Wanted) -> None:
    if piece.start or reader.varies:
        return
    names = reader.names(path)
    if missing := [name for name in wanted.roles.kept if name not in names]:
        raise UserError(
            f"data.source: {path} has no column {missing[0]!r}, which others have; add it, or set "
            f"data.drop: [{missing[0]}]"
        )


def _by_metadata(
    reader: ParquetReader, path: Path, piece: Piece, wanted: Wanted, found: Scan
) -> list[str]:
    """Take what the metadata of parquet says; return the columns that have to be read besides."""
    read = []
    for name, kind in reader.schema(path).items():
        if name not in found.columns:
            continue
        column, nulls = found.columns[name], reader.nulls(path, piece, name)
        rows = reader.count(path, piece)
        by_value = name in wanted.gathered or name in (wanted.roles.time, wanted.roles.split)
        if by_value or nulls is None or kind_of(kind) in ("tensor", "image", ""):
            read.append(name)
        else:
            column.rows, column.empty = rows, nulls
            column.kinds = {kind_of(kind): rows - nulls} if rows > nulls else {}
            column.many = True
    found.broken.rows += reader.count(path, piece)
    return read


def _add_times(times: dict[float, int], array: pa.Array) -> None:

    values = seconds_of(array)
    for value, count in zip(*np.unique(values[~np.isnan(values)], return_counts=True), strict=True):
        times[float(value)] = times.get(float(value), 0) + int(count)


def _thinned(times: dict[float, int]) -> dict[float, int]:
    order = sorted(times)
    return {
        first: sum(times[each] for each in order[place : place + 2])
        for place, first in enumerate(order)
        if place % 2 == 0
    }

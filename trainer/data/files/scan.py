"""The first pass over files: types, classes, broken rows and timestamps of all rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.files.column_scan import (
    MOST_CLASSES,
    ColumnScan,
    get_kind,
    is_list,
    is_list_of_texts,
)
from flotilla.trainer.data.files.conversion import read_times
from flotilla.trainer.data.files.file_pieces import FilePieces
from flotilla.trainer.data.files.formats.raw_rows import Piece, Rows, require_few
from flotilla.trainer.data.files.pictures import Pictures
from flotilla.trainer.data.images import UndecodableError
from flotilla.trainer.data.roles import LABELS
from flotilla.trainer.events.progress import Work
from flotilla.trainer.runtime.errors import UserError

# Maximum number of distinct timestamps for splits. With more, neighbors are merged.
_MOST_TIMES = 1 << 21
_NAMED = 3
_MOST_UNLABELLED = 0.5
# Types in the same family have a common wider type.
_FAMILIES = {
    "int": "number", "float": "number", "bool": "bool", "time": "time", "text": "text",
    "image": "text", "tensor": "list",
}  # fmt: skip
# Family of a column of strings, by the kind of its values. The family is known only if the column
# has at least `_SURE` values, all of one kind.
_WRITTEN = {"int": "numbers", "float": "numbers", "text": "texts", "time": "times"}
_SURE = 20
# If a larger share of rows is broken, do not suggest skipping them.
_MOST_SKIPPED = 0.2


@dataclass
class BrokenRows:
    """Number of broken rows, and the first ones: piece, record number in the piece, and reason.

    Rows without a label are counted separately, as `unlabelled`.
    """

    count: int = 0
    rows: int = 0
    places: list[tuple[Piece, int, str]] = field(default_factory=list)
    unlabelled: int = 0
    first_unlabelled: list[tuple[Piece, int, str]] = field(default_factory=list)
    unlabelled_mark: str = ""

    def add(self, piece: Piece, number: int, why: str) -> None:
        """Count a broken row."""
        self.count += 1
        if len(self.places) < _NAMED:
            self.places.append((piece, number, why))

    def add_unlabelled(self, piece: Piece, number: int, name: str, mark: str) -> None:
        """Count a row whose label is missing, or is the word `mark` for a missing value."""
        self.unlabelled += 1
        if len(self.first_unlabelled) < _NAMED:
            self.first_unlabelled.append((piece, number, name))
        self.unlabelled_mark = self.unlabelled_mark or mark

    def merge(self, other: BrokenRows) -> None:
        """Add the counts of a later piece."""
        self.count += other.count
        self.rows += other.rows
        self.places = (self.places + other.places)[:_NAMED]
        self.unlabelled += other.unlabelled
        self.first_unlabelled = (self.first_unlabelled + other.first_unlabelled)[:_NAMED]
        self.unlabelled_mark = self.unlabelled_mark or other.unlabelled_mark

    def says_unlabelled(self, place: Callable[[Piece, int], str]) -> str:
        """Describe how many rows have no label, and where."""
        where = ", ".join(place(piece, number) for piece, number, _ in self.first_unlabelled)
        name = self.first_unlabelled[0][2]
        return f"data.label: {self.unlabelled} of {self.rows} rows have no {name!r} ({where})"

    def check_labels(self, place: Callable[[Piece, int], str]) -> None:
        """Raise `UserError` if most rows have no label, because the column is probably wrong."""
        if self.unlabelled > _MOST_UNLABELLED * self.rows:
            raise UserError(
                f"{self.says_unlabelled(place)}, too many to leave out; name another column, or "
                "remove these rows from the files"
            )

    def first(self, place: Callable[[Piece, int], str]) -> list[str]:
        """Return strings with the position of each of the first broken rows, and the reason."""
        return [f"{place(piece, number)}: {why}" for piece, number, why in self.places]

    def check(self, name: str, allowed: float, place: Callable[[Piece, int], str]) -> None:
        """Raise `UserError` if the share of broken rows is larger than `allowed`."""
        if not self.count or self.count <= allowed * self.rows:
            return
        where = "; ".join(self.first(place))
        most = f"more than data.bad_rows ({allowed:g}) allows"
        limit = most if allowed else "but none may be skipped"
        share = min(0.99, max(0.001, 1.1 * self.count / self.rows))
        few = self.count <= _MOST_SKIPPED * self.rows
        more = f", or set data.bad_rows to {share:.2g}" if few else ""
        raise UserError(
            f"{name}: {self.count} of {self.rows} rows are broken, {limit}: {where}; fix them{more}"
        )

    def to_json(self, place: Callable[[Piece, int], str]) -> dict[str, Any]:
        """Return the counts and the first broken rows for a manifest."""
        return {"count": self.count, "of": self.rows, "first": self.first(place)}


@dataclass
class Scan:
    """Statistics of files. The statistics of later pieces can be merged into them.

    `index` has the columns that are an index and not data. `notes` maps each note on the layout of
    files to the indices of these files. For each column and family of types, `families` has the
    position and type of the first value. `times` counts the timestamps that determine splits.
    """

    names: tuple[str, ...] = ()
    columns: dict[str, ColumnScan] = field(default_factory=dict)
    broken: BrokenRows = field(default_factory=BrokenRows)
    index: tuple[str, ...] = ()
    notes: dict[str, list[int]] = field(default_factory=dict)
    families: dict[str, dict[str, tuple[Piece, int, str]]] = field(default_factory=dict)
    times: Counter[int | float] = field(default_factory=Counter)

    def merge(self, other: Scan) -> None:
        """Add the statistics of a later piece."""
        for name, column in other.columns.items():
            if name in self.columns:
                self.columns[name].merge(column)
            else:
                self.columns[name] = column
        require_few(len(self.columns), "all files together")
        self.broken.merge(other.broken)
        for text, files in other.notes.items():
            self.notes.setdefault(text, []).extend(files)
        for name, found in other.families.items():
            for family, place in found.items():
                self.families.setdefault(name, {}).setdefault(family, place)
        self.times.update(other.times)
        if len(self.times) > _MOST_TIMES:
            self.times = _thin(self.times)

    def close(self) -> None:
        """In each column, count the rows that lack it as empty. Call this after the last piece."""
        for column in self.columns.values():
            column.lack(self.broken.rows - self.broken.count)
        self.names = tuple(dict.fromkeys([*self.names, *self.columns]))


@dataclass(frozen=True, kw_only=True)
class PieceScan:
    """Scans one piece.

    Attributes:
        said: types of columns that are not inferred.
        pictures: finds the images of the piece's rows. `work` counts the rows.
        names: all columns of the first file.
        wanted: columns to read, or empty for all of them.
    """

    config: DataConfig
    said: Mapping[str, str]
    files: FilePieces
    path: Path
    piece: Piece
    pictures: Pictures
    work: Work
    names: tuple[str, ...]
    wanted: tuple[str, ...]
    found: Scan = field(default_factory=Scan)

    @cached_property
    def _gathered(self) -> set[str]:
        """The columns whose values may be classes."""
        labels = self.config.label or (each for each in self.names if each.lower() in LABELS)
        return {*labels, *(each for each, kind in self.said.items() if kind == "class")}

    def run(self) -> Scan:
        """Scan the piece, and return its statistics. Raises `UserError`."""
        found = self.found
        for name in self.wanted:
            self._column(name)
        reader = self.files.reader
        if not self.piece.start and not self.files.is_listing:
            found.notes = {text: [self.piece.file] for text in reader.notes(self.path)}
        if not (self.piece.start or reader.varies):
            self._check_columns()
        for rows in self.files.rows(self.path, self.piece, self.wanted, self._broken):
            for name in rows.table.column_names:
                if name:
                    self._add(name, rows)
            found.broken.rows += len(rows.numbers)
            self.work.add(len(rows.numbers), rows.size)
        if reader.parsed:
            for name, column in found.columns.items():
                families = {_WRITTEN.get(kind, "") for kind in column.kinds}
                if len(families) == 1 and column.kinds.total() >= _SURE and (one := families.pop()):
                    found.families[name] = {one: (self.piece, 0, one)}
        return found

    def _add(self, name: str, rows: Rows) -> None:
        array = pa.chunked_array(rows.table[name]).combine_chunks()
        is_label = name in self._gathered
        if not get_kind(array.type) or (is_label and is_list_of_texts(array.type)):
            remedy = f"set data.drop: [{name}]"
            if is_label and is_list(array.type):
                remedy = "write one column of 0 and 1 for each class, and name them in data.label"
            raise UserError(
                f"data.source: the column {name!r} of {self.path} is {array.type}, which cannot be "
                f"read; {remedy}"
            )
        column = self._column(name)
        may_be_images = self.said.get(name) == "image" or pa.types.is_binary(array.type)
        if may_be_images and self._add_images(name, column, array):
            return
        parsed = self.files.reader.parsed or name in rows.mixed
        column.add(array, self.piece, rows.numbers, parsed=parsed)
        kind = get_kind(array.type)
        family = _FAMILIES.get(kind, kind)
        if not parsed and array.null_count < len(array):
            first = int(rows.numbers[int(np.argmax(array.is_valid()))])
            place = (self.piece, first, str(array.type))
            self.found.families.setdefault(name, {}).setdefault(family, place)
        if name == self.config.splits.time:
            self.found.times.update(read_times(array, self.said.get(name, "")))

    def _add_images(self, name: str, column: ColumnScan, array: pa.Array) -> bool:
        if self.said.get(name) != "image":
            with suppress(pa.ArrowInvalid):
                array.cast(pa.string())
                return False
        values = array.to_pylist()
        known = self.said.get(name) == "image" or self._sizes(values[:_SURE])
        if known and self.config.image.size:
            column.add_images([self.pictures.size] * len(array), 0)
            return True
        sizes = self._sizes(values)
        column.add_images(sizes, len(array) - len(sizes))
        return True

    def _sizes(self, values: Sequence[Any]) -> list[tuple[int, int, int]]:
        found = []
        for value in values:
            with suppress(UndecodableError):
                found.append(self.pictures.measure(value))
        return found

    def _column(self, name: str) -> ColumnScan:
        columns = self.found.columns
        if name not in columns:
            gathers = name in self._gathered
            columns[name] = ColumnScan(most=MOST_CLASSES, gathers=True) if gathers else ColumnScan()
            require_few(len(columns), str(self.path))
        return columns[name]

    def _broken(self, number: int, why: str) -> None:
        self.found.broken.add(self.piece, number, why)
        self.found.broken.rows += 1

    def _check_columns(self) -> None:
        names = self.files.require_columns(self.piece.file, self.path, self.wanted)
        more = [name for name in names if name not in self.names]
        if more and not self.config.inputs:
            raise UserError(
                f"data.source: {self.path} has a column {more[0]!r}, which other files lack; "
                "remove it, choose the columns to read in data.inputs, or name only the files of "
                "one table in data.source (one file or a pattern)"
            )


def _thin(times: Counter[int | float]) -> Counter[int | float]:
    order = sorted(times)
    pairs = (order[place : place + 2] for place in range(0, len(order), 2))
    return Counter({pair[0]: sum(times[each] for each in pair) for pair in pairs})

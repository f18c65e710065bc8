"""Prepares a dataset from the first rows of a source, to try a run on it.

An error in these rows is raised if further rows cannot correct it. Otherwise it becomes a note. If
the sample is the whole source, every error is raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig, RunnerConfig
from flotilla.trainer.data import listing, prepare
from flotilla.trainer.data.builders import datasets
from flotilla.trainer.data.builders.datasets import BuilderSource
from flotilla.trainer.data.columns import Columns
from flotilla.trainer.data.files.file_source import FileSource
from flotilla.trainer.data.files.formats.raw_rows import Broken, Piece, Reader, Rows
from flotilla.trainer.data.files.scan import Scan
from flotilla.trainer.data.listing import Listing
from flotilla.trainer.data.mapped import MappedSource, source_config
from flotilla.trainer.data.roles import ColumnRoles
from flotilla.trainer.data.source import Part, Source
from flotilla.trainer.data.splits import TEST, TRAIN, VALIDATION
from flotilla.trainer.features.dataset_spec import SPLITS
from flotilla.trainer.preflight.head import few_files, rename_files
from flotilla.trainer.runtime.errors import ConfigError, UserError

ROWS = 1000
# Maximum number of rows if a column has image paths. Reading an image takes milliseconds.
_PICTURES = 64
# In an incomplete sample, one in this many rows is put into each of the test and validation splits.
_TENTH = 10


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A small dataset of the first rows of a source.

    Attributes:
        uri: URI of the dataset, or empty if there is none.
        is_whole: whether it has all rows of the source, and therefore all classes.
        by_builder: whether the dataset builder's metadata makes a sample unnecessary.
        notes: possible errors in the first rows, and what could not be examined.
    """

    uri: str = ""
    is_whole: bool = False
    by_builder: bool = False
    notes: tuple[str, ...] = ()


class _DoubtfulError(UserError):
    """The first rows do not make a valid dataset, but the whole source might."""


def publish_sample(config: DataConfig, scratch: Path) -> Sample:
    """Publish a dataset of the first rows of a source below `scratch`.

    Raises `ConfigError` if the configuration does not fit the source, or rows are invalid.
    """
    if not (config.source or config.map):
        return Sample(by_builder=True)
    with prepare.mistakes_of_data():
        return _sample_files(config, scratch) if config.source else _sample_builder(config, scratch)


def _sample_builder(config: DataConfig, scratch: Path) -> Sample:
    source = _FirstExamples(source_config(config), scratch / "tfds")
    if not source.is_here:
        return Sample(
            notes=(f"data.map is checked only after {config.dataset} has been downloaded",)
        )
    return _publish(config, MappedSource(source, config), scratch, lambda: False)


def _sample_files(config: DataConfig, scratch: Path) -> Sample:
    found = listing.list_source(config)
    taken = found if config.version else listing.select_spans(found, config.spans, {})
    few = few_files(config, taken, scratch)
    if not few.listing.files:
        return Sample(notes=few.notes)
    given = source_config(config) if config.map else config
    source = _FirstRows(given, few.listing, scratch, is_part=few.is_part)
    try:
        mapped = MappedSource(source, config) if config.map else source
        made = _publish(config, mapped, scratch, lambda: source.is_whole)
        return replace(made, notes=few.notes)
    except _DoubtfulError as doubt:
        return Sample(notes=(*few.notes, f"in the first rows: {doubt}"))
    except UserError as error:
        raise rename_files(error, few) from error


def _publish(
    config: DataConfig, source: Source, scratch: Path, is_whole: Callable[[], bool]
) -> Sample:
    wanted = config.model_copy(update={"runner": RunnerConfig(processes=1)})
    try:
        source.select()
        if not is_whole():
            wanted = wanted.model_copy(update={"shards": 1})
        made = prepare.make(wanted, source, storage.uri_of(scratch), scratch)
    except UserError as error:
        says = str(error)
        is_doubtful = (
            says.startswith(("data.splits:", "data.shards:")) or "leaves out every" in says
        )
        if is_whole() or not is_doubtful:
            raise
        raise _DoubtfulError(says) from error
    return Sample(uri=made.uri, is_whole=is_whole())


class _FirstRows(FileSource):
    """A source that has only the first rows of some files."""

    def __init__(
        self, config: DataConfig, listing: Listing, scratch: Path, *, is_part: bool
    ) -> None:
        """Read a listing. `is_part` indicates whether the source has more files or rows."""
        super().__init__(config, listing, scratch)
        most = _PICTURES if "image" in self._said.values() else ROWS
        self._first = _FirstOf(self._files.reader, most)
        if not self._files.is_listing:
            self._files = replace(self._files, reader=self._first)
        self._is_part = is_part

    @property
    def is_whole(self) -> bool:
        """Whether the rows read so far are all rows of the source."""
        return not (self._is_part or self._first.is_cut)

    def select(self) -> Any:
        """Select the features. Raise `_DoubtfulError` for an error that more rows could correct."""
        try:
            return super().select()
        except UserError as error:
            is_read = self._scan is not None
            by_name = isinstance(error, ConfigError) and not self._files.reader.varies
            if self.is_whole or not is_read or by_name:
                raise
            raise _DoubtfulError(str(error)) from error

    def parts(self) -> Sequence[Part]:
        """Return one part per origin, because several parts would start more processes."""
        found: dict[str, list[list[int]]] = {}
        for origin, pieces in self._files.groups():
            found.setdefault(origin, []).extend(pieces)
        return [
            Part(number=number, origin=origin, where={"pieces": pieces})
            for number, (origin, pieces) in enumerate(found.items())
        ]

    def _check_families(self, roles: ColumnRoles, scan: Scan) -> None:
        # Strings that all look like numbers are an error only if no other strings follow.
        if self.is_whole or not self._files.reader.parsed:
            super()._check_families(roles, scan)

    def _check_distances(self, name: str, scan: Scan) -> None:
        if self.is_whole:
            super()._check_distances(name, scan)

    def _verify(self, roles: ColumnRoles, scan: Scan) -> None:
        try:
            super()._verify(roles, scan)
        except UserError as error:
            said = tuple(f"{name!r} " for name in self._config.types)
            # If the user set the type, further rows cannot correct the error.
            wrong = [why for _, _, why in scan.broken.places if why.startswith(said)]
            if wrong and not self._config.bad_rows and str(error).startswith(self.name):
                raise ConfigError(str(error)) from error
            raise

    def _splits(
        self, origin: str, columns: Columns, piece: Piece, numbers: NDArray[np.int64]
    ) -> NDArray[np.int8]:
        if self.is_whole or origin in SPLITS[1:]:
            return super()._splits(origin, columns, piece, numbers)
        drawn = np.full(len(numbers), TRAIN, np.int8)
        drawn[::_TENTH], drawn[1::_TENTH] = TEST, VALIDATION
        return drawn


class _FirstOf(Reader):
    """A reader that returns only the first records of each file."""

    def __init__(self, reader: Reader, most: int) -> None:
        self.parsed, self.varies, self.lists = reader.parsed, reader.varies, reader.lists
        reader.at_once = min(reader.at_once, most) or reader.at_once
        self.is_cut = False
        self._reader = reader
        self._most = most

    def names(self, path: Path) -> tuple[str, ...]:
        return self._reader.names(path)

    def notes(self, path: Path) -> tuple[str, ...]:
        return self._reader.notes(path)

    def index(self, path: Path) -> tuple[str, ...]:
        return self._reader.index(path)

    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Return the whole file as one piece, because some formats must be read to be split."""
        del size
        return [(0, -1)] if path else []

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the first rows of a file, at most as many as the limit allows."""
        left = self._most
        for rows in self._reader.rows(path, piece, columns, broken):
            if not left:
                self.is_cut = True
                return
            taken = Rows(rows.table.slice(0, left), rows.numbers[:left], rows.mixed)
            self.is_cut = self.is_cut or len(taken.numbers) < len(rows.numbers)
            left -= len(taken.numbers)
            yield taken

    def row(self, path: Path, piece: Piece, number: int) -> int:
        return self._reader.row(path, piece, number)


class _FirstExamples(BuilderSource):
    """The first examples of each split, from a dataset builder that needs no download."""

    @property
    def is_here(self) -> bool:
        """Whether the examples can be read without a download."""
        return datasets.is_drawn(self._builder) or datasets.is_folder(self._builder)

    def parts(self) -> Sequence[Part]:
        """Return the first part of each split, limited to `ROWS` examples."""
        parts = [each for each in super().parts() if not each.where["first"]]
        return [
            replace(each, where={"first": 0, "end": min(ROWS, each.where["end"])}, number=number)
            for number, each in enumerate(parts)
        ]

"""The files of a source, cut into pieces that are read alone, and these grouped into parts.

Local files are read in place; others are fetched, and removed again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer import storage
from trainer.config.data import FORMATS, DataConfig
from trainer.data.files.formats.class_folders import ImageFilesReader
from trainer.data.files.formats.columnar import ParquetReader
from trainer.data.files.formats.decompression import bare_name
from trainer.data.files.formats.delimited import CsvReader
from trainer.data.files.formats.json_lines import JsonReader
from trainer.data.files.formats.raw_rows import Piece, Reader
from trainer.data.spec import SPLITS
from trainer.errors import ConfigError, UserError
from trainer.storage.errors import reported
from trainer.storage.schemes import store_for
from trainer.storage.uri import local_path

PART_BYTES = 64 << 20
_IMAGES = 1024


@dataclass(frozen=True, kw_only=True)
class FilePieces:
    """Files of one format; copies of remote ones are in `scratch` while they are read."""

    files: Sequence[Any]
    reader: Reader
    scratch: Path
    notes: Sequence[str] = ()

    @property
    def is_listing(self) -> bool:
        """Whether the listing itself is the table, and no file has several rows."""
        return isinstance(self.reader, ImageFilesReader)

    def local(self, number: int) -> AbstractContextManager[Path]:
        """Give a file as a local path."""
        return nullcontext(Path()) if self.is_listing else local(self.files[number], self.scratch)

    def folder(self, number: int) -> str:
        """Return the URI of the folder that paths in a file are below; empty for a listing."""
        return "" if self.is_listing else storage.parent_of(self.files[number].uri)

    def names(self) -> tuple[str, ...]:
        """Return the columns of the first file."""
        with self.local(0) as path:
            return self.reader.names(path)

    def place(self, piece: Piece, number: int) -> str:
        """Return file and row of a record."""
        with self.local(piece.file) as path:
            row = self.reader.row(path, piece, number)
        if self.is_listing:
            return str(self.files[row - 1].path)
        return f"{self.files[piece.file].path}, row {row}"

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces, in order."""
        if self.is_listing:
            for start, stop in self.reader.cut(Path(), _IMAGES):
                yield Piece(start, start, stop)
            return
        for number in range(len(self.files)):
            yield from self._cut(number)

    def groups(self) -> Iterator[tuple[str, list[list[int]]]]:
        """Yield the origin and the pieces of each part: small files are put together."""
        held: list[list[int]] = []
        size, origin = 0, ""
        for piece in self.pieces():
            file = self.files[piece.file]
            bytes_ = min(file.size, PART_BYTES) if not self.is_listing else PART_BYTES
            if held and (file.split != origin or size + bytes_ > PART_BYTES):
                yield origin, held
                held, size = [], 0
            origin = file.split
            held.append([piece.file, piece.start, piece.stop])
            size += bytes_ if piece == Piece(piece.file) or self.is_listing else PART_BYTES
        if held:
            yield origin, held

    def _cut(self, number: int) -> list[Piece]:
        """Return the pieces of a file; one that is not on this machine stays whole."""
        file = self.files[number]
        if file.size < 2 * PART_BYTES or not file.uri.startswith("file:"):
            return [Piece(number)]
        with self.local(number) as path:
            return [Piece(number, *range_) for range_ in self.reader.cut(path, PART_BYTES)]


def of_listing(config: DataConfig, files: Sequence[Any], scratch: Path) -> FilePieces:
    """Choose the files of one format, and their reader.

    Raises:
        ConfigError: the format cannot be told.
        UserError: there is no file.
    """
    form, kept = _of_one_format(config, files)
    if form == "images":
        # In the order of folders each class would come as a whole.
        order = np.random.RandomState(config.seed).permutation(len(kept))
        mixed = sorted((kept[place] for place in order), key=lambda file: file.split or SPLITS[0])
        reader: Reader = ImageFilesReader(
            [x.path for x in mixed], [x.uri for x in mixed], labelled=True
        )
        return FilePieces(files=mixed, reader=reader, scratch=scratch)
    return FilePieces(files=kept, reader=_reader(form), scratch=scratch)


def _reader(form: str) -> Reader:
    if form == "tfrecord":
        # It loads TensorFlow.
        from trainer.data.files.formats.example_records import ExampleReader  # noqa: PLC0415

        return ExampleReader()
    readers: dict[str, type[Reader]] = {
        "csv": CsvReader,
        "parquet": ParquetReader,
        "jsonl": JsonReader,
    }
    return readers[form]()


def _of_one_format(config: DataConfig, files: Sequence[Any]) -> tuple[str, list[Any]]:
    suffixes = {suffix: name for name, found in FORMATS.items() for suffix in found}
    formats = [suffixes.get(Path(bare_name(file.path)).suffix, "") for file in files]
    chosen: str = config.format
    if not files:
        raise UserError(f"data.source: there is no file at {config.source}")
    if not chosen:
        known = sorted({each for each in formats if each})
        if len(known) != 1:
            found = ", ".join(known) if known else f"names such as {files[0].path!r}"
            raise ConfigError(
                f"data.format: {config.source} has {found}; set data.format to one of "
                f"{', '.join(FORMATS)}"
            )
        chosen = known[0]
    kept = [file for file, form in zip(files, formats, strict=True) if form == chosen]
    return chosen, kept or list(files)


@contextmanager
def local(file: Any, scratch: Path) -> Iterator[Path]:
    """Give a file of a listing as a local path.

    Raises:
        UserError: it is not what was listed, or cannot be read; the message names it.
    """
    path = local_path(file.uri)
    if path:
        with _named(file, path):
            _check(file, path)
            yield path
        return
    # A worker on another machine has no such folder.
    place = scratch if scratch.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="file-") as folder:
        path = Path(folder) / file.path.rpartition("/")[2]
        with _named(file, path):
            store_for(file.uri).download(file.uri, path)
            _check(file, path)
            yield path


@contextmanager
def _named(file: Any, path: Path) -> Iterator[None]:
    named = str(local_path(file.uri) or file.uri)
    try:
        with reported("read data.source"):
            yield
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise UserError(
                f"data.source: {named} was listed and is gone; run again with those that are left"
            ) from error
        if str(path) == named:
            raise
        raise type(error)(str(error).replace(str(path), named)) from error


def _check(file: Any, path: Path) -> None:
    size = path.stat().st_size
    if size != file.size:
        raise UserError(
            f"data.source: {path} has {size} bytes and had {file.size} when it was listed; run "
            "again when nothing writes to it"
        )

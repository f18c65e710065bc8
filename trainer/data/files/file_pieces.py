"""Divide files into independently readable pieces, and group the pieces into parts.

Local files are read in place. Remote files are downloaded, and deleted after use.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from flotilla.trainer import storage
from flotilla.trainer.config.data import FORMATS, DataConfig, SplitsConfig
from flotilla.trainer.data.files.formats.class_folders import (
    ImageFilesReader,
    shuffle_files,
    split_folders,
)
from flotilla.trainer.data.files.formats.columnar import NpzReader, ParquetReader
from flotilla.trainer.data.files.formats.delimited import CsvReader
from flotilla.trainer.data.files.formats.json_lines import JsonReader
from flotilla.trainer.data.files.formats.raw_rows import END, Broken, Piece, Reader, Rows, bare_name
from flotilla.trainer.data.listing import Listing, require_listed
from flotilla.trainer.data.roles import LABELS, ColumnRoles, assign
from flotilla.trainer.data.splits import split_of_folder
from flotilla.trainer.features.dataset_spec import SPLITS
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage.errors import report_errors
from flotilla.trainer.storage.local import tag_of
from flotilla.trainer.storage.publishing import choose_store
from flotilla.trainer.storage.uri import local_path

PART_BYTES = 64 << 20
_IMAGES = 1024
_NO_TABLES = (
    ".xlsx", ".xls", ".ods", ".feather", ".arrow", ".dta", ".sav", ".rds", ".rdata", ".pkl",
    ".pickle", ".npy", ".mat", ".h5", ".hdf5", ".db", ".sqlite", ".xml", ".html", ".avro",
    ".orc", ".arff", ".pdf",
)  # fmt: skip
_READERS: dict[str, type[Reader]] = {
    "csv": CsvReader, "parquet": ParquetReader, "jsonl": JsonReader, "npz": NpzReader,
}  # fmt: skip
# Value that Hive and Spark write in the folder name of a partition if the value is missing.
_NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
_DOCUMENT = re.compile(
    r"(?:read[-_ ]?me|licen[cs]e|copying|notice|changelog|authors|citation|metadata|meta|schema|"
    r"(?:data[-_ ]?)?(?:description|dictionary)|columns|dataset[-_]?infos?|datapackage|croissant|"
    r"state|checksums?|(?:md5|sha\d+)sums?)(?:[-_. ].*)?\.(?:txt|json|jsonl)"
)
_ANSWERS = re.compile(r"submission|unlabel+ed|predict|hold[-_]?out|inference")
_INDEX = re.compile(r"__index_level_\d+__|Unnamed: 0(?:\.\d+)*")
_TABLES = (".csv", ".tsv")
# The number at the end of a file name, as in train-00000-of-00004.
_NUMBERED = re.compile(r"[-_.]\d+(?:-of-\d+)?$")


@dataclass(frozen=True, kw_only=True)
class FilePieces:
    """Files of one format. Remote files are copied to `scratch` while they are read."""

    files: Sequence[Any]
    reader: Reader
    scratch: Path
    notes: Sequence[str] = ()

    @property
    def is_listing(self) -> bool:
        """Whether each file is one row of the table, as in a folder of images."""
        return isinstance(self.reader, ImageFilesReader)

    def local(self, number: int) -> AbstractContextManager[Path]:
        """Return a context manager that provides a file as a local path."""
        return nullcontext(Path()) if self.is_listing else local(self.files[number], self.scratch)

    def folder(self, number: int) -> str:
        """Return the URI of the folder that contains a file, or "" for a listing."""
        return "" if self.is_listing else storage.parent_of(self.files[number].uri)

    @property
    def first(self) -> int:
        """The index of the first training file, whose columns other files must have."""
        numbered = enumerate(self.files)
        return next((at for at, file in numbered if file.split in ("", SPLITS[0])), 0)

    def columns(self, number: int, path: Path) -> tuple[str, ...]:
        """Return the columns of a file, followed by the columns of its partition folders."""
        names = self.reader.names(path)
        return tuple(dict.fromkeys([*names, *self._partition(number)]))

    def require_columns(self, number: int, path: Path, wanted: Sequence[str]) -> tuple[str, ...]:
        """Return the columns of a file. Raises `UserError` if it lacks a wanted one."""
        names = self.columns(number, path)
        if missing := [name for name in wanted if name not in names]:
            raise UserError(
                f"data.source: {path} has no column {missing[0]!r}, which other files have; "
                f"add it, set data.drop: [{missing[0]}], or name only the files of one table in "
                "data.source (one file or a pattern)"
            )
        return names

    def header(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the columns of the first training file, and its index columns."""
        with self.local(self.first) as path:
            said = () if self.is_listing else self.reader.index(path)
            return self.columns(self.first, path), said

    def roles(self, config: DataConfig, names: Sequence[str], said: Sequence[str]) -> ColumnRoles:
        """Choose the roles of columns. Raises `ConfigError`."""
        where = config.source
        if len(self.files) > 1 and not self.is_listing:
            where = f"{where} ({self.files[self.first].path})"
        return assign(config, names, where, find_index(names, said))

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records of a piece, with its partition columns. See `Reader.rows`."""
        added = self._partition(piece.file)
        if not added:
            yield from self.reader.rows(path, piece, columns, broken)
            return
        there = self.reader.names(path)
        added = {name: value for name, value in added.items() if name not in there}
        # Never pass an empty list, which would select every column.
        own = [name for name in columns if name not in added] or list(there[: len(columns)])
        for rows in self.reader.rows(path, piece, own, broken):
            table = rows.table
            # Partition columns take precedence over record keys of the same name, so drop those.
            table = table.select([each for each in table.column_names if each not in added])
            for name, value in added.items():
                table = table.append_column(name, pa.repeat(value, len(table)))
            table = table.select(list(columns)) if columns else table
            yield replace(rows, table=table, mixed=rows.mixed | added.keys())

    def _partition(self, number: int) -> dict[str, str]:
        return {} if self.is_listing else read_partition(self.files[number])

    def place(self, piece: Piece, number: int) -> str:
        """Return the path and row number of a record, for messages."""
        with self.local(piece.file) as path:
            row = self.reader.row(path, piece, number)
        if self.is_listing:
            return str(self.files[row - 1].path)
        return f"{self.files[piece.file].path}, row {row}"

    def pieces(self) -> Iterator[Piece]:
        """Yield all pieces, in order."""
        if self.is_listing:
            # A piece must not contain files of several splits.
            for _, files in groupby(range(len(self.files)), lambda at: self.files[at].split):
                places = list(files)
                for start in places[::_IMAGES]:
                    yield Piece(start, start, min(start + _IMAGES, places[-1] + 1))
            return
        for number, file in enumerate(self.files):
            ranges = [(0, END)]
            if file.size >= 2 * PART_BYTES and file.uri.startswith("file:"):
                with self.local(number) as path:
                    ranges = self.reader.cut(path, PART_BYTES)
            yield from (Piece(number, *range_) for range_ in ranges)

    def groups(self) -> Iterator[tuple[str, list[list[int]]]]:
        """Yield the split and the pieces of each part. Small files share a part."""
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


def select_pieces(config: DataConfig, listing: Listing, scratch: Path) -> FilePieces:
    """Return the files to train on, with the splits that their names indicate."""
    pieces = choose_reader(config, listing.files, scratch, listing.hidden)
    if pieces.is_listing:
        return arrange_by_class(config, pieces)
    return pieces if config.map else select_labelled(config, pieces, config.label or LABELS)


def choose_reader(
    config: DataConfig, files: Sequence[Any], scratch: Path, hidden: Mapping[str, int] | None = None
) -> FilePieces:
    """Choose the files of one format, and their reader. Raises `ConfigError` or `UserError`.

    `hidden` has the number of hidden files by suffix.
    """
    form, kept = one_format(config, files)
    notes = _note_unread(files, kept, hidden or {})
    if form == "images":
        reader: Reader = _image_reader(kept)
    elif form == "tfrecord":
        # Import the module only here, because it loads TensorFlow.
        from flotilla.trainer.data.files.formats.example_records import ExampleReader  # noqa: PLC0415

        reader = ExampleReader()
    else:
        reader = _READERS[form]()
    return FilePieces(files=kept, reader=reader, scratch=scratch, notes=notes)


def select_labelled(config: DataConfig, pieces: FilePieces, labels: Sequence[str]) -> FilePieces:
    """Return the files to train on, with the splits that their names indicate. Raises `UserError`.

    A file whose name indicates validation, test or prediction is left out if it has no label. A
    file whose name indicates prediction or a submission is left out if it lacks any column.
    """
    doubtful = [
        at
        for at, file in enumerate(pieces.files)
        if _find_split(file.path) not in ("", "train") or answers_only(file)
    ]
    files, notes = list(pieces.files), list(pieces.notes)
    sure = next((at for at in range(len(files)) if at not in doubtful), None)
    if sure is not None and doubtful:
        with pieces.local(sure) as path:
            names = pieces.columns(sure, path)
        wanted = [each for each in names if each in labels or each.lower() in labels]
        for at in doubtful if wanted else []:
            with pieces.local(at) as path:
                there = pieces.columns(at, path)
            file = pieces.files[at]
            is_short = answers_only(file) and {*there} < {*names}
            if {*wanted} <= {*there} and not is_short:
                continue
            lacks = next(each for each in (*wanted, *names) if each not in there)
            what = f"{file.path} has no column {lacks!r} (first columns: {', '.join(there[:3])})"
            if file.split:
                raise UserError(
                    f"data.splits.{file.split}: {what}; leave this file out, and use it with "
                    "`flotilla predict`"
                )
            files.remove(file)
            notes.append(f"data.source: {what}, so it is ignored; use it with `flotilla predict`")
    files, note = split_by_names(config, files)
    return replace(pieces, files=files, notes=[*notes, note] if note else notes)


def arrange_by_class(config: DataConfig, images: FilePieces) -> FilePieces:
    """Return the images of a folder in random order, with the splits that subfolders indicate."""
    files, notes = list(images.files), list(images.notes)
    if not any(file.split for file in files):
        files, found = split_folders(files)
        if found:
            said = ", ".join(f"{folder} is {split}" for folder, split in sorted(found.items()))
            notes.append(
                f"data.splits: the folders above the class folders determine the splits ({said}); "
                "to draw the splits instead, set data.splits: {train: '**/*'}"
            )
    files = shuffle_files(files, config.seed)
    return replace(images, files=files, reader=_image_reader(files), notes=notes)


def _image_reader(files: Sequence[Any]) -> ImageFilesReader:
    paths, uris = [file.path for file in files], [file.uri for file in files]
    return ImageFilesReader(paths, uris, labelled=True)


def one_format(config: DataConfig, files: Sequence[Any]) -> tuple[str, list[Any]]:
    """Return the format of a listing's files, and the files that have it. Raises `UserError`."""
    if not files:
        raise UserError(f"data.source: there is no file at {config.source}")
    files = drop_documents(files)
    formats = [_infer_format(file.path) for file in files]
    first = {form: file.path for file, form in reversed(list(zip(files, formats, strict=True)))}
    first.pop("", None)
    if "images" in first and all(
        form != "csv" or file.path.lower().endswith(".txt")
        for file, form in zip(files, formats, strict=True)
    ):
        # Ignore text files next to images, because they are notes and not tables.
        first.pop("csv", None)
    chosen: str = config.format or next(iter(first), "")
    if not config.format and len(first) != 1:
        ending = Path(files[0].path).suffix.lower()
        if not first and ending in _NO_TABLES:
            raise UserError(
                f"data.source: {files[0].path} cannot be read; write the table as CSV or Parquet"
            )
        if not first and ending in (".zip", ".tar", ".tgz", ".7z", ".rar"):
            raise UserError(f"data.source: {files[0].path} is an archive; extract it")
        several = " and ".join(f"{form} ({path})" for form, path in sorted(first.items()))
        found = f"several formats: {several}" if first else f"an unknown format: {files[0].path!r}"
        raise ConfigError(
            f"data.format: {config.source} has files in {found}; set data.format to one of "
            f"{', '.join(FORMATS)}"
        )
    kept = [file for file, form in zip(files, formats, strict=True) if form == chosen]
    return chosen, kept or list(files)


def _infer_format(path: str) -> str:
    suffix = Path(bare_name(path)).suffix
    return next((form for form, suffixes in FORMATS.items() if suffix in suffixes), "")


def _note_unread(files: Sequence[Any], kept: Sequence[Any], hidden: Mapping[str, int]) -> list[str]:
    """Return a note on files that are not read. `hidden` counts the hidden files by suffix."""
    taken = {id(file) for file in kept}
    others = [file.path for file in files if id(file) not in taken]
    suffixes = Counter(Path(path).suffix.lower() or "without an extension" for path in others)
    known = {Path(file.path).suffix.lower() for file in kept}
    unseen = sum(count for suffix, count in hidden.items() if suffix in known)
    said = [f"{count} {suffix}" for suffix, count in suffixes.most_common()]
    said += [f"{unseen} with a name that starts with a dot or an underscore"] if unseen else []
    such = f", such as {others[0]}" if others else ""
    note = (
        f"data.source: {len(others) + unseen} of {len(files) + unseen} files are ignored "
        f"({', '.join(said)}){such}"
    )
    return [note] if said else []


@contextmanager
def local(file: Any, scratch: Path) -> Iterator[Path]:
    """Provide a file of a listing as a local path. Raises `UserError`."""
    path = local_path(file.uri)
    if path:
        with _name_file(file, path):
            yield from _use_in_place(file, path)
        return
    # Use the default temporary folder if a worker on another machine does not have `scratch`.
    place = scratch if scratch.is_dir() else None
    with tempfile.TemporaryDirectory(dir=place, prefix="file-") as folder:
        path = Path(folder) / file.path.rpartition("/")[2]
        with _name_file(file, path):
            tag = choose_store(file.uri).download(file.uri, path)
            require_listed(file, path.stat().st_size, tag)
            yield path


def _use_in_place(file: Any, path: Path) -> Iterator[Path]:
    before = path.stat()
    require_listed(file, before.st_size, tag_of(before))
    try:
        yield path
    except UserError:
        # If the file has changed, report the change instead of the error that it caused.
        require_listed(file, path.stat().st_size, tag_of(before, path.stat()))
        raise
    require_listed(file, path.stat().st_size, tag_of(before, path.stat()))


@contextmanager
def _name_file(file: Any, path: Path) -> Iterator[None]:
    named = str(local_path(file.uri) or file.uri)
    try:
        with report_errors("read data.source"):
            yield
    except UserError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise UserError(
                f"data.source: {named} was removed after it was listed; run again to use the "
                "remaining files"
            ) from error
        if str(path) == named:
            raise
        raise type(error)(str(error).replace(str(path), named)) from error


def drop_documents(files: Sequence[Any]) -> list[Any]:
    """Return the files that are neither documents nor empty, or all files if none would be left."""
    names = [bare_name(file.path.rpartition("/")[2]) for file in files]
    has_tables = any(name.endswith(_TABLES) for name in names)
    kept = [
        file
        for file, name in zip(files, names, strict=True)
        if file.size
        and not _DOCUMENT.fullmatch(name)
        and not (has_tables and name.endswith(".txt"))
    ]
    return kept or list(files)


def answers_only(file: Any) -> bool:
    """Return whether a file's name suggests that it lacks either labels or inputs."""
    return bool(_ANSWERS.search(file.path.lower()))


def find_index(names: Sequence[str], said: Sequence[str]) -> tuple[str, ...]:
    """Return the columns that a file declares as an index, or that have pandas' index names."""
    return tuple(each for each in names if each in said or _INDEX.fullmatch(each))


def split_by_names(config: DataConfig, files: Sequence[Any]) -> tuple[list[Any], str]:
    """Return files with the splits that their names or folders indicate, and a note about them.

    No split is inferred if splits are configured or files have spans. Otherwise, every file must
    belong to a split, and there must be files for training and for another split.
    """
    drawn = config.splits != SplitsConfig() or any(file.span or file.split for file in files)
    found = {} if drawn else {file.path: _find_split(file.path) for file in files}
    named = {split: path for path, split in reversed(found.items())}
    if "" in named or "train" not in named or len(named) < len(("train", "test")):
        return list(files), ""
    said = ", ".join(f"{path} is {split}" for split, path in sorted(named.items()))
    draw = "to draw the splits instead, set data.splits: {test: 0.1}"
    note = f"data.splits: the names of the files determine the splits ({said}); {draw}"
    return [replace(file, split=found[file.path]) for file in files], note


def _find_split(path: str) -> str:
    *folders, name = path.split("/")
    stem = Path(bare_name(name)).stem
    stems = (stem, _NUMBERED.sub("", stem))
    return next((split for each in (*folders, *stems) if (split := split_of_folder(each))), "")


def read_partition(file: Any) -> dict[str, str]:
    """Return the partition columns in a file's path. A folder `kind=cat/` sets `kind` to `cat`."""
    found = {}
    # Leave out the folder of a span, because it only selects the files to read.
    for folder in file.path.split("/")[:-1]:
        name, mark, value = folder.partition("=")
        if name and mark and not _is_span(value, file.span):
            found[unquote(name)] = "" if value == _NO_VALUE else unquote(value)
    return found


def _is_span(value: str, span: str) -> bool:
    return bool(span) and value.replace("-", "").lstrip("0") == span.replace("-", "").lstrip("0")

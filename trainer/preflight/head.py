"""A sample of a data source: some of its files, only the start of large ones, and their columns.

This module imports Arrow, which takes half a second, but not TensorFlow.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from flotilla.trainer import storage
from flotilla.trainer.config.data import SINCE_CHAMPION, DataConfig
from flotilla.trainer.data import listing
from flotilla.trainer.data.files import column_scan, text_values
from flotilla.trainer.data.files.columns import FEW_VALUES, read_label
from flotilla.trainer.data.files.file_pieces import (
    FilePieces,
    choose_reader,
    one_format,
    select_pieces,
)
from flotilla.trainer.data.files.formats.delimited import CsvReader
from flotilla.trainer.data.files.formats.raw_rows import Piece, is_compressed, open_text
from flotilla.trainer.data.listing import Listing
from flotilla.trainer.data.roles import LABELS, format_names
from flotilla.trainer.features.statistics.statistics import are_repeated
from flotilla.trainer.models import choice
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest
from flotilla.trainer.storage.uri import local_path

# Maximum number of rows of a table to examine.
ROWS = 10_000
_LIKELY_LABELS = (*LABELS, "class", "y", "outcome", "churn", "survived", "price")
# Maximum number of table files, approximate number of images in all class folders together, and
# maximum number of class folders. At least one image is taken from each of these folders.
_FILES = 8
_IMAGES, _FOLDERS = 64, 256
# Maximum total size of the remote files in a sample, in bytes. Other remote files are skipped.
_FETCHED = 64 << 20
# Maximum size of a local CSV file, in bytes. Of a larger file, only the start is used, because the
# CSV reader searches whole files for quotes.
_HEAD = 8 << 20
_ENDS = 1000


@dataclass(frozen=True, kw_only=True)
class FewFiles:
    """A sample of the files of a source.

    Attributes:
        is_part: whether the source has more files, or a file has more rows.
        copies: the original file of each partial copy, by the path of the copy.
        notes: what could not be examined.
    """

    listing: Listing
    is_part: bool
    copies: Mapping[str, str]
    notes: tuple[str, ...] = ()


def few_files(config: DataConfig, found: Listing, scratch: Path) -> FewFiles:
    """Return a sample of the files of a source, evenly spaced in the listing.

    For large local CSV files, only the start is copied to `scratch` and used. Raises `UserError` if
    the format of the files cannot be inferred.
    """
    pieces = choose_reader(config, found.files, scratch, found.hidden)
    files = _sample_folders(pieces.files) if pieces.is_listing else _spread(pieces.files)
    is_part = len(files) < len(pieces.files)
    kept, fetched = [], 0
    for file in files:
        size = 0 if local_path(file.uri) else file.size
        if fetched + size <= _FETCHED:
            kept.append(file)
            fetched += size
    notes: tuple[str, ...] = ()
    if len(kept) < len(files):
        left = next(each for each in files if each not in kept)
        notes = (f"data.source: {left.uri} is large, so its rows are checked only when it is read",)
    heads = [_head(pieces, file, scratch) for file in kept]
    copies = {
        str(local_path(head.uri)): str(local_path(file.uri))
        for head, file in zip(heads, kept, strict=True)
        if head is not file
    }
    return FewFiles(
        listing=Listing(found.root, tuple(heads), {}),
        is_part=is_part or bool(copies) or len(kept) < len(files),
        copies=copies,
        notes=notes,
    )


def rename_files(error: UserError, few: FewFiles) -> UserError:
    """Return an error whose message names the original files instead of their partial copies."""
    says = str(error)
    for copy, original in few.copies.items():
        says = says.replace(copy, original)
    return type(error)(says)


def _spread(files: Sequence[Any]) -> list[Any]:
    last = len(files) - 1
    if last < _FILES:
        return list(files)
    return [files[at * last // (_FILES - 1)] for at in range(_FILES)]


def _sample_folders(files: Sequence[Any]) -> list[Any]:
    """Return equally many images, at least one, from each of the first `_FOLDERS` class folders."""
    folders: dict[str, list[Any]] = {}
    for file in files:
        folders.setdefault(file.path.rpartition("/")[0], []).append(file)
    of_each = max(1, _IMAGES // len(folders))
    return [file for each in islice(folders.values(), _FOLDERS) for file in each[:of_each]]


def _head(pieces: FilePieces, file: Any, scratch: Path) -> Any:
    """Return the file, or a copy of its first rows if it is a large local CSV file."""
    path = local_path(file.uri)
    if not isinstance(pieces.reader, CsvReader) or not path or not path.is_file():
        return file
    if file.size <= _HEAD and not is_compressed(path):
        return file
    with open_text(path) as opened:
        head = opened.read(_HEAD + 1)
    if len(head) <= _HEAD:
        return file
    root = scratch / "heads"
    copy = root / file.path
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(head[: _end(head)])
    # Clear the tag, because the copy differs from the listed file.
    return replace(file, root=storage.uri_of(root), size=os.stat(copy).st_size, tag="")


def _end(head: bytes) -> int:
    """Return the position after the last newline that is not inside quotes."""
    last = end = head.rfind(b"\n") + 1 or len(head)
    quotes = head.count(b'"', 0, end)
    for _ in range(_ENDS):
        if quotes % 2 == 0 or not end:
            return end or last
        before = head.rfind(b"\n", 0, end - 1) + 1
        quotes -= head.count(b'"', before, end)
        end = before
    return last


def list_files(data: DataConfig) -> Listing:
    """Return the files of the configured spans of a source."""
    found = listing.list_source(data)
    return found if data.spans == SINCE_CHAMPION else listing.select_spans(found, data.spans, {})


def list_names(data: DataConfig, scratch: Path) -> list[str]:
    """Return the columns of a source."""
    pieces = choose_reader(data, list_files(data).files, scratch)
    return list(pieces.header()[0]) if not pieces.is_listing else []


@dataclass(frozen=True)
class Rows:
    """Statistics of each column over the first rows, and whether the source has more rows."""

    count: int
    columns: Mapping[str, Any]
    is_whole: bool
    parsed: bool
    form: str = ""
    size: int = 0
    has_splits: bool = False

    def kind(self, name: str) -> str:
        """Return the kind of a column, as `flotilla.trainer.models.choice` names it."""
        scan = self.columns[name]
        kinds = {*scan.kinds}
        if "image" in kinds:
            return choice.IMAGE
        if "tensor" in kinds:
            is_ordered = len(scan.shapes) > 1 or scan.tensor == "text"
            return (
                choice.SEQUENCE if is_ordered or choice.is_series(*scan.shapes) else choice.TENSOR
            )
        written = text_values.find_kind(scan.writing, texts=scan.kinds.get("text", 0))
        if written or (kinds and kinds <= {"int", "float", "huge", "bool", "time"}):
            return choice.NUMBER
        return choice.CATEGORY if are_repeated(len(scan.values), self.count) else choice.FREE_TEXT

    def find_formatted(self, names: Sequence[str]) -> dict[str, str]:
        """Return the type of each text column that has only formatted numbers of one unit."""
        found = {}
        for name in names:
            scan = self.columns[name]
            texts, whole = scan.kinds.get("text", 0), scan.kinds.get("int", 0)
            kind = text_values.find_kind(scan.writing, texts=texts, whole=whole)
            per_cent = text_values.has_per_cent(scan.writing, plain=bool(whole))
            is_mixed = per_cent or len(text_values.list_units(scan.writing)) > 1
            # In other formats than CSV, numbers and strings are different types.
            is_one = {*scan.kinds} <= {"text", "int" if self.parsed else "text"}
            is_all = is_one and scan.writing.get(kind) == texts
            if kind and is_all and not is_mixed and not self._has_whole_classes(name):
                found[name] = kind
        return found

    def _has_whole_classes(self, name: str) -> bool:
        """Return whether a column is a label whose strings are a few whole numbers, as in JSON."""
        classes: Sequence[str] = ()
        if self.columns[name].gathers:
            with suppress(UserError):
                classes = self.read_classes(name, "")
        whole = [each for each in classes if re.match(text_values.WHOLE, each)]
        return 0 < len(whole) == len(classes) <= FEW_VALUES

    def is_formatted(self, name: str) -> bool:
        """Return whether the strings of a column are formatted numbers or dates, such as 3,25."""
        scan = self.columns[name]
        texts, how = scan.kinds.get("text", 0), scan.writing
        return bool(text_values.find_kind(how, texts=texts) or text_values.describe(how, texts))

    def read_classes(self, label: str, kind: str) -> Sequence[str]:
        """Return the class names of a label with the configured type `kind`, or none."""
        found = read_label(label, kind, self.columns[label], parsed=self.parsed)
        return found.classes


def examine(data: DataConfig, scratch: Path) -> Rows:
    """Return the columns of the first rows of a source. Raises `UserError`."""
    taken = list_files(data)
    size = sum(each.size for each in taken.files)
    form, _ = one_format(data, taken.files)
    # Skip TFRecord files, because reading them imports TensorFlow.
    few = few_files(data, taken, scratch) if form != "tfrecord" else None
    if not few or not few.listing.files:
        return Rows(0, {}, is_whole=False, parsed=False, size=size)
    try:
        return replace(_examine_few(data, few, len(taken.files), scratch), size=size)
    except UserError as error:
        if few.copies:
            raise rename_files(error, few) from error
        raise


def _examine_few(data: DataConfig, few: FewFiles, total: int, scratch: Path) -> Rows:
    pieces = select_pieces(data, few.listing, scratch)
    has_splits = any(each.split for each in pieces.files)
    if pieces.is_listing:
        folders = {each.path.rpartition("/")[0] for each in pieces.files}
        return Rows(
            total, {}, is_whole=True, parsed=False, form="images",
            has_splits=has_splits or len(folders) <= 1,
        )  # fmt: skip
    names, said = pieces.header()
    kept, labels = names, data.label
    if not data.map:
        _require_label(data, names)
        roles = pieces.roles(data, names, said)
        kept, labels = roles.kept, roles.targets
        said = tuple(each for each in names if each not in kept)
    count, is_cut, scans = _scan(pieces, kept, labels)
    is_cut = is_cut or few.is_part
    if not count and not is_cut:
        raise ConfigError(f"data.source: {data.source} has no rows; give files that have rows")
    for scan in scans.values():
        scan.lack(count)
    return Rows(
        count, {name: each for name, each in scans.items() if name not in said},
        is_whole=not is_cut, parsed=pieces.reader.parsed, has_splits=has_splits,
    )  # fmt: skip


def _scan(
    pieces: Any, names: Sequence[str], labels: Sequence[str]
) -> tuple[int, bool, dict[str, Any]]:
    """Return the number of rows read, whether there are more, and a scan of each column."""
    scans: dict[str, column_scan.ColumnScan] = {}
    count, is_cut = 0, False
    for number in range(len(pieces.files)):
        left = ROWS // len(pieces.files)
        for rows in _blocks(pieces, names, number, left):
            taken, left = rows.table.slice(0, left), left - len(rows.numbers)
            is_cut = is_cut or left < 0
            count += len(taken)
            for name in taken.column_names:
                new = column_scan.ColumnScan(most=column_scan.MOST_CLASSES, gathers=name in labels)
                scan = scans.setdefault(name, new)
                array = pa.chunked_array(taken[name]).combine_chunks()
                if column_scan.get_kind(array.type):
                    numbers = rows.numbers[: len(taken)]
                    scan.add(array, number, numbers, parsed=pieces.reader.parsed)
    return count, is_cut, scans


def _blocks(pieces: Any, names: Sequence[str], number: int, most: int) -> Iterator[Any]:
    """Yield blocks of a file's rows until they have more than `most` rows in total."""
    reader = pieces.reader
    columns = () if reader.varies else names
    reader.at_once = min(reader.at_once, most) or reader.at_once
    with pieces.local(number) as path:
        pieces.require_columns(number, path, columns)
        for rows in pieces.rows(path, Piece(number), columns, lambda _number, _why: None):
            yield rows
            most -= len(rows.numbers)
            if most < 0:
                return


def _require_label(data: DataConfig, names: Sequence[str]) -> None:
    if not data.label and not any(each.lower() in LABELS for each in names):
        raise ConfigError(
            f"--label is missing: name the column of {data.source} to predict, perhaps "
            f"{guess(names, data.source)!r} (one of {format_names(names)})"
        )
    for each in data.label:
        if each not in names and not any(name.startswith(f"{each}/") for name in names):
            hint = nearest(each, names) or f" (one of {format_names(names)})"
            raise ConfigError(f"--label: there is no column {each!r} in {data.source}{hint}")


def guess(names: Sequence[str], source: str) -> str:
    """Return the column that is most likely the label."""
    stem = re.sub(r"[^a-z]", "", Path(source).stem.lower())
    for word in _LIKELY_LABELS:
        if found := [each for each in names if each.lower() == word]:
            return found[0]
    of_source = [
        each for each in names if re.sub(r"[^a-z]", "", each.lower()) in (stem, f"{stem}ed")
    ]
    return next(iter([*of_source, *reversed(names)]), "")

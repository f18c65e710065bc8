"""A sample of a data source: some of its files, and only the start of large ones."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.files.file_pieces import FilePieces, choose_reader
from flotilla.trainer.data.files.formats.decompression import is_compressed, open_text
from flotilla.trainer.data.files.formats.delimited import CsvReader
from flotilla.trainer.data.listing import Listing
from flotilla.trainer.storage.uri import local_path

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

    For large local CSV files, only the start is copied to `scratch` and used.

    Raises:
        UserError: the format of the files cannot be inferred.
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

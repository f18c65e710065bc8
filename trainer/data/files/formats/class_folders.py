"""A folder of images (`root/class/x.png`) as a table of files and classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from flotilla.trainer.data.files.formats.raw_rows import END, Broken, Piece, Reader, Rows
from flotilla.trainer.data.listing import SourceFile
from flotilla.trainer.data.splits import split_of_folder
from flotilla.trainer.features.dataset_spec import SPLITS
from flotilla.trainer.runtime.errors import UserError

IMAGE, LABEL = "image", "label"
PATH = "path"
_AT_ONCE, _LISTED_AT_ONCE = 256, 4096
_CLASS = -2


class ImageFilesReader(Reader):
    """Reads only the names of images. The images are decoded later, like those of any table."""

    def __init__(
        self, paths: Sequence[str], uris: Sequence[str], column: str = IMAGE, *, labelled: bool
    ) -> None:
        """Create a reader of the files of a listing, in the given order.

        `column` is the name of the column of URIs. If `labelled`, the second column is the class
        (the folder) instead of the path.
        """
        self._paths, self._uris = paths, uris
        self._columns = (column, LABEL if labelled else PATH)
        self._at_once = _AT_ONCE if labelled else _LISTED_AT_ONCE

    def names(self, _path: Path) -> tuple[str, ...]:
        """Return the names of the two columns."""
        return self._columns

    def cut(self, _path: Path, size: int) -> list[tuple[int, int]]:
        """Return ranges of `size` files."""
        return [(at, min(at + size, len(self._paths))) for at in range(0, len(self._paths), size)]

    def rows(
        self, _path: Path, piece: Piece, columns: Sequence[str], _broken: Broken
    ) -> Iterator[Rows]:
        """Yield the URI of each file, and its class or path."""
        stop = len(self._paths) if piece.stop == END else piece.stop
        uri, other = self._columns
        for start in range(piece.start, stop, self._at_once):
            here = slice(start, min(start + self._at_once, stop))
            paths = self._paths[here]
            others = [find_class(each) for each in paths] if other == LABEL else paths
            table = pa.table({uri: self._uris[here], other: others})
            numbers = np.arange(here.start, here.stop) - piece.start
            yield Rows(table.select(list(columns or self._columns)), numbers)


def find_class(path: str) -> str:
    """Return an image's class, the name of its folder. Raises `UserError` if there is none."""
    parts = path.split("/")
    if len(parts) < -_CLASS:
        raise UserError(
            f"data.source: the image {path} is not in a class folder; put it at CLASS/{path}, or "
            "use a table with a column of paths"
        )
    return parts[_CLASS]


def split_folders(files: Sequence[SourceFile]) -> tuple[list[SourceFile], dict[str, str]]:
    """Assign splits by the folders above class folders. Return files, and the split per folder."""
    paths = [file.path.split("/") for file in files]
    classes = {each[_CLASS] for each in paths if len(each) >= -_CLASS}
    if {"train"} <= {split_of_folder(each) for each in classes} <= set(SPLITS):
        raise UserError(
            f"data.source: {files[0].path} is in a split folder, but not in a class folder; put it "
            f"at {'/'.join([*paths[0][:-1], 'CLASS', paths[0][-1]])}, or use a table with a column "
            "of paths"
        )
    for depth in range(max((len(each) for each in paths), default=0) + _CLASS):
        above = {each[depth] for each in paths if len(each) + _CLASS > depth}
        found = {name: split for name in above if (split := split_of_folder(name))}
        if not {"train"} < set(found.values()):
            continue
        for path in paths:
            if len(path) + _CLASS <= depth or path[depth] not in found:
                raise UserError(
                    f"data.source: {' and '.join(sorted(found))} are folders of splits, and "
                    f"{'/'.join(path)} is in none of them; move it, or name the folders in "
                    "data.splits: {train: ..., test: ...}"
                )
        return [
            replace(file, split=found[path[depth]]) for file, path in zip(files, paths, strict=True)
        ], found
    return list(files), {}


def shuffle_files(files: Sequence[SourceFile], seed: int) -> list[SourceFile]:
    """Return files in random order, because the images of a class are contiguous in a listing."""
    order = np.random.RandomState(seed).permutation(len(files))
    return sorted((files[at] for at in order), key=lambda file: file.split or SPLITS[0])

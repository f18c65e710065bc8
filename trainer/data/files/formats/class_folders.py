"""A folder of images, `root/class/x.png`: a table of files and classes, from a listing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from trainer.data.files.formats.raw_rows import END, Broken, Piece, Reader, Rows
from trainer.errors import UserError

IMAGE, LABEL = "image", "label"
#: The column with the path of an image, as the listing has it.
PATH = "path"
_AT_ONCE, _LISTED_AT_ONCE = 256, 4096
_CLASS = -2


class ClassFolderReader(Reader):
    """Reads names: the images themselves are decoded as those of any table are."""

    def __init__(self, paths: Sequence[str], uris: Sequence[str]) -> None:
        """Read the files of a listing, in this order."""
        self._paths = paths
        self._uris = uris

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the columns."""
        del path
        return (IMAGE, LABEL)

    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Return ranges of `size` files."""
        del path
        return [(at, min(at + size, len(self._paths))) for at in range(0, len(self._paths), size)]

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield URI and class of some files."""
        del path, broken
        stop = len(self._paths) if piece.stop == END else piece.stop
        for start in range(piece.start, stop, _AT_ONCE):
            here = range(start, min(start + _AT_ONCE, stop))
            table = {
                IMAGE: pa.array([self._uris[each] for each in here]),
                LABEL: pa.array([class_of(self._paths[each]) for each in here]),
            }
            numbers = np.arange(here.start, here.stop) - piece.start
            yield Rows(pa.table({name: table[name] for name in columns or table}), numbers)

    def row(self, path: Path, piece: Piece, number: int) -> int:
        """Return the place of a file in the listing, from 1."""
        del path
        return piece.start + number + 1


class ImageFilesReader(ClassFolderReader):
    """Reads names in their order, also without classes, for a model to answer.

    The one input of the model names the column of the URIs.
    """

    def __init__(self, feature: str, paths: Sequence[str], uris: Sequence[str]) -> None:
        """Read the files of a listing, in this order."""
        super().__init__(paths, uris)
        self._feature = feature

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the columns."""
        del path
        return (self._feature, PATH)

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield URI and path of some files."""
        del path, columns, broken
        stop = len(self._paths) if piece.stop == END else piece.stop
        for start in range(piece.start, stop, _LISTED_AT_ONCE):
            here = slice(start, min(start + _LISTED_AT_ONCE, stop))
            table = {self._feature: self._uris[here], PATH: self._paths[here]}
            yield Rows(pa.table(table), np.arange(here.start, here.stop) - piece.start)


def class_of(path: str) -> str:
    """Return the class of an image by its folder; raises `UserError` where it has none."""
    parts = path.split("/")
    if len(parts) < -_CLASS:
        raise UserError(
            f"data.source: the image {path} is in no folder of a class; put it at CLASS/{path}, or "
            "give a table with a column of paths"
        )
    return parts[_CLASS]

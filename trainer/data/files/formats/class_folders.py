"""A folder of images, `root/class/x.png`, as a table of files and classes, from a listing."""

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


class ImageFilesReader(Reader):
    """Reads names: the images themselves are decoded as those of any table are."""

    def __init__(
        self, paths: Sequence[str], uris: Sequence[str], column: str = IMAGE, *, labelled: bool
    ) -> None:
        """Read the files of a listing, in this order.

        Args:
            paths: of the files, as the listing has them.
            uris: of the files.
            column: that has the URIs.
            labelled: whether the other column is the class, by the folder, and not the path.
        """
        self._paths, self._uris = paths, uris
        self._columns = (column, LABEL if labelled else PATH)
        self._at_once = _AT_ONCE if labelled else _LISTED_AT_ONCE

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the columns."""
        del path
        return self._columns

    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Return ranges of `size` files."""
        del path
        return [(at, min(at + size, len(self._paths))) for at in range(0, len(self._paths), size)]

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield URI, and class or path, of some files."""
        del path, broken
        stop = len(self._paths) if piece.stop == END else piece.stop
        uri, other = self._columns
        for start in range(piece.start, stop, self._at_once):
            here = slice(start, min(start + self._at_once, stop))
            paths = self._paths[here]
            others = [class_of(each) for each in paths] if other == LABEL else paths
            table = pa.table({uri: self._uris[here], other: others})
            numbers = np.arange(here.start, here.stop) - piece.start
            yield Rows(table.select(list(columns or self._columns)), numbers)

    def row(self, path: Path, piece: Piece, number: int) -> int:
        """Return the place of a file in the listing, from 1."""
        del path
        return piece.start + number + 1


def class_of(path: str) -> str:
    """Return the class of an image by its folder; raises `UserError` where it has none."""
    parts = path.split("/")
    if len(parts) < -_CLASS:
        raise UserError(
            f"data.source: the image {path} is in no folder of a class; put it at CLASS/{path}, or "
            "give a table with a column of paths"
        )
    return parts[_CLASS]

"""Images as input: a listing itself is the table, of one column, and a class is not needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from trainer.data.files.formats.class_folders import ClassFolderReader
from trainer.data.files.formats.raw_rows import END, Broken, Piece, Rows

#: The column with the path of an image, as the listing has it.
PATH = "path"
_AT_ONCE = 4096


class ImageFilesReader(ClassFolderReader):
    """Reads names in their order; the one input of a model names the column of the URIs."""

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
        for start in range(piece.start, stop, _AT_ONCE):
            here = slice(start, min(start + _AT_ONCE, stop))
            table = {self._feature: self._uris[here], PATH: self._paths[here]}
            yield Rows(pa.table(table), np.arange(here.start, here.stop) - piece.start)

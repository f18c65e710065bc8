"""Columns of values on disk: written batch by batch, read in parts that fit into memory.

A column is a `.npy` file (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html),
whose header says how many examples it holds before the first one is written. Texts are numbers in
their file: their places in a list of the values that were met first.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import IO

import numpy as np

from trainer.tasks.base import Array

# Values of one part of a column, over all of its examples.
_VALUES_AT_ONCE = 1 << 22
MOST_ROWS = 1 << 16
# Of texts of a slice, which shows the most frequent ones: among more than these hardly one is.
MOST_TEXTS = 1 << 16
OTHER = b"(other)"


class Column:
    """One column; it is written once, and then read as often as needed."""

    def __init__(self, path: Path, rows: int, *, has_all_texts: bool = False) -> None:
        """Hold `rows` examples at a path; of texts all, or those that are met first."""
        self.path = path
        self._rows, self._has_all_texts = rows, has_all_texts
        self._file: IO[bytes] | None = None
        self._texts: dict[bytes, int] = {}
        self._text_values: Array = np.array([OTHER], dtype=object)

    def add(self, values: Array) -> None:
        """Append the values [n, ...] of a batch."""
        stored = self._numbers(values) if values.dtype == object else values
        if self._file is None:
            self._begin(stored)
        assert self._file is not None
        self._file.write(np.ascontiguousarray(stored).tobytes())

    def end(self) -> None:
        """Close the file; what is read from now on is whole."""
        if self._file is not None:
            self._file.close()
        self._text_values = np.array([*self._texts, OTHER], dtype=object)

    @property
    def rows_at_once(self) -> int:
        """How many examples fit into one part."""
        return max(1, min(MOST_ROWS, _VALUES_AT_ONCE // max(1, math.prod(self._shape))))

    def read(self, begin: int, end: int) -> Array:
        """Return the values from example `begin` up to `end`."""
        width = math.prod(self._shape)
        with self.path.open("rb") as file:
            file.seek(self._offset + begin * width * self._dtype.itemsize)
            values = np.fromfile(file, self._dtype, (end - begin) * width)
        found = values.reshape(-1, *self._shape)
        return self._text_values[found] if self._texts else found

    def _begin(self, first: Array) -> None:
        self._shape, self._dtype = first.shape[1:], first.dtype
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)
        self._offset = self._file.tell()

    def _numbers(self, values: Array) -> Array:
        found = np.empty(values.shape, np.int32)
        for place, text in np.ndenumerate(values):
            fits = self._has_all_texts or len(self._texts) < MOST_TEXTS
            if fits and text not in self._texts:
                self._texts[text] = len(self._texts)
            # The last value stands for all that came too late.
            found[place] = self._texts.get(text, -1)
        return found

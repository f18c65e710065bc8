"""NumPy arrays in an `.npz` file: each array is a column, and its first axis is the row.

Rows are read block by block. Pickled Python objects are never loaded.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flotilla.trainer.data.files.formats.decompression import FREE_BYTES, MOST_RATIO
from flotilla.trainer.data.files.formats.raw_rows import (
    BLOCK_BYTES,
    END,
    Broken,
    Piece,
    Reader,
    Rows,
    require_few,
)
from flotilla.trainer.runtime.errors import UserError

_TIMES = ("datetime64[s]", "datetime64[ms]", "datetime64[us]", "datetime64[ns]")
_SUFFIX = ".npy"
# Magic numbers of netpbm image files (netpbm.sourceforge.net/doc/pgm.html). A key is the rank of a
# batch, followed by the number of channels if there is an axis for them.
_IMAGES = {(3,): b"P5", (4, 1): b"P5", (4, 3): b"P6"}
_KINDS = "biufUSM"
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)


@dataclass(frozen=True, kw_only=True)
class _Array:
    """The header of an array, and its file. The file position is at the first value."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    is_transposed: bool
    file: IO[bytes]

    @property
    def row_bytes(self) -> int:
        return max(1, math.prod(self.shape[1:]) * self.dtype.itemsize)


class NpzReader(Reader):
    """Reads files of `numpy.savez`. A uint8 array with the shape of images is read as images."""

    at_once = 1 << 16

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the names of the arrays."""
        with _open(path) as arrays:
            return tuple(arrays)

    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Return ranges of rows of about `size` bytes."""
        with _open(path) as arrays:
            count, step = _count(arrays), _count_rows(arrays.values(), size)
        bounds = [*range(0, count, step), END]
        return list(pairwise(bounds))

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], _broken: Broken
    ) -> Iterator[Rows]:
        """Yield the rows of a piece. No row is ever broken."""
        with _open(path) as arrays:
            stop = _count(arrays) if piece.stop == END else piece.stop
            chosen = {name: arrays[name] for name in columns or arrays}
            step = min(self.at_once, _count_rows(chosen.values(), BLOCK_BYTES))
            of_a_row = path.stat().st_size / max(1, _count(arrays))
            read = {name: _blocks(each, piece.start, stop, step) for name, each in chosen.items()}
            for start in range(piece.start, stop, step):
                count = min(step, stop - start)
                table = pa.table({name: _column(next(each)) for name, each in read.items()})
                numbers = np.arange(start, start + count) - piece.start
                yield Rows(table, numbers, size=round(of_a_row * count))


@contextmanager
def _open(path: Path) -> Iterator[dict[str, _Array]]:
    try:
        with zipfile.ZipFile(path) as archive, ExitStack() as stack:
            members = [each for each in archive.infolist() if each.filename.endswith(_SUFFIX)]
            if sum(each.file_size for each in members) > max(
                FREE_BYTES, MOST_RATIO * path.stat().st_size
            ):
                raise UserError(
                    f"data.source: {path} expands to more than {MOST_RATIO} times its size; write "
                    "it again with numpy.savez if that is intended"
                )
            require_few(len(members), str(path))
            found = {}
            for each in members:
                name = each.filename.removesuffix(_SUFFIX)
                found[name] = _header(stack.enter_context(archive.open(each)))
            _check(path, found)
            yield found
    except _BROKEN as error:
        raise UserError(
            f"data.source: {path} is not a valid numpy.savez file, or is truncated: {error}"
        ) from error


def _header(file: IO[bytes]) -> _Array:
    version = np.lib.format.read_magic(file)
    read = {(1, 0): "read_array_header_1_0", (2, 0): "read_array_header_2_0"}.get(version)
    if not read:
        raise ValueError(f"version {version} of the format is unknown")
    shape, is_transposed, dtype = getattr(np.lib.format, read)(file)
    return _Array(dtype=dtype, shape=shape, is_transposed=is_transposed, file=file)


def _check(path: Path, arrays: dict[str, _Array]) -> None:
    if not arrays:
        raise UserError(f"data.source: {path} has no array; write it with numpy.savez")
    for name, each in arrays.items():
        if each.dtype.hasobject:
            raise UserError(
                f"data.source: the array {name!r} of {path} contains pickled objects, which are "
                "never loaded; save it as numbers or strings, with one shape for all rows"
            )
        if each.dtype.kind not in _KINDS or each.dtype == np.longdouble:
            raise UserError(
                f"data.source: the array {name!r} of {path} is {each.dtype}, which cannot be read; "
                "save it as numbers, strings or times"
            )
        if not each.shape:
            raise UserError(
                f"data.source: the array {name!r} of {path} is a single value and has no rows; "
                "save the file without this array"
            )
    first, *others = arrays
    for name in others:
        rows, of_first = arrays[name].shape[0], arrays[first].shape[0]
        if rows != of_first:
            raise UserError(
                f"data.source: {path} has {of_first} rows of {first!r} and {rows} of {name!r}; "
                "save arrays of equal length in one file, and each split in its own file"
            )


def _count(arrays: dict[str, _Array]) -> int:
    return next(iter(arrays.values())).shape[0]


def _count_rows(arrays: Iterable[_Array], size: int) -> int:
    return max(1, size // sum(each.row_bytes for each in arrays))


def _blocks(array: _Array, start: int, stop: int, step: int) -> Iterator[NDArray[Any]]:
    """Yield the rows from `start` to `stop`. An array in Fortran order is read as a whole."""
    whole = None
    if array.is_transposed:
        flat = _read(array, math.prod(array.shape), ())
        whole = flat.reshape(array.shape, order="F")
    else:
        array.file.seek(start * array.row_bytes, io.SEEK_CUR)
    for first in range(start, stop, step):
        count = min(step, stop - first)
        if whole is None:
            yield _read(array, count * math.prod(array.shape[1:]), array.shape[1:])
        else:
            yield np.ascontiguousarray(whole[first : first + count])


def _read(array: _Array, values: int, shape: tuple[int, ...]) -> NDArray[Any]:
    data = array.file.read(values * array.dtype.itemsize)
    found = np.frombuffer(data, array.dtype, values)
    return found.reshape(-1, *shape)


def _column(values: NDArray[Any]) -> pa.Array:
    """Convert rows to an Arrow array of values, of lists of one shape, or of image files."""
    if values.shape[1:] == (1,):
        values = values[:, 0]
    magic = _IMAGES.get((values.ndim, *values.shape[3:]))
    if magic and values.dtype == np.uint8 and values.size:
        return _make_images(values, magic)
    kind = values.dtype.kind
    if kind in "US":
        flat = pa.array(values.ravel().tolist())
    elif kind == "M":
        known = values.dtype.name in _TIMES
        flat = pa.array(values.ravel() if known else values.ravel().astype("datetime64[s]"))
    else:
        # Arrow needs native byte order, and few of its functions support float16.
        wide = np.dtype(np.float32) if values.dtype == np.float16 else values.dtype
        flat = pa.array(values.ravel().astype(wide.newbyteorder("=")))
    for size in reversed(values.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _make_images(values: NDArray[np.uint8], magic: bytes) -> pa.Array:
    count, height, width = values.shape[:3]
    head = np.frombuffer(b"%s %d %d 255\n" % (magic, width, height), np.uint8)
    pixels = values.reshape(count, -1)
    files = np.concatenate([np.tile(head, (count, 1)), pixels], axis=1)
    size = pa.binary(files.shape[1])
    fixed = pa.Array.from_buffers(size, count, [None, pa.py_buffer(files.tobytes())])
    return fixed.cast(pa.binary())

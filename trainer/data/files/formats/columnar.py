"""Read Parquet files by row group, and the arrays of NumPy's `.npz` files by range of rows.

In an `.npz` file, each array is a column, and its first axis is the row. Pickled Python objects are
never loaded.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flotilla.trainer.data.files.formats.raw_rows import (
    BLOCK_BYTES,
    END,
    FREE_BYTES,
    MOST_RATIO,
    Broken,
    Piece,
    Reader,
    Rows,
    is_compressed,
    require_few,
)
from flotilla.trainer.runtime.errors import UserError

# Number of rows per batch if the length of the values is unknown.
_FEW = 64
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}


class ParquetReader(Reader):
    """Reads Parquet files. Fields of structs become columns named `outer/inner`."""

    at_once = 1 << 16

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the columns of the schema."""
        with _file(path) as file:
            names = tuple(_flat(file.schema_arrow))
        double = [name for name, count in Counter(names).items() if count > 1]
        if double:
            raise UserError(
                f"data.source: {path} has two columns named {double[0]!r}; rename one of them"
            )
        return names

    def index(self, path: Path) -> tuple[str, ...]:
        """Return the pandas index columns, from the metadata that pandas writes."""
        with _file(path) as file:
            written = (file.schema_arrow.metadata or {}).get(b"pandas", b"{}")
        try:
            found = json.loads(written).get("index_columns", [])
        except (ValueError, AttributeError):
            found = []
        return tuple(each for each in found if isinstance(each, str))

    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Return ranges of row groups of about `size` bytes."""
        with _file(path) as file:
            sizes = [
                file.metadata.row_group(each).total_byte_size
                for each in range(file.metadata.num_row_groups)
            ]
        bounds, held = [0], 0
        for place, bytes_ in enumerate(sizes):
            if held and held + bytes_ > size:
                bounds.append(place)
                held = 0
            held += bytes_
        return list(pairwise([*bounds, END]))

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], _broken: Broken
    ) -> Iterator[Rows]:
        """Yield the rows of a range of row groups. A row of Parquet is never broken."""
        with _file(path) as file:
            # Arrow selects whole structs by name. Their fields are selected below.
            outer = list(dict.fromkeys(_outer(name, file.schema_arrow) for name in columns))
            stop = file.metadata.num_row_groups if piece.stop == END else piece.stop
            groups = list(range(piece.start, stop))
            most = _rows_at_once(path, file, groups, outer, self.at_once)
            start, of_a_row = 0, path.stat().st_size / max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(most, row_groups=groups, columns=outer):
                table = _flatten(pa.Table.from_batches([batch])).select(list(columns))
                _require_unicode(path, table)
                numbers = np.arange(start, start + len(table))
                yield Rows(table, numbers, size=round(of_a_row * len(table)))
                start += len(table)

    def row(self, path: Path, piece: Piece, number: int) -> int:
        """Return the number of a row in the file, starting at 1."""
        with _file(path) as file:
            before = sum(file.metadata.row_group(each).num_rows for each in range(piece.start))
        return int(before) + number + 1


@contextmanager
def _file(path: Path) -> Iterator[pq.ParquetFile]:
    if is_compressed(path):
        raise UserError(f"data.source: {path} is compressed as a whole; unpack it")
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError, OSError) as error:
        what = "not a valid Parquet file, or is truncated"
        if isinstance(error, OSError):
            if error.errno is not None:
                raise
            what = "damaged"
        reason = str(error).splitlines()[0]
        raise UserError(f"data.source: {path} is {what}: {reason}") from error


def _rows_at_once(
    path: Path, file: pq.ParquetFile, groups: Sequence[int], names: Sequence[str], at_once: int
) -> int:
    # Parquet stores repeated values once, so a file may need far more memory than its size
    # suggests.
    wanted = {*names}
    most = float(at_once)
    for number in groups:
        group = file.metadata.row_group(number)
        total = lists = stored = 0
        for at in range(group.num_columns):
            chunk = group.column(at)
            if chunk.path_in_schema.partition(".")[0] in wanted:
                size = _bound_memory(path, file, number, at, chunk)
                stored, total = stored + chunk.total_uncompressed_size, total + size
                lists += size if file.schema.column(at).max_repetition_level else 0
        if max(lists, stored) > max(FREE_BYTES, MOST_RATIO * path.stat().st_size):
            raise UserError(
                f"data.source: {path} expands to more than {MOST_RATIO} times its size; write it "
                "again without compression if this is intended"
            )
        most = min(most, BLOCK_BYTES * group.num_rows / max(total, 1))
    return max(1, int(most))


def _bound_memory(path: Path, file: pq.ParquetFile, group: int, at: int, chunk: Any) -> int:
    """Return an upper bound of the memory that a column of a row group needs, in bytes."""
    stored, count = int(chunk.total_uncompressed_size), int(chunk.num_values)
    width = _WIDTHS.get(chunk.physical_type, file.schema.column(at).length)
    if chunk.physical_type != "BYTE_ARRAY":
        return count * int(width)
    if "DELTA_BYTE_ARRAY" in chunk.encodings:
        # With delta encoding, a value shares a prefix with the previous one, so it may be much
        # longer than its stored bytes.
        return count * min(stored, BLOCK_BYTES // _FEW)
    if not chunk.has_dictionary_page:
        return stored
    # No value is longer than all stored values together.
    if count * stored <= BLOCK_BYTES:
        return count * stored
    name = chunk.path_in_schema
    with pq.ParquetFile(path, read_dictionary=[name]) as again:
        batch = next(again.iter_batches(1, row_groups=[group], columns=[name]))
    return count * _longest(batch.column(0), stored) + stored


def _longest(array: pa.Array, otherwise: int) -> int:
    """Return the longest value's length in an array's dictionary, or `otherwise` if it has none."""
    while not pa.types.is_dictionary(array.type):
        if pa.types.is_struct(array.type):
            array = array.field(0)
        elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
            array = array.values
        else:
            return otherwise
    return int(pc.max(pc.binary_length(array.dictionary)).as_py() or 0)


def _flat(schema: pa.Schema | pa.StructType, before: str = "") -> Iterator[str]:
    for field in schema:
        name = f"{before}{field.name}"
        if pa.types.is_struct(field.type):
            yield from _flat(field.type, f"{name}/")
        else:
            yield name


def _flatten(table: pa.Table) -> pa.Table:
    while any(pa.types.is_struct(field.type) for field in table.schema):
        names = [
            f"{field.name}/{inner.name}" if pa.types.is_struct(field.type) else field.name
            for field in table.schema
            for inner in (field.type if pa.types.is_struct(field.type) else [field])
        ]
        table = table.flatten().rename_columns(names)
    # Replace the view types that Polars writes, because few Arrow functions support them.
    views = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    if any(field.type in views for field in table.schema):
        kinds = [field.with_type(views.get(field.type, field.type)) for field in table.schema]
        table = table.cast(pa.schema(kinds))
    return table


def _require_unicode(path: Path, table: pa.Table) -> None:
    """Raise `UserError` if a string is not UTF-8. Not all programs that write Parquet check it."""
    for name in table.column_names:
        try:
            table[name].validate(full=True)
        except pa.ArrowInvalid as error:
            raise UserError(
                f"data.source: {path}: the column {name!r} has a text that is not UTF-8; write the "
                "texts as UTF-8, or the column as bytes"
            ) from error


def _outer(name: str, schema: pa.Schema) -> str:
    while name not in schema.names and "/" in name:
        name = name.rpartition("/")[0]
    return name


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
            limit = max(FREE_BYTES, MOST_RATIO * path.stat().st_size)
            if sum(each.file_size for each in members) > limit:
                raise UserError(
                    f"data.source: {path} expands to more than {MOST_RATIO} times its size; write "
                    "it again with numpy.savez if that is intended"
                )
            require_few(len(members), str(path))
            opened = ((each, stack.enter_context(archive.open(each))) for each in members)
            found = {each.filename.removesuffix(_SUFFIX): _header(file) for each, file in opened}
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
    if array.is_transposed:
        flat = _read(array, math.prod(array.shape), ())
        whole = flat.reshape(array.shape, order="F")
        for first in range(start, stop, step):
            yield np.ascontiguousarray(whole[first : min(first + step, stop)])
        return
    array.file.seek(start * array.row_bytes, io.SEEK_CUR)
    for first in range(start, stop, step):
        count = min(step, stop - first)
        yield _read(array, count * math.prod(array.shape[1:]), array.shape[1:])


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

"""Read Parquet files, whose row groups can be read independently."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from flotilla.trainer.data.files.formats.decompression import FREE_BYTES, MOST_RATIO, is_compressed
from flotilla.trainer.data.files.formats.raw_rows import (
    BLOCK_BYTES,
    END,
    Broken,
    Piece,
    Reader,
    Rows,
)
from flotilla.trainer.runtime.errors import UserError

_BATCH = 1 << 16
# Number of rows per batch if the length of the values is unknown.
_FEW = 64
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 12}


class ParquetReader(Reader):
    """Reads Parquet files. Fields of structs become columns named `outer/inner`."""

    at_once = _BATCH

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
        return list(zip(bounds, [*bounds[1:], END], strict=True))

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], _broken: Broken
    ) -> Iterator[Rows]:
        """Yield the rows of a range of row groups. A row of Parquet is never broken."""
        with _file(path) as file:
            # Arrow selects whole structs by name. Their fields are selected below.
            outer = list(dict.fromkeys(_outer(name, file.schema_arrow) for name in columns))
            stop = file.metadata.num_row_groups if piece.stop == END else piece.stop
            groups = list(range(piece.start, stop))
            most = _rows_at_once(path, file, groups, outer)
            start, of_a_row = 0, path.stat().st_size / max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(most, row_groups=groups, columns=outer):
                table = _flatten(pa.Table.from_batches([batch])).select(list(columns))
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
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowKeyError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(
            f"data.source: {path} is not a valid Parquet file, or is truncated: {reason}"
        ) from error
    except OSError as error:
        if error.errno is None:
            reason = str(error).splitlines()[0]
            raise UserError(f"data.source: {path} is damaged: {reason}") from error
        raise


def _rows_at_once(
    path: Path, file: pq.ParquetFile, groups: Sequence[int], names: Sequence[str]
) -> int:
    # Parquet stores repeated values once, so a file may need far more memory than its size
    # suggests.
    wanted = {*names}
    most = float(_BATCH)
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


def _outer(name: str, schema: pa.Schema) -> str:
    while name not in schema.names and "/" in name:
        name = name.rpartition("/")[0]
    return name

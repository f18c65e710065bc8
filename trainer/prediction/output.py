"""Rows go to a file that appears when it is whole, or to standard output.

A file is written under a name of its own that begins with a dot, and renamed at the end. Of a
process that was killed no file is left under the name that was asked for; what it has left under
the other name the next one for the same file removes. A writer locks its own while it lives.
"""

from __future__ import annotations

import fcntl
import glob
import json
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq

from trainer.data.files.column_scan import is_list
from trainer.errors import UserError
from trainer.storage.errors import reported

# A row group of parquet is as large as it can be within this.
_GROUP_BYTES = 16 << 20
_GROUP_ROWS = 1 << 17


class Writer(ABC):
    """Writes tables of the same columns, one after the other."""

    def __init__(self, file: IO[bytes]) -> None:
        """Write to an open file, which stays open."""
        self.file = file

    @abstractmethod
    def write(self, table: pa.Table) -> None:
        """Append rows; raises `UserError` where their types are others than before."""

    def close(self) -> None:
        """Write what is left; the file itself stays open."""
        self.file.flush()


class JsonWriter(Writer):
    """One object a line; what is not finite is null."""

    def write(self, table: pa.Table) -> None:
        """Append rows."""
        short = pa.table([_shortest(_whole(each)) for each in table.columns], table.column_names)
        lines = [_line(row) for row in short.to_pylist()]
        self.file.write("".join(lines).encode(errors="replace"))


class CsvWriter(Writer):
    """One column for each value of a struct, `outer/inner`; lists are JSON."""

    _options: Any = None

    def write(self, table: pa.Table) -> None:
        """Append rows, after a header before the first ones."""
        flat = pa.table(dict(_flat("", table)))
        options = arrow_csv.WriteOptions(include_header=self._options is None)
        self._options = options
        sink = pa.BufferOutputStream()
        arrow_csv.write_csv(flat, sink, options)
        self.file.write(sink.getvalue())


class ParquetWriter(Writer):
    """Parquet with row groups of many batches."""

    def __init__(self, file: IO[bytes]) -> None:
        """Write to an open file."""
        super().__init__(file)
        self._writer: Any = None
        self._held: list[pa.Table] = []

    def write(self, table: pa.Table) -> None:
        """Append rows; those of JSON may have other types than the first ones."""
        if self._writer is None:
            schema = pa.schema([_known(field) for field in table.schema])
            self._writer = pq.ParquetWriter(self.file, schema, compression="zstd")
        schema = self._writer.schema
        for name in table.column_names:
            self._held_type(table, name, schema)
        self._held.append(table.cast(schema))
        rows = sum(len(each) for each in self._held)
        if rows >= _GROUP_ROWS or sum(each.nbytes for each in self._held) >= _GROUP_BYTES:
            self._flush()

    def close(self) -> None:
        """Write the last row group and the footer."""
        if self._writer is not None:
            self._flush()
            self._writer.close()

    def _flush(self) -> None:
        if self._held:
            table = pa.concat_tables(self._held)
            self._held = []
            self._writer.write_table(table, row_group_size=max(1, len(table)))

    def _held_type(self, table: pa.Table, name: str, schema: pa.Schema) -> None:
        try:
            table[name].cast(schema.field(name).type)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            raise UserError(
                f"the column {name!r} is {table[name].type} in some rows and "
                f"{schema.field(name).type} in others, which parquet cannot hold; write .jsonl, or "
                "leave it out of --columns"
            ) from None


WRITERS: dict[str, type[Writer]] = {
    "csv": CsvWriter,
    "jsonl": JsonWriter,
    "parquet": ParquetWriter,
}


def part_path(path: Path, process: int) -> Path:
    """Return where a process writes what becomes `path`."""
    return path.with_name(f".{path.name}.{process}.part")


@contextmanager
def rows_to(path: Path, form: str) -> Iterator[Writer]:
    """Give a writer of a file, which appears at `path` when the block has ended without an error.

    Raises:
        UserError: it cannot be written.
    """
    with reported(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(path)
        part = part_path(path, os.getpid())
        try:
            with part.open("wb") as file:
                with suppress(OSError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                writer = WRITERS[form](file)
                try:
                    yield writer
                finally:
                    writer.close()
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            with suppress(OSError):
                part.unlink(missing_ok=True)


def _remove_orphans(path: Path) -> None:
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        # One that is locked is being written.
        with suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def _line(row: dict[str, Any]) -> str:
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False, default=_plain)
    except ValueError:
        text = json.dumps(_finite(row), ensure_ascii=False, default=_plain)
    return f"{text}\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _plain(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _shortest(array: pa.Array) -> pa.Array:
    """Return 32-bit floats as the shortest decimals that mean the same, in 64 bits."""
    kind = array.type
    if pa.types.is_float32(kind):
        return pc.cast(pc.cast(array, pa.string()), pa.float64())
    if pa.types.is_struct(kind):
        names = [field.name for field in kind]
        return pa.StructArray.from_arrays([_shortest(each) for each in array.flatten()], names)
    if pa.types.is_list(kind) and not array.null_count:
        return pa.ListArray.from_arrays(array.offsets, _shortest(array.values))
    return array


def _flat(before: str, table: pa.Table) -> Iterator[tuple[str, pa.Array]]:
    for name in table.column_names:
        array = _whole(table[name])
        if pa.types.is_struct(array.type):
            inner = pa.table(array.flatten(), [field.name for field in array.type])
            yield from _flat(f"{before}{name}/", inner)
        elif is_list(array.type):
            rows = _shortest(array).to_pylist()
            texts = [None if row is None else _line_of(row) for row in rows]
            yield f"{before}{name}", pa.array(texts, pa.string())
        elif pa.types.is_binary(array.type):
            yield f"{before}{name}", pa.array([_text(each) for each in array.to_pylist()])
        else:
            yield f"{before}{name}", array


def _line_of(values: Any) -> str:
    return json.dumps(_finite(values), ensure_ascii=False, default=_plain)


def _text(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _whole(column: Any) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        return column.combine_chunks()
    return column


def _known(field: pa.Field) -> pa.Field:
    # Of a column without a value so far; texts take the most.
    return field.with_type(pa.string()) if pa.types.is_null(field.type) else field

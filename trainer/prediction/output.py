"""Writes rows to standard output, or to a file that appears when it is complete.

A file is written under a temporary name that starts with a dot, and renamed at the end. If the
process is killed, the file with the final name does not change, and the next process that writes it
deletes the temporary file. A temporary file that is being written is locked, and is not deleted.
"""

from __future__ import annotations

import fcntl
import glob
import json
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

from flotilla.trainer.data.files.column_scan import is_list
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import finite
from flotilla.trainer.storage.errors import report_errors

# Maximum size of a row group in Parquet files, in bytes.
_GROUP_BYTES = 16 << 20
_GROUP_ROWS = 1 << 17


class Writer(ABC):
    """Writes tables with the same columns to a file."""

    def __init__(self, file: IO[bytes]) -> None:
        """Store an open file. `close` leaves this file open."""
        self.file = file

    @abstractmethod
    def write(self, table: pa.Table) -> None:
        """Append rows. Raises `UserError` if their types differ from earlier rows."""

    def close(self) -> None:
        """Write buffered rows, but leave the file open."""
        self.file.flush()


class JsonWriter(Writer):
    """Writes one JSON object per line. Numbers that are not finite become null."""

    def write(self, table: pa.Table) -> None:
        """Append rows."""
        short = pa.table([_shortest(_whole(each)) for each in table.columns], table.column_names)
        lines = [f"{_json(row)}\n" for row in short.to_pylist()]
        self.file.write("".join(lines).encode(errors="replace"))


class CsvWriter(Writer):
    """Writes each value of a struct to its own column, `outer/inner`, and lists as JSON."""

    _has_header = False

    def write(self, table: pa.Table) -> None:
        """Append rows. The first call also writes a header."""
        options = arrow_csv.WriteOptions(include_header=not self._has_header)
        self._has_header = True
        sink = pa.BufferOutputStream()
        arrow_csv.write_csv(pa.table(dict(_flat("", table))), sink, options)
        self.file.write(sink.getvalue())


class ParquetWriter(Writer):
    """Writes a Parquet file. Each row group contains many batches."""

    def __init__(self, file: IO[bytes]) -> None:
        """Store an open file."""
        super().__init__(file)
        self._writer: Any = None
        self._held: list[pa.Table] = []

    def write(self, table: pa.Table) -> None:
        """Append rows, cast to the types of the first rows."""
        if self._writer is None:
            nulls = [pa.types.is_null(each.type) for each in table.schema]
            # Use strings for a column without any values yet, because every value can become a
            # string.
            fields = [
                field.with_type(pa.string()) if is_null else field
                for field, is_null in zip(table.schema, nulls, strict=True)
            ]
            self._writer = pq.ParquetWriter(self.file, pa.schema(fields), compression="zstd")
        schema = self._writer.schema
        columns = [_cast(table[field.name], field) for field in schema]
        self._held.append(pa.table(columns, schema=schema))
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


def _cast(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise UserError(
            f"the column {field.name!r} is {column.type} in some rows and {field.type} in others, "
            "which a Parquet file cannot store; write a .jsonl file, or leave the column out of "
            "--columns"
        ) from None


WRITERS: dict[str, type[Writer]] = {
    "csv": CsvWriter,
    "jsonl": JsonWriter,
    "parquet": ParquetWriter,
}


@contextmanager
def write_rows(path: Path, form: str) -> Iterator[Writer]:
    """Yield a writer for a file that appears at `path` if the block ends without an error.

    Raises:
        UserError: the file cannot be written.
    """
    with report_errors(f"write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_orphans(path)
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
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
        # If another process is still writing the file, `flock` fails, and the file is kept.
        with suppress(OSError), part.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            part.unlink()


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_text)
    except ValueError:
        return json.dumps(finite(value), ensure_ascii=False, default=_text)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _shortest(array: pa.Array) -> pa.Array:
    """Convert 32-bit floats to the 64-bit floats that have the same shortest decimal form."""
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
        array, write = _whole(table[name]), None
        if pa.types.is_struct(array.type):
            inner = pa.table(array.flatten(), [field.name for field in array.type])
            yield from _flat(f"{before}{name}/", inner)
            continue
        if is_list(array.type):
            array, write = _shortest(array), _json
        elif pa.types.is_binary(array.type):
            write = _text
        if write:
            texts = [None if each is None else write(each) for each in array.to_pylist()]
            array = pa.array(texts, pa.string())
        yield f"{before}{name}", array


def _whole(column: Any) -> pa.Array:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column

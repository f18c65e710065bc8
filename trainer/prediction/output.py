"""The output of a prediction: the columns, and the file or standard output that they go to.

The columns depend on the kind of task. A model with several outputs writes one column for each
output: a struct with the name of the output and these fields.

    classification            prediction, probability, probabilities by class
    binary classification     the same; the model's threshold determines the prediction
    multilabel classification prediction (a list), probabilities by class
    sequence to label         as for classification
    sequence labelling        prediction and probability (lists with the length of the example)
    regression                prediction
    ranking, recommendation   score, probability
    a user's task             its outputs, unchanged

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from flotilla.trainer.data.files.column_scan import is_list
from flotilla.trainer.prediction.exported_model import ExportedModel
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import finite
from flotilla.trainer.storage.errors import report_errors
from flotilla.trainer.tasks.multi_output import group_by_output

# Maximum number of classes whose probabilities are a struct. With more, they are a list in class
# order.
MOST_NAMED = 1000
_HALF = 0.5
# Maximum sizes of a row group in Parquet files.
_GROUP_BYTES, _GROUP_ROWS = 16 << 20, 1 << 17
Answers = Mapping[str, NDArray[Any]]
Columns = dict[str, pa.Array]


def make_columns(model: ExportedModel, answers: Answers, lengths: Any) -> Columns:
    """Return the columns for a batch. `lengths` are the lengths of padded examples, or None."""
    if set(model.kinds) == {""}:
        return _columns(model, "", answers, lengths)
    found: Columns = {}
    own = group_by_output(model.kinds, answers)
    for name in model.kinds:
        inner = _columns(model, name, own[name], lengths)
        found[name] = pa.StructArray.from_arrays(list(inner.values()), list(inner))
    return found


def _columns(model: ExportedModel, output: str, answers: Answers, lengths: Any) -> Columns:
    labels = model.labels.get(output, ())
    match model.kinds[output], answers:
        case "classification" | "sequence_to_label", {"probabilities": each}:
            return _choose_class(labels, each, each.argmax(axis=-1))
        case "binary_classification", {"probability": second}:
            threshold = np.float32(model.thresholds.get(output, _HALF))
            both = np.stack([1 - second, second], axis=-1)
            return _choose_class(labels, both, (second > threshold).astype(np.int64))
        case "multilabel_classification", {"probabilities": each}:
            return _several(labels, each)
        case "sequence_labelling", {"probabilities": each}:
            return _places(labels, each, lengths)
        case "ranking" | "recommendation", {"logit": logit, "probability": probability}:
            return {"score": pa.array(logit), "probability": pa.array(probability)}
    # A user's subclass of a built-in task may also have other outputs.
    return {name: _nest(values) for name, values in answers.items()}


def _choose_class(labels: Sequence[str], each: NDArray[Any], best: NDArray[Any]) -> Columns:
    names = _names(labels, each.shape[-1])
    return {
        "prediction": pa.array(names[best].tolist(), pa.string()),
        "probability": pa.array(np.take_along_axis(each, best[:, None], axis=-1)[:, 0]),
        "probabilities": _make_probabilities(names, each),
    }


def _several(labels: Sequence[str], each: NDArray[Any]) -> Columns:
    names = _names(labels, each.shape[-1])
    found = [names[row > _HALF].tolist() for row in each]
    return {
        "prediction": pa.array(found, pa.list_(pa.string())),
        "probabilities": _make_probabilities(names, each),
    }


def _places(labels: Sequence[str], each: NDArray[Any], lengths: Any) -> Columns:
    best = each.argmax(axis=-1)
    names = _names(labels, each.shape[-1])
    cut = [len(row) for row in each] if lengths is None else lengths.tolist()
    highest = each.max(axis=-1)
    predicted = [names[row[:size]].tolist() for row, size in zip(best, cut, strict=True)]
    sure = [row[:size].tolist() for row, size in zip(highest, cut, strict=True)]
    numbers: Any = pa.float32()
    for _ in range(best.ndim - 1):
        numbers = pa.list_(numbers)
    return {"prediction": pa.array(predicted), "probability": pa.array(sure, numbers)}


def _names(labels: Sequence[str], count: int) -> NDArray[Any]:
    known = list(labels) if len(labels) == count else [str(each) for each in range(count)]
    return np.array(known, object)


def _make_probabilities(names: NDArray[Any], each: NDArray[Any]) -> pa.Array:
    if len(names) > MOST_NAMED or len(set(names)) < len(names):
        return _nest(each)
    columns = [pa.array(np.ascontiguousarray(each[:, at])) for at in range(len(names))]
    return pa.StructArray.from_arrays(columns, names.tolist())


def _nest(values: NDArray[Any]) -> pa.Array:
    """Convert an array to an Arrow array with one nested list per example."""
    if values.dtype == object:
        return pa.array([_decode(each) for each in values.tolist()])
    found = pa.array(values.reshape(-1))
    for size in values.shape[:0:-1]:
        offsets = np.arange(0, len(found) + 1, max(size, 1), dtype=np.int32)
        found = pa.ListArray.from_arrays(pa.array(offsets), found)
    return found


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(each) for each in value]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


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
        columns = [_shortest(each.combine_chunks()) for each in table.columns]
        short = pa.table(columns, table.column_names)
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
            # Use strings for a column without values yet, because any value can become a string.
            fields = [
                field.with_type(pa.string()) if pa.types.is_null(field.type) else field
                for field in table.schema
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
        array, write = table[name].combine_chunks(), None
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

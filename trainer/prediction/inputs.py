"""Reads the examples to predict in batches, from files or from a split of a prepared dataset.

Files are read in one pass with the readers that training uses, and with the settings in the model's
manifest. A split is read in the same order as in an evaluation. Rows of files with invalid values
are marked when their columns are converted to the inputs of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import tensorflow as tf
from numpy.typing import NDArray

from flotilla.trainer import events, storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import images, listing
from flotilla.trainer.data.columns import make_rows
from flotilla.trainer.data.files.column_scan import EXACT, is_list
from flotilla.trainer.data.files.columns import RecordedInput
from flotilla.trainer.data.files.conversion import Values, convert_rows, pad_values
from flotilla.trainer.data.files.file_pieces import FilePieces, choose_reader
from flotilla.trainer.data.files.formats.class_folders import PATH, ImageFilesReader
from flotilla.trainer.data.files.formats.raw_rows import Piece, Rows
from flotilla.trainer.data.files.pictures import Pictures
from flotilla.trainer.data.files.scan import BrokenRows
from flotilla.trainer.data.files.text_values import parse_numbers
from flotilla.trainer.data.read import read_columns, stage_shards
from flotilla.trainer.events import DataNote
from flotilla.trainer.features.dataset_spec import KIND, DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name
from flotilla.trainer.prediction.exported_model import ExportedModel
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest

#: The value of `output` that writes rows to standard output.
STANDARD_OUTPUT = "-"
#: The value of `columns` that copies all columns of the files.
ALL = "*"
#: The column with the number of a row in its file, starting at 1.
ROW = "row"
FILE = "file"
_NAMED = 8
# Maximum size of the inputs of a batch, in bytes.
_BATCH_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Request:
    """A model, the data to predict, and the output.

    Attributes:
        model: URI of a published model.
        inputs: paths, URIs or patterns of files or, with a split, the URI of a dataset.
        split: split of a dataset, or empty for files.
        format: format of the files, as in `data.format`, or empty to infer it from their names.
        output: absolute path, or `STANDARD_OUTPUT`.
        form: format of the output: csv, jsonl or parquet.
        columns: columns of the data to copy to the output, or `ALL` for all.
        batch_size: number of examples per batch, or 0 for the batch size of the model's evaluation.
        skip_bad: whether to skip unreadable rows.
    """

    model: str
    inputs: tuple[str, ...]
    output: str
    form: str
    split: str = ""
    format: str = ""
    columns: tuple[str, ...] = ()
    batch_size: int = 0
    skip_bad: bool = False


@dataclass(frozen=True)
class Batch:
    """A batch of examples.

    Attributes:
        inputs: arrays, keyed by feature.
        copied: columns of the data to copy to the output.
        lengths: lengths of the examples if an input is padded, else None.
        size: size of the examples in the file, in bytes, or 0 if unknown.
    """

    inputs: Mapping[str, NDArray[Any]]
    copied: pa.Table
    lengths: NDArray[np.int64] | None = None
    size: int = 0


def say(text: str) -> None:
    """Show the user a note about the data or the predictions."""
    events.emit(DataNote(text=text))


class FileExamples:
    """The rows of files with the same format."""

    #: Total number of rows, and total size in bytes, or 0 if not known in advance.
    total = size = 0

    def __init__(self, model: ExportedModel, request: Request, scratch: Path) -> None:
        """List the files. Remote files are copied to `scratch`. Raises `UserError`."""
        self._model, self._request = model, request
        self._broken = BrokenRows()
        self._total = 0
        self._files = _list_files(model, request, scratch)
        if self._files.is_listing:
            self.total = len(self._files.files)
        else:
            self.size = sum(each.size for each in self._files.files)
        self._choose_copied: tuple[str, ...] | None = None
        self._allowed = 1.0 if request.skip_bad else model.config.data.bad_rows

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield the rows of all files in order. Raises `UserError`."""
        for number in range(1 if self._files.is_listing else len(self._files.files)):
            piece = Piece(number)
            with self._files.local(number) as path:
                columns = self._columns(number, path)
                for text in () if self._files.is_listing else self._files.reader.notes(path):
                    say(f"{self._format_path(path)}: {text}")
                refuse = partial(self._refuse_record, piece)
                for rows in self._files.rows(path, piece, columns, refuse):
                    for start in range(0, len(rows.numbers), size):
                        numbers = rows.numbers[start : start + size]
                        self._total += len(numbers)
                        taken = 0 if start else rows.size
                        some = Rows(rows.table.slice(start, size), numbers, size=taken)
                        batch = self._batch(some, piece)
                        self._check_broken()
                        if batch:
                            yield batch
            self._check_broken()
        self._check()

    @property
    def skipped(self) -> int:
        """The number of unreadable rows so far."""
        return self._broken.count

    def _refuse_record(self, piece: Piece, number: int, why: str) -> None:
        # Do not raise an error here: Pyarrow calls this function for CSV rows, and ignores errors.
        self._total += 1
        self._broken.add(piece, number, why)

    def _check_broken(self) -> None:
        if self._broken.count and not self._allowed:
            where = self._broken.first(self._files.place)[0]
            raise UserError(f"{where}; correct the row, or skip such rows with --skip-bad")

    def _columns(self, number: int, path: Path) -> list[str]:
        """Return the columns to read from a file. Raises `UserError` if a needed one is missing."""
        there = self._files.columns(number, path)
        needed = [each.feature for each in self._model.inputs]
        lengths = {length_name(each.feature) for each in self._model.inputs if each.spec.varies}
        missing = [name for name in needed if name not in there and name not in lengths]
        if missing:
            raise UserError(
                f"{self._format_path(path)} has no column {missing[0]!r}; the model needs "
                f"{_few(needed)}, but the file has {_few(there)}{nearest(missing[0], there)}"
            )
        first = self._choose_copied is None
        copied = self._choose_columns(there, path)
        read = [name for name in needed if name in there]
        ignored = [name for name in there if name not in read and name not in copied]
        if first and ignored and not self._files.is_listing:
            say(f"ignoring columns that the model does not use: {_few(ignored)}")
        return list(dict.fromkeys([*read, *copied]))

    def _choose_columns(self, there: Sequence[str], path: Path) -> tuple[str, ...]:
        wanted = self._request.columns
        if self._files.is_listing:
            if wanted:
                raise ConfigError(
                    "--columns: images have no columns; leave the option out (every prediction "
                    "contains the path of its image)"
                )
            self._choose_copied = (PATH,)
        elif self._choose_copied is None:
            self._choose_copied = tuple(there) if ALL in wanted else tuple(dict.fromkeys(wanted))
        for name in self._choose_copied:
            if name not in there:
                raise ConfigError(
                    f"--columns: {self._format_path(path)} has no column {name!r}"
                    f"{nearest(name, there) or f' (it has {_few(there)})'}"
                )
        return self._choose_copied

    def _batch(self, rows: Rows, piece: Piece) -> Batch | None:
        found, bad = self._convert(rows, piece)
        if bad.all():
            return None
        kept = np.flatnonzero(~bad)
        inputs: dict[str, NDArray[Any]] = {}
        lengths = None
        for each in self._model.inputs:
            if each.feature not in found:
                continue
            values = found[each.feature]
            good = values[kept] if isinstance(values, np.ndarray) else [values[at] for at in kept]
            inputs[each.feature] = make_input(each.spec, good)
            if each.spec.varies:
                lengths = np.array([len(value) for value in good], np.int64)
                inputs.setdefault(length_name(each.feature), lengths)
        copied = self._row_columns(rows, piece).take(pa.array(kept))
        return Batch(inputs, copied, lengths, rows.size)

    def _convert(self, rows: Rows, piece: Piece) -> tuple[Mapping[str, Any], NDArray[np.bool_]]:
        bad, found = np.zeros(len(rows.numbers), np.bool_), {}
        folder = self._files.folder(piece.file)
        for each in self._model.inputs:
            if each.feature in rows.table.column_names:
                array = _whole(rows.table[each.feature])
                result = convert(each, array, self._model.config.data, folder)
                found[each.feature] = result.values
                for place in np.flatnonzero(result.bad & ~bad):
                    what = f"{each.feature!r} {result.why[int(place)]}"
                    self._broken.add(piece, int(rows.numbers[place]), what)
                bad |= result.bad
        return found, bad

    def _row_columns(self, rows: Rows, piece: Piece) -> pa.Table:
        copied = {name: _whole(rows.table[name]) for name in self._choose_copied or ()}
        own: dict[str, pa.Array] = {}
        if not self._files.is_listing:
            if len(self._files.files) > 1:
                own[FILE] = pa.array([self._files.files[piece.file].path] * len(rows.numbers))
            own[ROW] = pa.array(rows.numbers + 1)
        return pa.table({**{n: each for n, each in own.items() if n not in copied}, **copied})

    def _check(self) -> None:
        """Raise `UserError` if no row is readable, or too many are unreadable."""
        total, broken = self._total, self._broken.count
        named = ", ".join(self._request.inputs[:3])
        if not total:
            raise UserError(f"{named} has no rows: there is nothing to predict")
        if not broken:
            return
        first = self._broken.first(self._files.place)
        if broken >= total:
            raise UserError(f"no row of {named} can be read; first error: {first[0]}")
        if broken > self._allowed * total:
            raise UserError(
                f"{broken} of {total} rows of {named} cannot be read, but the model allows only a "
                f"share of {self._allowed:g} (data.bad_rows); correct these rows, or skip them "
                f"with --skip-bad; first error: {first[0]}"
            )
        say(f"{broken} rows were skipped, because they cannot be read: {'; '.join(first)}")

    def _format_path(self, path: Path) -> str:
        # For a remote file, `path` is a local copy, so return only the name.
        local = (storage.local_path(each.uri) for each in self._files.files)
        return next((str(each) for each in local if each == path), path.name)


def _list_files(model: ExportedModel, request: Request, scratch: Path) -> FilePieces:
    configs = [
        DataConfig.model_validate({"source": source, "format": request.format})
        for source in request.inputs
    ]
    files = [file for config in configs for file in listing.list_source(config).files]
    # Set the inputs as the source, because error messages show the source.
    whole = configs[0].model_copy(update={"source": ", ".join(request.inputs[:3])})
    found = choose_reader(whole, files, scratch)
    if not isinstance(found.reader, ImageFilesReader):
        return found
    pictures = [each for each in model.inputs if each.column.type == "image"]
    if len(model.inputs) != 1 or not pictures:
        takes = _few([each.feature for each in model.inputs])
        raise UserError(
            f"the inputs are images, but the model needs {takes}: give a table with these columns"
        )
    several = len(request.inputs) > 1
    paths = [str(storage.local_path(f.uri) or f.uri) if several else f.path for f in found.files]
    uris = [file.uri for file in found.files]
    reader = ImageFilesReader(paths, uris, pictures[0].feature, labelled=False)
    return replace(found, reader=reader)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = pa.chunked_array(column).combine_chunks()
    return found.cast(found.type.value_type) if pa.types.is_dictionary(found.type) else found


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def choose_batch_size(model: ExportedModel) -> int:
    """Return the batch size of the model's evaluation, limited to 64 MiB of inputs."""
    size = sum(int(np.prod(each.spec.sizes)) * 4 for each in model.inputs)
    return max(1, min(model.config.evaluation.batch_size, _BATCH_BYTES // max(1, size)))


class SplitExamples:
    """The examples of one split of a dataset."""

    skipped = size = 0

    def __init__(self, model: ExportedModel, request: Request, scratch: Path) -> None:
        """Open the given dataset, or the dataset on which the model was trained.

        Raises:
            UserError: the dataset is missing, or has no such split or input.
        """
        self._model, self._request, self._scratch = model, request, scratch
        self._uri = request.inputs[0] if request.inputs else model.dataset
        try:
            manifest = storage.read_manifest(self._uri)
        except storage.NotPublished:
            raise UserError(
                f"the dataset {self._uri} "
                f"{'' if request.inputs else 'that the model was trained on '}"
                "does not exist; pass the URI of another dataset"
            ) from None
        if manifest.kind != KIND:
            raise UserError(
                f"--split: {self._uri} is of kind {manifest.kind!r}, not {KIND!r}; pass the URI of "
                "a dataset"
            )
        self._spec = DatasetSpec.from_manifest(manifest)
        self._check()
        self._spec.files(request.split)
        self.total = self._spec.examples(request.split)
        if not self.total:
            raise UserError(
                f"the split {request.split!r} of {self._uri} has no examples; choose another split"
            )

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all examples, in the order of the shards."""
        features = self._spec.features
        copied = self._choose_copied()
        inputs = [each.feature for each in self._model.inputs]
        varying = [name for name in inputs if features[name].varies]
        more = [length_name(name) for name in varying[:1]]
        wanted = [*dict.fromkeys([*inputs, *copied, *more])]
        split = self._request.split
        files = stage_shards(self._uri, self._scratch / split, split)
        before = 0
        for values in read_columns(self._spec, files, wanted, size):
            count = len(next(iter(values.values())))
            columns = {ROW: pa.array(np.arange(before + 1, before + count + 1))}
            columns |= {name: _column(features[name], values[name]) for name in copied}
            before += count
            yield Batch(
                {name: values[name] for name in inputs},
                pa.table(columns),
                values[more[0]] if more else None,
            )

    def _check(self) -> None:
        for each in self._model.inputs:
            there = self._spec.features.get(each.feature)
            if there is None:
                raise UserError(
                    f"the dataset {self._uri} has no feature {each.feature!r}, which the model "
                    f"needs{nearest(each.feature, self._spec.features)}"
                )
            if (there.shape, there.dtype) != (each.spec.shape, each.spec.dtype):
                raise UserError(
                    f"{each.feature!r} of the dataset {self._uri} is {_format_type(there)}, but "
                    f"the model needs {_format_type(each.spec)}"
                )
            if there.labels != each.spec.labels:
                raise UserError(
                    f"the classes of {each.feature!r} in the dataset {self._uri} differ from those "
                    "of the training data; pass a dataset with the same classes"
                )

    def _choose_copied(self) -> list[str]:
        features = self._spec.features
        able = [name for name, spec in features.items() if not spec.shape]
        if ALL in self._request.columns:
            return able
        for name in self._request.columns:
            if name not in able:
                what = (
                    f"{name!r} has more than one value in each example"
                    if name in features
                    else f"the dataset has no feature {name!r}"
                )
                hint = nearest(name, able) or f" (choose from {', '.join(able)})"
                raise ConfigError(f"--columns: {what}{hint}")
        return list(dict.fromkeys(self._request.columns))


def _format_type(spec: FeatureSpec) -> str:
    return f"{spec.dtype} of shape {list(spec.shape)}" if spec.shape else f"one {spec.dtype}"


def _column(spec: FeatureSpec, values: NDArray[Any]) -> pa.Array:
    if spec.labels:
        names = np.array([*spec.labels, None], object)
        known = np.where((values >= 0) & (values < len(spec.labels)), values, len(spec.labels))
        return pa.array(names[known.astype(np.int64)].tolist(), pa.string())
    if spec.dtype == "string":
        return pa.array([each.decode(errors="replace") for each in values.tolist()], pa.string())
    return pa.array(values)


@dataclass(frozen=True)
class Converted:
    """The values of an input. For each row, `bad` marks an invalid value, and `why` explains it."""

    values: Sequence[Any] | NDArray[Any]
    bad: NDArray[np.bool_]
    why: Sequence[str]


def convert(wanted: RecordedInput, array: pa.Array, config: DataConfig, folder: str) -> Converted:
    """Convert the values of some rows.

    Args:
        wanted: the input of the model.
        array: the values from the file.
        config: settings for decoding images and padding lists.
        folder: URI of the folder that image paths are relative to.
    """
    column, spec = wanted.column, wanted.spec
    if column.type == "image" and not is_list(array.type):
        values, bad, why = Pictures(config.image, folder).decode_all(spec, array.to_pylist())
        return Converted(make_rows(spec, values), bad, why)
    if spec.shape:
        return _lists(spec, array, pads=wanted.feature in config.shapes)
    try:
        return _check_range(spec, array, convert_rows(column, array, required=False))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, pa.ArrowTypeError):
        size = len(array)
        words = f"is {array.type}, but the model needs type {column.type}"
        return Converted(np.zeros(size), np.ones(size, np.bool_), [words] * size)


def make_input(spec: FeatureSpec, values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    """Convert values of valid rows to the model's input. Images are decoded, and lists padded."""
    if spec.stored == "image" and not isinstance(values[0], np.ndarray):
        pixels: NDArray[Any] = images.decode(spec, tf.constant(list(values))).numpy()
        return pixels
    if spec.varies:
        return _pad(spec, values)
    return np.asarray(values, object if spec.dtype == "string" else None).astype(_dtype(spec))


def _dtype(spec: FeatureSpec) -> Any:
    return object if spec.dtype == "string" else tf.as_dtype(spec.dtype).as_numpy_dtype


def _pad(spec: FeatureSpec, values: Sequence[Any] | NDArray[Any]) -> NDArray[Any]:
    longest = max(1, *(len(each) for each in values))
    fill: Any = b"" if spec.dtype == "string" else spec.padding
    found = np.full((len(values), longest, *spec.sizes[1:]), fill, _dtype(spec))
    for place, each in enumerate(values):
        found[place, : len(each)] = each
    return found


def _check_range(spec: FeatureSpec, array: pa.Array, found: Values) -> Converted:
    values, bad = make_rows(spec, found.values), found.bad
    dtype = tf.as_dtype(spec.dtype)
    if dtype.is_integer and values.dtype.kind in "iu":
        bad = bad | (values < dtype.min) | (values > dtype.max)
    why = [""] * len(bad)
    for place in np.flatnonzero(bad):
        why[place] = f"{found.why} ({str(array[int(place)].as_py())[:40]!r})"
    return Converted(values, bad, why)


def _lists(spec: FeatureSpec, array: pa.Array, *, pads: bool) -> Converted:
    """Convert lists, or strings with JSON lists, to arrays of the feature's shape."""
    is_text, dtype = spec.dtype == "string", _dtype(spec)
    empty = np.zeros(tuple(0 if size is None else size for size in spec.shape), dtype)
    found: list[NDArray[Any]] = []
    why: list[str] = []
    for row in array.to_pylist():
        try:
            values = np.asarray(_parse_list(row, spec))
            if values.size:
                values = _cast(values, spec)
            values = np.vectorize(str.encode, otypes=[object])(values) if is_text else values
            values = values.astype(dtype) if values.size or not spec.varies else empty
            if pads and not spec.varies and values.ndim == len(spec.shape):
                values = pad_values(values, spec.sizes)
        except (TypeError, ValueError, OverflowError):
            values = None
        if values is None or not _fits(spec, values.shape):
            sizes = ", ".join("any" if size is None else str(size) for size in spec.shape)
            what = f"is not {spec.dtype} of shape ({sizes})"
            why.append(what if values is None else f"{what}: its shape is {list(values.shape)}")
            values = empty
        else:
            why.append("")
        found.append(values)
    bad = np.array([bool(each) for each in why], np.bool_)
    return Converted(found, bad, why)


def _parse_list(row: Any, spec: FeatureSpec) -> Any:
    if spec.varies and row in (None, ""):
        return []
    if not isinstance(row, str | bytes):
        return row
    if spec.dtype == "string":
        return json.loads(row)
    if (found := parse_numbers(row)) is None:
        raise ValueError
    return found


def _cast(values: NDArray[Any], spec: FeatureSpec) -> NDArray[Any]:
    """Convert the values of a row as in training. Raises `TypeError` or `OverflowError`."""
    is_float = "float" in spec.dtype
    if is_float and all(each is None or isinstance(each, int | float) for each in values.flat):
        values = values.astype(np.float64)
    if "int" in spec.dtype and values.dtype.kind == "f":
        # Accept whole floats: a fraction in one row makes all numbers of a file floats.
        if not (np.abs(values) < EXACT["float64"]).all() or (values != np.floor(values)).any():
            raise TypeError
        values = values.astype(np.int64)
    kinds = {"string": "U", "bool": "b"}.get(spec.dtype, "iub")
    if values.dtype.kind not in ("iubf" if is_float else kinds):
        raise TypeError
    if "int" in spec.dtype:
        limits = np.iinfo(spec.dtype)
        if values.min() < limits.min or values.max() > limits.max:
            raise OverflowError
    return values


def _fits(spec: FeatureSpec, shape: tuple[int, ...]) -> bool:
    return len(shape) == len(spec.shape) and all(
        size in (None, found) for size, found in zip(spec.shape, shape, strict=True)
    )

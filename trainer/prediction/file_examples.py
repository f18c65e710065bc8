"""Files as input: read by the readers of training, as the model says, without a first pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer import storage
from trainer.config.data import DataConfig
from trainer.data import listing
from trainer.data.files.file_pieces import FilePieces, of_listing
from trainer.data.files.formats.class_folders import PATH, ClassFolderReader, ImageFilesReader
from trainer.data.files.formats.raw_rows import Piece, Rows
from trainer.data.files.recorded_columns import RecordedInput
from trainer.data.files.scan import BrokenRows
from trainer.data.spec import length_name
from trainer.errors import ConfigError, UserError, nearest
from trainer.prediction.batch import Batch, Examples
from trainer.prediction.conversion_of_inputs import as_input, convert
from trainer.prediction.exported_model import ExportedModel
from trainer.prediction.request import ALL, Request, Tell

#: The record in its file, from 1: a row can be joined by it.
ROW = "row"
FILE = "file"
_NAMED = 8
# Rows on the way, while a batch is made of them.
_BATCH_BYTES = 64 << 20


class FileExamples(Examples):
    """The rows of files of one format."""

    def __init__(self, model: ExportedModel, request: Request, scratch: Path, tell: Tell) -> None:
        """List the files; copies of remote ones are in `scratch` meanwhile.

        Raises:
            UserError: there is none, or they are of several formats.
        """
        self._model, self._request, self._tell = model, request, tell
        self._image = model.config.data.image
        self._broken = BrokenRows()
        self._total = 0
        self._files = _listed(model, request, scratch)
        self._copied: tuple[str, ...] | None = None
        self._allowed = 1.0 if request.skip_bad else model.config.data.bad_rows

    def batches(self, size: int) -> Iterator[Batch]:
        """Yield the rows of all files, in their order; raises `UserError`."""
        for piece in self._pieces():
            with self._files.local(piece.file) as path:
                columns = self._columns(path)
                for rows in self._files.reader.rows(path, piece, columns, self._add(piece)):
                    for start in range(0, len(rows.numbers), size):
                        here = slice(start, start + size)
                        part = Rows(rows.table.slice(start, size), rows.numbers[here])
                        self._total += len(part.numbers)
                        batch = self._batch(part, piece)
                        self._check_broken()
                        if batch:
                            yield batch
            self._check_broken()
        self._check()

    def _pieces(self) -> Iterator[Piece]:
        if self._files.is_listing:
            yield Piece(0)
            return
        for number in range(len(self._files.files)):
            yield Piece(number)

    def _add(self, piece: Piece) -> Any:
        def add(number: int, why: str) -> None:
            self._total += 1
            self._refuse(piece, number, why)

        return add

    def _refuse(self, piece: Piece, number: int, why: str) -> None:
        # Pyarrow calls it for a row of CSV, and takes no exception from it.
        self._broken.add(piece, number, why)
        self.skipped = self._broken.count

    def _check_broken(self) -> None:
        if self._broken.count and not self._allowed:
            where = self._broken.first(self._files.place)[0]
            raise UserError(f"{where}; correct it, or leave such rows out by --skip-bad")

    def _columns(self, path: Path) -> list[str]:
        """Return the columns that are read of a file; what is wrong with them is refused first."""
        there = self._files.reader.names(path)
        needed = [each.feature for each in self._model.inputs]
        lengths = {length_name(each.feature) for each in self._model.inputs if each.spec.varies}
        missing = [name for name in needed if name not in there and name not in lengths]
        if missing:
            raise UserError(
                f"{self._named(path)} has no column {missing[0]!r}; the model takes "
                f"{_few(needed)}, and the file has {_few(there)}{nearest(missing[0], there)}"
            )
        first = self._copied is None
        copied = self._chosen(there, path)
        read = [name for name in needed if name in there]
        ignored = [name for name in there if name not in read and name not in copied]
        if first and ignored and not self._files.is_listing:
            self._tell(0, f"not read, as the model does not take it: {_few(ignored)}")
        return list(dict.fromkeys([*read, *copied]))

    def _chosen(self, there: Sequence[str], path: Path) -> tuple[str, ...]:
        wanted = self._request.columns
        if self._files.is_listing:
            if wanted:
                raise ConfigError("--columns: images have none; their paths are in the rows")
            self._copied = (PATH,)
        elif self._copied is None:
            self._copied = tuple(there) if ALL in wanted else tuple(dict.fromkeys(wanted))
        for name in self._copied:
            if name not in there:
                raise ConfigError(
                    f"--columns: {self._named(path)} has no column {name!r}"
                    f"{nearest(name, there) or f' (it has {_few(there)})'}"
                )
        return self._copied

    def _batch(self, rows: Rows, piece: Piece) -> Batch | None:
        found, bad = self._converted(rows, piece)
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
            inputs[each.feature] = as_input(each.spec, good)
            if each.spec.varies:
                lengths = np.array([len(value) for value in good], np.int64)
                inputs.setdefault(length_name(each.feature), lengths)
        return Batch(inputs, self._row_columns(rows, piece).take(pa.array(kept)), lengths)

    def _converted(self, rows: Rows, piece: Piece) -> tuple[Mapping[str, Any], NDArray[np.bool_]]:
        bad, found = np.zeros(len(rows.numbers), np.bool_), {}
        folder = self._files.folder(piece.file)
        for each in self._model.inputs:
            if each.feature not in rows.table.column_names:
                continue
            array = _whole(rows.table[each.feature])
            result = convert(each, array, self._image, folder)
            found[each.feature] = result.values
            for place in np.flatnonzero(result.bad & ~bad):
                what = f"{each.feature!r} {result.why[int(place)]}"
                self._refuse(piece, int(rows.numbers[place]), what)
            bad |= result.bad
        return found, bad

    def _row_columns(self, rows: Rows, piece: Piece) -> pa.Table:
        copied = self._copied or ()
        columns = {name: _whole(rows.table[name]) for name in copied}
        own: dict[str, pa.Array] = {}
        if not self._files.is_listing:
            if len(self._files.files) > 1 and FILE not in columns:
                path = self._files.files[piece.file].path
                own[FILE] = pa.array([path] * len(rows.numbers))
            if ROW not in columns:
                own[ROW] = pa.array(rows.numbers + 1)
        return pa.table({**own, **columns})

    def _check(self) -> None:
        """Refuse files without a row that can be read, and too many rows that cannot."""
        total = self._total
        named = ", ".join(self._request.inputs[:3])
        if not total:
            raise UserError(f"{named} has no row: there is nothing to predict")
        if self._broken.count and self._broken.count >= total:
            first = self._broken.first(self._files.place)[0]
            raise UserError(f"no row of {named} can be read, first {first}")
        if self._broken.count > self._allowed * total:
            first = self._broken.first(self._files.place)[0]
            raise UserError(
                f"{self._broken.count} of {total} rows of {named} are broken, more than the "
                f"data.bad_rows ({self._allowed:g}) of the model allows, first {first}; correct "
                "them, or leave them out by --skip-bad"
            )
        if self._broken.count:
            first = "; ".join(self._broken.first(self._files.place))
            self._tell(0, f"{self._broken.count} rows left out, which cannot be read: {first}")

    def _named(self, path: Path) -> str:
        # Of a remote file the path is that of a copy.
        return next(
            (str(local) for each in self._files.files if (local := _local(each)) == path),
            path.name,
        )


def _listed(model: ExportedModel, request: Request, scratch: Path) -> FilePieces:
    configs = [
        DataConfig.model_validate({"source": source, "format": request.format})
        for source in request.inputs
    ]
    files = [file for config in configs for file in listing.list_source(config).files]
    found = of_listing(_naming_all(configs[0], request.inputs), files, scratch)
    if not isinstance(found.reader, ClassFolderReader):
        return found
    pictures = [each for each in model.inputs if each.column.type == "image"]
    if len(model.inputs) != 1 or not pictures:
        takes = _few([each.feature for each in model.inputs])
        raise UserError(f"these are images, and the model takes {takes}: give a table with these")
    order = {id(file): place for place, file in enumerate(files)}
    kept = sorted(found.files, key=lambda file: order[id(file)])
    several = len(request.inputs) > 1
    paths = [_readable(file) if several else file.path for file in kept]
    reader = ImageFilesReader(pictures[0].feature, paths, [file.uri for file in kept])
    return replace(found, files=kept, reader=reader)


def _naming_all(config: DataConfig, inputs: Sequence[str]) -> DataConfig:
    """Return a configuration whose messages name all inputs."""
    return config.model_copy(update={"source": ", ".join(inputs[:3])})


def _readable(file: Any) -> str:
    return str(_local(file) or file.uri)


def _local(file: Any) -> Path | None:
    return storage.local_path(file.uri)


def _whole(column: pa.ChunkedArray) -> pa.Array:
    found = pa.chunked_array(column).combine_chunks()
    return found.cast(found.type.value_type) if pa.types.is_dictionary(found.type) else found


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def batch_size_for(inputs: Sequence[RecordedInput], asked: int, usual: int) -> int:
    """Return how many examples make a batch: as asked, or as usual within 64 MiB of inputs."""
    if asked:
        return asked
    values = sum(int(np.prod(each.spec.sizes)) * 4 for each in inputs)
    return max(1, min(usual, _BATCH_BYTES // max(1, values)))

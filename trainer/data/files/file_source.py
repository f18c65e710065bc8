"""Files as a source: what they hold, in which roles, cut into parts that are read alone."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainer.config.data import FORMATS, DataConfig
from trainer.data.features import Selection
from trainer.data.files import drawing
from trainer.data.files.broken_rows import BrokenRows
from trainer.data.files.column_roles import ColumnRoles, assign
from trainer.data.files.column_types import Column, Request, decide, described
from trainer.data.files.conversion import converted, spec_of
from trainer.data.files.formats.columnar import ParquetReader
from trainer.data.files.formats.decompression import bare_name
from trainer.data.files.formats.delimited import CsvReader
from trainer.data.files.formats.raw_rows import END, Piece, Reader, Rows
from trainer.data.files.local_copies import local
from trainer.data.files.scan import Scan, Wanted, scan_piece
from trainer.data.source import Batch, Part, Source
from trainer.data.spec import SPLITS
from trainer.errors import ConfigError, UserError

PART_BYTES = 64 << 20
_ROWS = 1 << 14
_READERS: dict[str, type[Reader]] = {"csv": CsvReader, "parquet": ParquetReader}
_log = logging.getLogger(__name__)


class FileSource(Source):
    """Files of one format, as `trainer.data.listing` found them."""

    def __init__(self, config: DataConfig, listing: Any, scratch: Path) -> None:
        """Read the files of a listing; copies of remote ones are in `scratch` meanwhile."""
        self.name = f"data.source: {config.source}"
        self.identity: Mapping[str, Any] = {"listing": listing.digest}
        self._config = config
        self._scratch = scratch
        self._format, self._files = _of_one_format(config, listing.files)
        self._reader = _READERS[self._format]()
        self._roles: ColumnRoles | None = None
        self._columns: dict[str, Column] = {}
        self._scan: Scan | None = None
        self._bounds = (np.inf, np.inf)

    def select(self) -> Selection:
        """Scan the files, unless that is remembered, and say types and roles."""
        roles = self._assigned()
        scan = self._scanned(roles)
        if not scan.broken.rows:
            raise UserError(f"{self.name} has no row")
        self._columns = {
            name: decide(name, column, self._request(name, roles))
            for name, column in scan.columns.items()
        }
        self._verify(roles, scan)
        if roles.time:
            self._bounds = self._time_bounds(scan)
        self._tell(roles)
        return self._selection(roles)

    def fetch(self) -> None:
        """Do nothing: files are fetched part by part."""

    def parts(self) -> Sequence[Part]:
        """Return parts of about 64 MB, in an order drawn by the seed: files are often sorted."""
        groups = [group for split in ("", *SPLITS) for group in self._groups(split)]
        order = np.random.RandomState(self._config.seed).permutation(len(groups))
        return [
            Part(number=number, origin=groups[place][0], where={"pieces": groups[place][1]})
            for number, place in enumerate(order)
        ]

    def read(self, part: Part, selection: Selection) -> Iterator[Batch]:
        """Yield the examples of a part; broken rows were counted by the scan, and are left out."""
        for values in part.where["pieces"]:
            piece = Piece(*values)
            broken = BrokenRows()
            for rows in self._rows(piece, list(self._columns), broken):
                columns, bad = self._converted(rows, piece, broken)
                if not self._config.bad_rows:
                    broken.rows += len(bad)
                    broken.check(self.name, 0, self._place)
                kept = {name: array[~bad] for name, array in columns.items()}
                if not bad.all():
                    splits = self._splits(part.origin, kept, int((~bad).sum()))
                    yield Batch(
                        columns={name: kept[name] for name in selection.specs}, splits=splits
                    )

    def facts(self) -> Mapping[str, Any]:
        """Return the columns with their types, and the rows that were left out."""
        broken = self._scan.broken if self._scan else BrokenRows()
        return {
            "columns": described(self._columns),
            "bad_rows": broken.to_json(self._place),
        }

    def place(self, part: Part, number: int) -> str:
        """Say from which file an example is."""
        paths = [self._files[piece[0]].path for piece in part.where["pieces"]]
        more = f" to {paths[-1]}" if paths[-1] != paths[0] else ""
        return f"example {number} of {paths[0]}{more}"

    def state(self) -> Any:
        """Return what the scan found, to be pickled with the parts."""
        return self._scan

    def restore(self, state: Any) -> None:
        """Go on with what `state` returned for the same files, instead of a scan."""
        self._scan = state

    def _assigned(self) -> ColumnRoles:
        if self._roles is None:
            self._roles = assign(self._config, self._scan.names if self._scan else self._names())
        return self._roles

    def _names(self) -> tuple[str, ...]:
        with self._local(0) as path:
            return self._reader.names(path)

    def _local(self, number: int) -> Any:
        return local(self._files[number], self._scratch)

    def _pieces(self, number: int) -> list[Piece]:
        """Return the pieces of a file; one that is not on this machine stays whole."""
        file = self._files[number]
        if file.size < 2 * PART_BYTES or not file.uri.startswith("file:"):
            return [Piece(number)]
        with self._local(number) as path:
            return [Piece(number, *range_) for range_ in self._reader.cut(path, PART_BYTES)]

    def _groups(self, split: str) -> Iterator[tuple[str, list[list[int]]]]:
        """Yield the pieces of each part; small files are put together."""
        held: list[list[int]] = []
        size = 0
        for number, file in enumerate(self._files):
            if file.split != split:
                continue
            pieces = self._pieces(number)
            if held and (len(pieces) > 1 or size + file.size > PART_BYTES):
                yield split, held
                held, size = [], 0
            if len(pieces) > 1:
                yield from ((split, [[each.file, each.start, each.stop]]) for each in pieces)
            else:
                held.append([number, 0, END])
                size += file.size
        if held:
            yield split, held

    def _place(self, piece: Piece, number: int) -> str:
        with self._local(piece.file) as path:
            row = self._reader.row(path, piece, number)
        return f"{self._files[piece.file].path}, row {row}"

    def _over_pieces(self, work: Any) -> Iterator[Any]:
        pieces = [each for number in range(len(self._files)) for each in self._pieces(number)]
        # Arrow lets go of the lock of Python while it parses.
        threads = self._config.runner.processes or os.cpu_count() or 1
        with ThreadPoolExecutor(threads) as pool:
            yield from pool.map(work, pieces)

    def _scanned(self, roles: ColumnRoles) -> Scan:
        if self._scan is None:
            said = {name for name, kind in self._config.types.items() if kind == "class"}
            wanted = Wanted(
                roles=roles, gathered=frozenset({*roles.targets, *said}), file_name=self._path_of
            )

            def work(piece: Piece) -> Scan:
                with self._local(piece.file) as path:
                    return scan_piece(self._reader, path, piece, wanted)

            total = Scan(names=self._names())
            for each in self._over_pieces(work):
                total.merge(each)
            self._scan = total
        return self._scan

    def _path_of(self, piece: Piece) -> str:
        return str(self._files[piece.file].path)

    def _verify(self, roles: ColumnRoles, scan: Scan) -> None:
        """Count broken rows for certain, where there may be some, and refuse too many."""
        doubtful = scan.broken.count or any(
            scan.columns[name].is_doubtful(column.type, required=name in roles.targets)
            for name, column in self._columns.items()
        )
        if doubtful:
            total = BrokenRows()
            for each in self._over_pieces(self._broken_in):
                total.merge(each)
            scan.broken = total
        scan.broken.check(self.name, self._config.bad_rows, self._place)
        if scan.broken.count:
            _log.warning(
                "%s: %d of %d rows are broken and left out: %s",
                self.name, scan.broken.count, scan.broken.rows,
                "; ".join(scan.broken.first(self._place)),
            )  # fmt: skip

    def _broken_in(self, piece: Piece) -> BrokenRows:
        broken = BrokenRows()
        for rows in self._rows(piece, list(self._columns), broken):
            self._converted(rows, piece, broken)
            broken.rows += len(rows.numbers)
        return broken

    def _rows(self, piece: Piece, names: Sequence[str], broken: BrokenRows) -> Iterator[Rows]:
        def add(number: int, why: str) -> None:
            broken.add(piece, number, why)
            broken.rows += 1

        with self._local(piece.file) as path:
            for rows in self._reader.rows(path, piece, names, add):
                for start in range(0, len(rows.numbers), _ROWS):
                    part = slice(start, start + _ROWS)
                    yield Rows(rows.table.slice(start, _ROWS), rows.numbers[part])

    def _converted(
        self, rows: Rows, piece: Piece, broken: BrokenRows
    ) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        bad = np.zeros(len(rows.numbers), np.bool_)
        found = {}
        assert self._roles
        needed = {*self._roles.targets, self._roles.weight, self._roles.split, self._roles.time}
        for name, column in self._columns.items():
            array = pa.chunked_array(rows.table[name]).combine_chunks()
            values = converted(column, array, required=name in needed)
            found[name] = values.values
            for place in np.flatnonzero(values.bad & ~bad):
                value = str(array[int(place)].as_py())[:40]
                broken.add(piece, int(rows.numbers[place]), f"{name!r} {values.why} ({value!r})")
            bad |= values.bad
        return found, bad

    def _splits(
        self, origin: str, columns: Mapping[str, NDArray[Any]], count: int
    ) -> NDArray[np.int8]:
        roles = self._roles
        assert roles
        if origin in SPLITS[1:]:
            return np.full(count, SPLITS.index(origin), np.int8)
        if roles.split:
            texts = [split_text(each) for each in columns[roles.split]]
            return np.array(texts, np.int8)
        validation, test = self._shares()
        if roles.time:
            return drawing.by_bounds(columns[roles.time], self._bounds)
        drawn = [roles.split_group] if roles.split_group else roles.inputs
        found = drawing.hashes({name: columns[name] for name in drawn}, self._config.seed)
        return drawing.by_share(found, validation=validation, test=test)

    def _shares(self) -> tuple[float, float]:
        assert self._scan
        return drawing.shares(self._config, self._scan.broken.rows)

    def _time_bounds(self, scan: Scan) -> tuple[float, float]:
        times = np.array(sorted(scan.times), np.float64)
        counts = np.array([scan.times[each] for each in times], np.int64)
        validation, test = self._shares()
        return drawing.bounds_of(times, counts, validation=validation, test=test)

    def _request(self, name: str, roles: ColumnRoles) -> Request:
        return Request(
            place=self._place,
            said=self._config.types.get(name, ""),
            shape=self._config.shapes.get(name),
            is_label=name in roles.targets,
            tolerates=self._config.bad_rows > 0,
        )

    def _tell(self, roles: ColumnRoles) -> None:
        for column in self._columns.values():
            hint = f"; {column.hint}" if column.hint else ""
            _log.info("%s: %s is %s (%s%s)", self.name, column.name, column.type, column.why, hint)
        _log.info(
            "%s: inputs %s; label %s", self.name, ", ".join(roles.inputs), ", ".join(roles.targets)
        )

    def _selection(self, roles: ColumnRoles) -> Selection:
        return Selection(
            inputs=roles.inputs,
            targets=roles.targets,
            weight=roles.weight,
            group=roles.group,
            specs={name: spec_of(column) for name, column in self._columns.items()},
            connectors={},
            fits={},
        )


def split_text(value: Any) -> int:
    """Return the split that the value of a column names; raises `UserError`."""
    text = value.decode() if isinstance(value, bytes) else str(value)
    found = drawing.split_named(text)
    if found < 0:
        raise UserError(
            f"data.splits.column: {text!r} names no split; write train, validation or test"
        )
    return found


def _of_one_format(config: DataConfig, files: Sequence[Any]) -> tuple[str, list[Any]]:
    if not files:
        raise UserError(f"data.source: there is no file at {config.source}")
    suffixes = {suffix: name for name, found in FORMATS.items() for suffix in found}
    formats = [suffixes.get(Path(bare_name(file.path)).suffix, "") for file in files]
    chosen: str = config.format
    if not chosen:
        known = sorted({each for each in formats if each})
        if len(known) != 1:
            found = ", ".join(known) if known else f"names such as {files[0].path!r}"
            raise ConfigError(
                f"data.format: {config.source} has {found}; set data.format to one of "
                f"{', '.join(FORMATS)}"
            )
        chosen = known[0]
    kept = [file for file, form in zip(files, formats, strict=True) if form == chosen]
    return chosen, kept or list(files)

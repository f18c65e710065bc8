"""Files as a source: scan their columns, choose roles, and divide them into parts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flotilla.trainer.config.data import NUMBERS_IN_WRITING, DataConfig
from flotilla.trainer.data import splits
from flotilla.trainer.data.columns import Column, Columns, count_lengths, select_rows
from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.files.columns import Column as FileColumn
from flotilla.trainer.data.files.columns import decide, describe_columns
from flotilla.trainer.data.files.conversion import Values, convert_rows, make_spec
from flotilla.trainer.data.files.file_pieces import find_index, select_pieces
from flotilla.trainer.data.files.formats.class_folders import IMAGE, LABEL
from flotilla.trainer.data.files.formats.raw_rows import Piece, Rows, require_few
from flotilla.trainer.data.files.pictures import Pictures
from flotilla.trainer.data.files.scan import BrokenRows, PieceScan, Scan
from flotilla.trainer.data.roles import ColumnRoles
from flotilla.trainer.data.source import Batch, Part, Source
from flotilla.trainer.events.progress import Work
from flotilla.trainer.features.dataset_spec import SPLITS
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name
from flotilla.trainer.features.statistics.hashing import comparable_content, hashes
from flotilla.trainer.runtime import threads
from flotilla.trainer.runtime.errors import UserError

_ROWS = 1 << 16
_NAMED = 5
_Found = TypeVar("_Found")
_log = logging.getLogger(__name__)


class FileSource(Source):
    """A source that reads the files of one format in a listing."""

    def __init__(self, config: DataConfig, listing: Any, scratch: Path) -> None:
        """Choose the files to read. Remote files are copied to `scratch` while they are read."""
        self.name = f"data.source: {config.source}"
        self.identity: Mapping[str, Any] = {"version": listing.digest}
        self._config = config
        self._files = select_pieces(config, listing, scratch)
        of_images = {IMAGE: "image", LABEL: "class"} if self._files.is_listing else {}
        self._said: dict[str, str] = {**config.types, **of_images}
        self._roles: ColumnRoles | None = None
        self._columns: dict[str, FileColumn] = {}
        self._scan: Scan | None = None
        self._bounds = (np.inf, np.inf)
        self._selection: Selection | None = None

    def select(self) -> Selection:
        """Return the types and roles of the columns. Scan the files unless a scan is cached."""
        if self._selection:
            return self._selection
        scan = self._scan = self._scan or self._scan_files()
        roles = self._roles = self._files.roles(self._config, scan.names, scan.index)
        if not scan.broken.rows:
            raise UserError(f"{self.name} has no rows; set data.source to files with rows")
        self._check_families(roles, scan)
        self._columns = {
            name: decide(
                self._config,
                self._files,
                scan.columns[name],
                name,
                said=self._said.get(name, ""),
                is_label=name in roles.targets,
                required=name in self._list_required(roles),
                exact=name in (roles.time, roles.group, roles.split_group),
            )
            for name in roles.kept
        }
        self._verify(roles, scan)
        if roles.weight:
            self._check_numbers("weight", roles.weight, scan)
        for name in roles.targets:
            self._check_distances(name, scan)
        if roles.time:
            self._check_numbers("splits.time", roles.time, scan, "time")
            self._bounds = self._time_bounds(scan)
        for column in self._columns.values():
            hint = f"; {column.hint}" if column.hint else ""
            _log.info("%s: %s is %s (%s%s)", self.name, column.name, column.type, column.why, hint)
        inputs, targets = ", ".join(roles.inputs), ", ".join(roles.targets)
        _log.info("%s: inputs %s; label %s", self.name, inputs, targets)
        self._selection = self._make_selection(roles)
        return self._selection

    def _make_selection(self, roles: ColumnRoles) -> Selection:
        specs = {name: make_spec(column) for name, column in self._columns.items()}
        lengths = {}
        for name in (each for each, spec in specs.items() if spec.varies):
            if length_name(name) in specs:
                raise UserError(
                    f"data.shapes: the lengths of {name!r} are stored as {length_name(name)!r}, "
                    f"which is also a column; set data.drop: [{length_name(name)}], or set a fixed "
                    f"length for {name!r}"
                )
            lengths[length_name(name)] = FeatureSpec(shape=(), dtype="int64", stored="int")
        # Add the lengths of float lists to the inputs, because 0 may be padding or a value.
        needed = (
            length_name(each)
            for each in roles.inputs
            if specs[each].varies and "float" in specs[each].dtype
        )
        return Selection(
            inputs=(*roles.inputs, *needed),
            targets=roles.targets,
            weight=roles.weight,
            group=roles.group,
            specs=specs | lengths,
        )

    def parts(self) -> Sequence[Part]:
        """Return parts of about 64 MB in random order, because files are often sorted."""
        with Work("finding where to split the files"):
            groups = list(self._files.groups())
        order = np.random.RandomState(self._config.seed).permutation(len(groups))
        return [
            Part(number=number, origin=groups[place][0], where={"pieces": groups[place][1]})
            for number, place in enumerate(order)
        ]

    @property
    def total(self) -> int:
        """The number of rows that are neither broken nor unlabeled."""
        broken = (self._scan or Scan()).broken
        return broken.rows - broken.count - broken.unlabelled

    def read(self, part: Part, selection: Selection) -> Iterator[Batch]:
        """Yield the examples of a part. Skip broken rows, which the scan has already counted."""
        for (piece, numbers), columns, bad in self._read_pieces(part):
            if not bad.all():
                kept = select_rows(columns, ~bad)
                drawn = self._splits(part.origin, kept, piece, numbers[~bad])
                more = count_lengths(selection.specs, kept)
                yield Batch(columns={**kept, **more}, splits=drawn)

    def place(self, part: Part, number: int) -> str:
        """Return the file and the row of an example."""
        for (piece, numbers), _, bad in self._read_pieces(part):
            left = numbers[~bad]
            if number < len(left):
                return self._files.place(piece, int(left[number]))
            number -= len(left)
        return f"part {part.number}"

    def notes(self) -> Sequence[str]:
        """Return notes on files, columns and rows."""
        scan, roles = self._scan or Scan(), self._roles
        said = list(self._files.notes)
        for text, files in list(scan.notes.items())[:_NAMED]:
            more = f" (and {len(files) - 1} more files)" if len(files) > 1 else ""
            said.append(f"data.source: {self._files.files[files[0]].path}{more}: {text}")
        passed = {*self._columns, *self._config.drop}
        left_out = [each for each in scan.index if each not in passed]
        said += [
            f"data.drop: the column {each!r} is ignored, because it looks like an index that "
            "pandas wrote; name it in data.types if it is a feature"
            for each in left_out
        ]
        said += [*(each.note for each in self._columns.values() if each.note)]
        if roles and roles.group in roles.inputs and roles.group and not self._config.splits.group:
            said.append(
                f"data.splits: {roles.group!r} is an input and also data.group, so the rows of a "
                f"group are in several splits; set data.splits: {{group: {roles.group}}} to keep "
                "each group in one split"
            )
        broken = scan.broken
        if broken.unlabelled:
            name, mark = broken.first_unlabelled[0][2], broken.unlabelled_mark
            kept = f"; set data.types: {{{name}: text}} if {mark!r} is a class" if mark else ""
            said.append(f"{broken.says_unlabelled(self._files.place)} and are left out{kept}")
        if broken.count:
            where = "; ".join(broken.first(self._files.place))
            said.append(
                f"data.bad_rows: {broken.count} of {broken.rows} rows are broken and skipped: "
                f"{where}"
            )
        return said

    def facts(self) -> Mapping[str, Any]:
        """Return the spans, the columns with their types, and the numbers of rows left out."""
        broken = (self._scan or Scan()).broken
        return {
            "spans": [*dict.fromkeys(file.span for file in self._files.files if file.span)],
            "columns": describe_columns(self._columns),
            "bad_rows": broken.to_json(self._files.place),
            "unlabelled_rows": broken.unlabelled,
        }

    def _read_pieces(
        self, part: Part
    ) -> Iterator[tuple[tuple[Piece, NDArray[np.int64]], dict[str, Column], NDArray[np.bool_]]]:
        for values in part.where["pieces"]:
            piece = Piece(*values)
            broken = BrokenRows()
            for rows in self._rows(piece, broken):
                columns, bad = self._convert(rows, piece, broken)
                if not self._config.bad_rows:
                    broken.rows += len(bad)
                    broken.check(self.name, 0, self._files.place)
                yield (piece, rows.numbers), columns, bad

    def _map_pieces(self, what: str, read: Callable[[Piece, Work], _Found]) -> Iterator[_Found]:
        files = self._files
        # In a listing of images, each file is one row, so the number of rows is known.
        total = len(files.files) if files.is_listing else 0
        size = sum(each.size for each in files.files)
        # Threads suffice, because Arrow and Pillow release the GIL while they parse.
        count = self._config.runner.processes or threads.usable()
        # `work` exits before the pool. After an error, its `add` then raises and ends the threads.
        with ThreadPoolExecutor(count) as pool, Work(what, "rows", total, size=size) as work:
            yield from pool.map(lambda piece: read(piece, work), files.pieces())

    def _scan_files(self) -> Scan:
        names, said = self._files.header()
        varies = self._files.reader.varies
        # Choose the roles now, so that wrong keys are reported before all files are read.
        columns = () if varies else self._files.roles(self._config, names, said).kept
        require_few(len(columns), self._config.source)
        scan = partial(PieceScan, config=self._config, said=self._said, files=self._files)
        scan = partial(scan, names=names, wanted=columns)

        def scan_piece(piece: Piece, work: Work) -> Scan:
            pictures = self._pictures(piece)
            with self._files.local(piece.file) as path:
                return scan(path=path, piece=piece, pictures=pictures, work=work).run()

        total = Scan(names=names)
        for each in self._map_pieces("reading the files", scan_piece):
            total.merge(each)
        total.close()
        total.index = find_index(total.names, said)
        return total

    def _check_families(self, roles: ColumnRoles, scan: Scan) -> None:
        for name in roles.kept:
            found = list(scan.families.get(name, {}).values())
            if name in self._said or len(found) <= 1:
                continue
            # Pieces of one text file may differ, because the types of each are inferred separately.
            if self._files.reader.parsed and found[0][0].file == found[1][0].file:
                continue
            if name in roles.targets and {*scan.families[name]} == {"bool", "number"}:
                continue
            places = " and ".join(
                f"{kind} in {self._files.place(piece, row)}" for piece, row, kind in found[:2]
            )
            raise UserError(
                f"data.types: the column {name!r} has different types ({places}); use one type, or "
                f"set data.types: {{{name}: text}}"
            )

    def _pictures(self, piece: Piece) -> Pictures:
        files = self._files
        folder = files.folder(piece.file)
        named = files.files[piece.start : piece.stop] if files.is_listing else ()
        return Pictures(self._config.image, folder, {each.uri: each for each in named})

    def _verify(self, roles: ColumnRoles, scan: Scan) -> None:
        needed = self._list_required(roles)
        weight = scan.columns.get(roles.weight or "")
        # A float32 column has no known minimum (`lowest` is `inf`), so it may have negative values.
        below = weight and (
            weight.lowest < 0 or (weight.lowest == math.inf and "float" in weight.kinds)
        )
        doubtful = any(
            scan.columns[name].is_doubtful(column.type, required=name in needed)
            or (column.type == "image" and self._config.bad_rows)
            for name, column in self._columns.items()
        )
        if scan.broken.count or below or doubtful:
            total = BrokenRows()
            for each in self._map_pieces("checking the rows", self._count_broken):
                total.merge(each)
            scan.broken = total
        scan.broken.check_labels(self._files.place)
        scan.broken.check(self.name, self._config.bad_rows, self._files.place)

    def _count_broken(self, piece: Piece, work: Work) -> BrokenRows:
        broken = BrokenRows()
        for rows in self._rows(piece, broken):
            self._convert(rows, piece, broken)
            broken.rows += len(rows.numbers)
            work.add(len(rows.numbers), rows.size)
        return broken

    def _rows(self, piece: Piece, broken: BrokenRows) -> Iterator[Rows]:
        def add(number: int, why: str) -> None:
            broken.add(piece, number, why)
            broken.rows += 1

        with self._files.local(piece.file) as path:
            for rows in self._files.rows(path, piece, list(self._columns), add):
                for start in range(0, len(rows.numbers), _ROWS):
                    here = slice(start, start + _ROWS)
                    size = 0 if start else rows.size
                    yield Rows(rows.table.slice(start, _ROWS), rows.numbers[here], size=size)

    def _list_required(self, roles: ColumnRoles) -> set[str]:
        return {*roles.targets, roles.weight, roles.split, roles.time}

    def _convert(
        self, rows: Rows, piece: Piece, broken: BrokenRows
    ) -> tuple[dict[str, Column], NDArray[np.bool_]]:
        roles = self._roles
        assert roles
        bad = np.zeros(len(rows.numbers), np.bool_)
        needed = self._list_required(roles)
        found: dict[str, Column] = {}
        # Check labels first, because a row without a label is left out even if it has other errors.
        names = sorted(self._columns, key=lambda name: name not in roles.targets)
        for name in names:
            column = self._columns[name]
            array = pa.chunked_array(rows.table[name]).combine_chunks()
            if column.type == "image":
                spec, pictures = make_spec(column), self._pictures(piece)
                values, wrong, reasons = pictures.decode_all(spec, array.to_pylist())
                result = Values(values, wrong, "")
            else:
                result = convert_rows(column, array, required=name in needed)
                if name == roles.weight:
                    with_below = result.bad | (result.values < 0)
                    result = result._replace(bad=with_below, why="is negative or not a number")
                reasons = []
            found[name] = result.values
            if name in roles.targets:
                for place in np.flatnonzero(result.missing & ~bad):
                    given = array[int(place)].as_py()
                    mark = given.strip() if isinstance(given, str) and column.classes else ""
                    broken.add_unlabelled(piece, int(rows.numbers[place]), name, mark)
                bad |= result.missing
            for place in np.flatnonzero(result.bad & ~bad):
                given = str(array[int(place)].as_py())[:40]
                why = reasons[place] if reasons else f"{result.why} ({given!r})"
                broken.add(piece, int(rows.numbers[place]), f"{name!r} {why}")
            bad |= result.bad
        return found, bad

    def _splits(
        self, origin: str, columns: Columns, piece: Piece, numbers: NDArray[np.int64]
    ) -> NDArray[np.int8]:
        roles = self._roles
        assert roles
        if origin in SPLITS[1:]:
            return np.full(len(numbers), SPLITS.index(origin), np.int8)
        if roles.split:
            coded = pc.dictionary_encode(pa.array(columns[roles.split]))
            given = coded.dictionary.to_pylist()
            words = [each.decode() if isinstance(each, bytes) else str(each) for each in given]
            places = coded.indices.to_numpy()
            named = np.array([splits.split_named(each) for each in words], np.int8)
            found: NDArray[np.int8] = named[places]
            for row in np.flatnonzero(found < 0)[:1]:
                raise UserError(
                    f"data.splits.column: {words[places[row]]!r} is not a split "
                    f"({self._files.place(piece, int(numbers[row]))}); write train, validation or "
                    "test"
                )
            return found
        if roles.time:
            return splits.split_by_time(columns[roles.time], self._bounds)
        validation, test = self._shares()
        drawn = [roles.split_group] if roles.split_group else roles.inputs or tuple(columns)
        content = {
            name: comparable_content(columns[name], self._columns[name].classes) for name in drawn
        }
        drawn_by = hashes(content, self._config.seed)
        return splits.split_by_hash(drawn_by, validation=validation, test=test)

    def _shares(self) -> tuple[float, float]:
        assert self._scan
        named = {file.split for file in self._files.files}
        return splits.shares(self._config, self._scan.broken.rows, named)

    def _check_numbers(self, key: str, name: str, scan: Scan, more: str = "bool") -> None:
        if self._columns[name].type in (more, "int", "float", *NUMBERS_IN_WRITING):
            return
        places = "; ".join(
            f"{self._files.place(piece, row)}: {text!r}"
            for piece, row, text in scan.columns[name].texts
        )
        what = "times" if more == "time" else "numbers"
        remedy = "write them as 2026-11-23 10:30, or as" if more == "time" else "name a column of"
        raise UserError(
            f"data.{key}: {name!r} of {self._config.source} contains no "
            f"{what}{f' ({places})' if places else ''}; {remedy} numbers"
        )

    def _check_distances(self, name: str, scan: Scan) -> None:
        if self._columns[name].type in ("int", "float", "time") and scan.columns[name].is_narrow:
            lowest, highest = scan.columns[name].lowest, scan.columns[name].highest
            raise UserError(
                f"data.label: the values of {name!r} are between {lowest:.17g} and {highest:.17g}, "
                "too close together for predictions with 7 digits; subtract an offset, in the "
                "files or with data.map"
            )

    def _time_bounds(self, scan: Scan) -> tuple[float, float]:
        times = sorted(scan.times)
        if not times:
            raise UserError(
                f"data.splits.time: no row of {self._config.source} has a time in "
                f"{self._config.splits.time!r}; name another column"
            )
        counts = np.array([scan.times[each] for each in times], np.int64)
        validation, test = self._shares()
        return splits.find_bounds(times, counts, validation=validation, test=test)

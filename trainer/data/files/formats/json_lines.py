"""JSON, one object a line: nested keys become `outer/inner`; each record has keys of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa

from trainer.data.files.formats.decompression import is_compressed, opened
from trainer.data.files.formats.raw_rows import END, Broken, Piece, Reader, Rows
from trainer.errors import UserError

_BOM = b"\xef\xbb\xbf"
_AT_ONCE = 8192
# By which a missing label is refused before all is read.
_FIRST = 1000
_LONGEST = 64 << 20


class JsonReader(Reader):
    """Reads JSON lines by Python: every line is checked by itself."""

    varies = True

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the keys of the first records; later ones may have more."""
        found: dict[str, None] = {}
        with opened(path) as file:
            for line in islice(file, _FIRST):
                record = _record(line)
                if isinstance(record, dict):
                    found.update(dict.fromkeys(_flat(record)))
        if not found:
            raise UserError(
                f"data.source: {path} has no JSON object in its first {_FIRST} lines; write one "
                "object a line"
            )
        return tuple(found)

    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Cut at ends of lines."""
        if is_compressed(path):
            return [(0, END)]
        bounds, total = [0], path.stat().st_size
        with path.open("rb") as file:
            while bounds[-1] + 2 * size < total:
                file.seek(bounds[-1] + size)
                file.readline()
                if file.tell() >= total:
                    break
                bounds.append(file.tell())
        return list(pairwise([*bounds, END]))

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records; all keys of each block if no columns are named."""
        lines = enumerate(_lines(path, piece))
        while block := list(islice(lines, _AT_ONCE)):
            records, numbers = [], []
            for number, line in block:
                if not line.strip():
                    continue
                record = _record(line)
                if isinstance(record, dict):
                    records.append(_flat(record))
                    numbers.append(number)
                else:
                    broken(number, record)
            yield _rows(records, numbers, columns)

    def row(self, path: Path, piece: Piece, number: int) -> int:
        """Return the line."""
        with opened(path) as file:
            return 1 + number + sum(1 for _ in _bounded(file, 0, piece.start))


def _rows(
    records: Sequence[Mapping[str, Any]], numbers: Sequence[int], columns: Sequence[str]
) -> Rows:
    names = columns or list(dict.fromkeys(name for record in records for name in record))
    arrays, mixed = {}, set()
    for name in names:
        values = [record.get(name) for record in records]
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            mixed.add(name)
            arrays[name] = pa.array([_text(value) for value in values], pa.string())
    table = pa.table(arrays) if arrays else pa.table({"": pa.nulls(len(records))})
    return Rows(table, np.array(numbers, np.int64), frozenset(mixed))


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _record(line: bytes) -> dict[str, Any] | str:
    """Return the object of a line, or what is wrong with it."""
    try:
        found = json.loads(line.removeprefix(_BOM))
    except UnicodeDecodeError:
        return "it is not UTF-8"
    except (ValueError, RecursionError) as error:
        return f"it is no JSON ({error})"
    if b"\\ud" in line.lower() and not _is_unicode(found):
        return "it has half of a pair of surrogates (\\ud800), which is no character"
    return found if isinstance(found, dict) else f"it is a {type(found).__name__}, and no object"


def _is_unicode(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def _flat(record: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in record.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{before}{key}/"))
        else:
            found[f"{before}{key}"] = value
    return found


def _lines(path: Path, piece: Piece) -> Iterator[bytes]:
    with opened(path) as file:
        for line in _bounded(file, piece.start, piece.stop):
            if len(line) > _LONGEST:
                raise UserError(
                    f"data.source: {path} has a line of more than {_LONGEST >> 20} MiB; write one "
                    "object a line"
                )
            yield line


def _bounded(file: IO[bytes], start: int, stop: int) -> Iterator[bytes]:
    if start:
        file.seek(start)
    left = stop - start
    while (stop == END or left > 0) and (line := file.readline(_LONGEST + 1)):
        left -= len(line)
        yield line

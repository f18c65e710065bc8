"""JSON: one object per line, a list of objects, or consecutive objects.

Nested keys become `outer/inner`. Records may have different keys.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from flotilla.trainer.data.files import text_values
from flotilla.trainer.data.files.formats.raw_rows import (
    END,
    OnOpen,
    Piece,
    Record,
    RecordReader,
    is_whole,
    open_text,
)
from flotilla.trainer.runtime.errors import UserError

_BOM = b"\xef\xbb\xbf"
# Number of records from which the names of columns are read.
_FIRST = 1000
_LONGEST = 64 << 20
_CHUNK = 1 << 20
_BETWEEN = re.compile(r"[\s,]*")
# Bytes that are not UTF-8, as `surrogateescape` represents them.
_NOT_UTF8 = re.compile("[\udc80-\udcff]")
# With more than `_FEWEST` records, a file is rejected if more than `_NEARLY_ALL` of its keys occur
# only once.
_FEWEST = 20
_NEARLY_ALL = 0.9
_AS_ROWS = "write one object per line (pandas: to_json(orient='records', lines=True))"


class JsonReader(RecordReader):
    """Reads JSON with Python, and checks each record separately."""

    at_once = 8192

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the keys of the first records. Later records may have more."""
        records = [each for each in islice(_records(path, Piece(0)), _FIRST) if each is not None]
        flat = [_flat(each) if isinstance(each, dict) else each for each in records]
        objects = [each for each in flat if isinstance(each, dict)]
        if len(records) == 1 and isinstance(records[0], dict) and (why := _explain(records[0])):
            raise UserError(f"data.source: {path} is one JSON object {why}; {_AS_ROWS}")
        found = Counter(chain.from_iterable(objects))
        if not found:
            none = f" has no JSON object in its first {_FIRST} lines"
            why = f", row 1: {flat[0]}" if flat else none
            advice = "name each key once" if "occurs twice" in why else _AS_ROWS
            raise UserError(f"data.source: {path}{why}; {advice}")
        alone = [name for name, count in found.items() if count == 1]
        if len(objects) > _FEWEST and len(alone) > max(_NEARLY_ALL * len(found), len(objects) / 2):
            raise UserError(
                f"data.source: each record of {path} has different keys, such as {alone[0]!r} "
                f"and {alone[-1]!r}; write records with the same keys"
            )
        return tuple(found)

    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Divide a file at line ends."""
        if is_whole(path) or not _has_lines(path):
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

    def records(self, path: Path, piece: Piece, on_open: OnOpen) -> Iterator[Record]:
        """Yield the objects with flattened keys."""
        for record in _records(path, piece, on_open):
            yield _flat(record) if isinstance(record, dict) else record

    def array(self, _path: Path, _name: str, values: list[Any]) -> tuple[pa.Array, bool]:
        """Convert values to an array. Values of several types become strings."""
        try:
            return pa.array(values), False
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            return pa.array([_text(value) for value in values], pa.string()), True

    def row(self, path: Path, piece: Piece, number: int) -> int:
        """Return the line of a record, or the object's number if objects span several lines."""
        if not piece.start:
            return 1 + number
        with open_text(path) as file:
            return 1 + number + sum(1 for _ in _read_range(file, 0, piece.start))


def _text(value: Any) -> str | None:
    if isinstance(value, float):
        return text_values.format_float(value)
    return value if value is None or isinstance(value, str) else json.dumps(value)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        name = next(name for name, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {name!r} occurs twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _records(path: Path, piece: Piece, on_open: OnOpen = lambda _file: None) -> Iterator[Record]:
    if not _has_lines(path):
        yield from _values(path, on_open)
        return
    with open_text(path) as file:
        on_open(file)
        for line in _read_range(file, piece.start, piece.stop):
            if len(line) > _LONGEST:
                raise UserError(
                    f"data.source: {path} has a line of more than {_LONGEST >> 20} MiB; write one "
                    "object per line"
                )
            yield _record(line) if line.strip() else None


def _has_lines(path: Path) -> bool:
    """Return whether each line has one object, judging by the first line."""
    with open_text(path) as file:
        head = file.read(_CHUNK).removeprefix(_BOM).lstrip()
    line = head.partition(b"\n")[0].rstrip()
    return not (re.match(rb"\[\s*[{\]]", head) or (head[:1] == b"{" and line[-1:] in b"{[,:"))


def _record(line: bytes) -> dict[str, Any] | str:
    try:
        found = _DECODER.decode(line.removeprefix(_BOM).decode())
    except UnicodeDecodeError:
        return "it is not UTF-8"
    except (ValueError, RecursionError) as error:
        return f"it is not JSON ({error})"
    return _check_record(found, doubtful=b"\\ud" in line.lower())


def _check_record(found: Any, *, doubtful: bool) -> dict[str, Any] | str:
    if doubtful:
        try:
            json.dumps(found, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return "it contains an unpaired surrogate (\\ud800), which is not a character"
    return found if isinstance(found, dict) else f"it is a {type(found).__name__}, not an object"


def _values(path: Path, on_open: OnOpen) -> Iterator[dict[str, Any] | str]:
    """Yield the objects of a list, or consecutive objects. Read the file in chunks."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    text, at, count, more = "", 0, 0, True
    with open_text(path) as file:
        on_open(file)

        def longer() -> str:
            nonlocal more
            data = file.read(max(_CHUNK, len(text) - at))
            more = bool(data)
            return text[at:] + decoder.decode(data, final=not data)

        text, is_list = longer().removeprefix("\ufeff"), False
        while True:
            found = _BETWEEN.match(text, at)
            at = found.end() if found else at
            if at == len(text):
                if not more:
                    break
                text, at = longer(), 0
                continue
            # Concatenated files may have several lists.
            if text[at] == ("]" if is_list else "["):
                at, is_list = at + 1, not is_list
                continue
            try:
                value, end = _DECODER.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                if more and isinstance(error, json.JSONDecodeError) and len(text) - at < _LONGEST:
                    text, at = longer(), 0
                    continue
                raise UserError(
                    f"data.source: {path}, record {count + 1} is not JSON ({error}), so later "
                    "records cannot be read"
                ) from error
            count += 1
            written = text[at:end]
            if _NOT_UTF8.search(written):
                yield "it is not UTF-8"
            else:
                yield _check_record(value, doubtful="\\ud" in written.lower())
            at = end
    if is_list:
        raise UserError(
            f"data.source: {path} is truncated: it ends within a list, after record {count}; write "
            "the file again"
        )


def _explain(record: Mapping[str, Any]) -> str:
    """Explain why a file's only object is a table. Return "" if the object is a row."""
    for name, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return f"with a list of objects in {name!r}"
    if {"columns", "data"} <= record.keys():
        return "with columns and data in separate keys"
    lengths = [len(value) if isinstance(value, list) else 0 for value in record.values()]
    if len(lengths) > 1 and len({*lengths}) == 1 and lengths[0] > 1:
        return "with a list of values for each key"
    inner = [tuple(value) for value in record.values() if isinstance(value, dict)]
    if len(inner) == len(record) > 1 and len({*inner}) == 1:
        numbered = [tuple(map(str, range(len(each)))) for each in (tuple(record), inner[0])]
        if tuple(record) == numbered[0] or inner[0] == numbered[1] or len(record) > _FEWEST:
            return "with a key for each row"
    return ""


def _flat(record: Mapping[str, Any]) -> dict[str, Any] | str:
    """Return a record with flattened keys, or an error message if keys collide."""
    found: dict[str, Any] = {}
    for key, value in record.items():
        inner = _flat(value) if isinstance(value, dict) else {"": value}
        if isinstance(inner, str):
            return inner
        for name, each in inner.items():
            whole = f"{key}/{name}" if isinstance(value, dict) else key
            if whole in found:
                return f"{whole!r} occurs twice, as one key and as nested keys"
            found[whole] = each
    return found


def _read_range(file: IO[bytes], start: int, stop: int) -> Iterator[bytes]:
    if start:
        file.seek(start)
    left = stop - start
    while (stop == END or left > 0) and (line := file.readline(_LONGEST + 1)):
        left -= len(line)
        yield line

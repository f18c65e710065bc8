"""CSV: delimiters, headers, quotes, and where it is safe to cut a file. All values are texts."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv

from trainer.data.files.formats.decompression import bare_name, is_compressed, opened
from trainer.data.files.formats.raw_rows import END, Broken, Piece, Reader, Rows
from trainer.data.files.text_values import NUMBER
from trainer.errors import UserError

_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")
_DELIMITERS = ",;\t|"
_HEAD = 1 << 20
# Pyarrow reads 32 blocks ahead. Only a file with a row that takes more than one is read by more.
_BLOCKS = (1 << 20, 8 << 20)
# What pyarrow says of a row that takes more than a block.
_STRADDLING = "straddling"
_QUOTE = b'"'
# One in the middle of a field that is not quoted: then counting quotes says nothing of newlines.
_STRAY = re.compile(rb'[^,;\t|\r\n"]"[^,;\t|\r\n"]')


class Header(NamedTuple):
    """What the first record of a file says; `end` is the byte where the second one begins."""

    names: tuple[str, ...]
    delimiter: str
    end: int


class CsvReader(Reader):
    """Reads CSV by pyarrow, all values as texts."""

    parsed = True

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the columns by the header; an index without a name is left out."""
        return tuple(filter(None, _header(path).names))

    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Cut where a record ends for certain; a file whose quotes are in doubt stays whole."""
        if is_compressed(path) or path.stat().st_size < 2 * size:
            return [(0, END)]
        with path.open("rb") as file:
            ends = list(_safe_ends(file, size))
        if None in ends:
            return [(0, END)]
        bounds = [0, *(end for end in ends if end), END]
        return list(pairwise(bounds))

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records; one with too few or too many values is broken."""
        header = _header(path)
        skipped: list[int] = []

        def skip(row: Any) -> str:
            number = row.number - 1
            # Those of before are seen again with larger blocks.
            if not skipped or number > skipped[-1]:
                skipped.append(number)
                broken(number, f"{row.actual_columns} values for {row.expected_columns} columns")
            return "skip"

        done = 0
        for block in _BLOCKS:
            with _body(path, piece, header.end) as stream:
                try:
                    batches = _opened(stream, header, columns, block, skip)
                    for rows in _numbered(batches, skipped, done):
                        yield rows
                        done = int(rows.numbers[-1]) + 1
                    return
                except pa.ArrowInvalid as error:
                    if "Empty CSV" in str(error):
                        return
                    if _STRADDLING not in str(error) or block == _BLOCKS[-1]:
                        raise _unreadable(path, error) from error

    def row(self, path: Path, piece: Piece, number: int) -> int:
        """Return the line where a record begins: values with newlines take several."""
        header = _header(path)
        start = max(piece.start, header.end)
        with opened(path) as file:
            line = 1 + _newlines(file, start)
            text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
            records = csv.reader(text, delimiter=header.delimiter)
            before = 0
            for record in records:
                if record:
                    if not number:
                        return line + before
                    number -= 1
                before = records.line_num
        return line + before


def _opened(
    stream: Any, header: Header, columns: Sequence[str], block: int, skip: Callable[[Any], str]
) -> Any:
    # The names of columns that are left out need not differ from others.
    names = [name or f"\0{place}" for place, name in enumerate(header.names)]
    return arrow_csv.open_csv(
        stream,
        read_options=arrow_csv.ReadOptions(column_names=names, use_threads=False, block_size=block),
        parse_options=arrow_csv.ParseOptions(
            delimiter=header.delimiter, newlines_in_values=True, invalid_row_handler=skip
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=list(columns),
            strings_can_be_null=False,
        ),
    )


def _numbered(batches: Any, skipped: Sequence[int], done: int) -> Iterator[Rows]:
    """Yield the records from number `done` on, at least one at a time."""
    start = 0
    for batch in batches:
        # The handler is called for all records of a block before the block is returned.
        late = [each for each in skipped if each >= start]
        every = np.arange(start, start + batch.num_rows + len(late))
        kept = every[~np.isin(every, late)][: batch.num_rows]
        if len(kept):
            start = int(kept[-1]) + 1
        new = kept >= done
        if new.any():
            table = pa.Table.from_batches([batch])
            yield Rows(table if new.all() else table.filter(pa.array(new)), kept[new])


@contextmanager
def _body(path: Path, piece: Piece, begin: int) -> Iterator[Any]:
    start = max(piece.start, begin)
    if is_compressed(path):
        with opened(path) as file:
            file.read(start)
            yield pa.PythonFile(file, mode="r")
        return
    stop = path.stat().st_size if piece.stop == END else piece.stop
    with pa.OSFile(str(path)) as file:
        yield file.get_stream(start, max(0, stop - start))


def _header(path: Path) -> Header:
    with opened(path) as file:
        head = file.read(_HEAD)
    if head.startswith(_WIDE_BOMS):
        raise UserError(f"data.source: {path} is UTF-16; write it as UTF-8")
    skip = len(_BOM) if head.startswith(_BOM) else 0
    end = _first_end(head, skip)
    try:
        first = head[skip:end].decode()
    except UnicodeDecodeError:
        raise UserError(f"data.source: {path}, row 1 is not UTF-8; write it as UTF-8") from None
    if not first.strip():
        raise UserError(
            f"data.source: {path} is empty, or begins with an empty row; a header is needed"
        )
    if "\0" in first:
        raise UserError(f"data.source: {path} is no CSV, it has binary data; set data.format")
    delimiter = _delimiter(path, first)
    names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter))]
    _check_names(path, names)
    return Header(tuple(names), delimiter, end)


def _check_names(path: Path, names: Sequence[str]) -> None:
    if all(re.match(NUMBER, name) for name in names):
        raise UserError(
            f"data.source: {path} has no header: its first row is {', '.join(names[:5])}; "
            "put a row with the names of the columns before it"
        )
    double = [name for place, name in enumerate(names) if name in names[:place]]
    if double:
        where = [place + 1 for place, name in enumerate(names) if name == double[0]]
        what = f"two columns named {double[0]!r}" if double[0] else "columns without a name"
        raise UserError(f"data.source: {path}, row 1 has {what} ({where}); rename one of them")
    if "" in names[1:]:
        raise UserError(
            f"data.source: {path}, row 1 has no name for column {names.index('', 1) + 1}; name it"
        )


def _delimiter(path: Path, first: str) -> str:
    if bare_name(path.name).endswith(".tsv"):
        return "\t"
    bare = re.sub(r'"[^"]*"', "", first)
    return max(_DELIMITERS, key=bare.count)


def _first_end(head: bytes, skip: int) -> int:
    quotes = 0
    for found in re.finditer(rb'\r\n|\n|\r|"', head[skip:]):
        if found[0] == _QUOTE:
            quotes += 1
        elif quotes % 2 == 0:
            return skip + found.end()
    return len(head)


def _safe_ends(file: IO[bytes], size: int) -> Iterator[int | None]:
    """Yield ends of records `size` bytes apart, and None where one cannot be told."""
    quotes = 0
    while chunk := file.read(size):
        if _STRAY.search(chunk):
            yield None
            return
        quotes += chunk.count(_QUOTE)
        while line := file.readline():
            quotes += line.count(_QUOTE)
            if _STRAY.search(line):
                yield None
                return
            if quotes % 2 == 0:
                break
        yield file.tell() if line else 0


def _newlines(file: IO[bytes], count: int) -> int:
    found = 0
    while count > 0 and (chunk := file.read(min(count, _HEAD))):
        found += chunk.count(b"\n") or chunk.count(b"\r")
        count -= len(chunk)
    return found


def _unreadable(path: Path, error: Exception) -> UserError:
    reason = str(error).splitlines()[0]
    if "UTF8" in reason or "UTF-8" in reason:
        line = _first_not_unicode(path)
        return UserError(f"data.source: {path}, row {line} is not UTF-8; write the file as UTF-8")
    if _STRADDLING in reason:
        reason = f"a row takes more than {_BLOCKS[-1] >> 20} MiB, or a quote is not closed"
    return UserError(f"data.source: {path} is no CSV that can be read: {reason}")


def _first_not_unicode(path: Path) -> int:
    with opened(path) as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 1

"""Read the records of CSV files, and find safe positions to divide a file. Values are strings."""

from __future__ import annotations

import csv
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as arrow_csv

from flotilla.trainer.data.files.formats.csv_layout import CsvLayout, detect_layout
from flotilla.trainer.data.files.formats.raw_rows import (
    END,
    Broken,
    Piece,
    Reader,
    Rows,
    is_whole,
    open_text,
    position,
)
from flotilla.trainer.runtime.errors import UserError

_HEAD = 1 << 20
# Block sizes to try, in bytes. Pyarrow reads 32 blocks ahead, so the larger size is used only if a
# row does not fit in a smaller block.
_BLOCKS = (1 << 20, 8 << 20)
# Approximate number of bytes of a file whose rows are yielded together.
_JOINED = 8 << 20
# A word of pyarrow's error message for a row that is larger than a block.
_STRADDLING = "straddling"
_QUOTE = b'"'
# A quote in the middle of an unquoted field. If there is one, counting quotes cannot find record
# ends.
_STRAY = re.compile(rb'"(?<=[^,;\t|\r\n"]")[^,;\t|\r\n"]')


class CsvReader(Reader):
    """Reads CSV files with pyarrow. All values are strings."""

    parsed = True

    def names(self, path: Path) -> tuple[str, ...]:
        """Return the columns of the header, without unnamed columns."""
        return tuple(filter(None, detect_layout(path).names))

    def notes(self, path: Path) -> tuple[str, ...]:
        """Return remarks on the layout of the file."""
        return detect_layout(path).notes

    def cut(self, path: Path, size: int) -> list[tuple[int, int]]:
        """Divide a file at unambiguous record ends. A file with ambiguous quotes stays whole."""
        if path.stat().st_size < 2 * size or is_whole(path):
            return [(0, END)]
        layout = detect_layout(path)
        # `_safe_ends` only counts double quotes, so other quotes and escapes make the ends unknown.
        if not layout.has_lines and (layout.escape or layout.quote != _QUOTE.decode()):
            return [(0, END)]
        find = _line_ends if layout.has_lines else _safe_ends
        with path.open("rb") as file:
            ends = list(find(file, size))
        if None in ends:
            return [(0, END)]
        return list(pairwise([0, *filter(None, ends), END]))

    def rows(
        self, path: Path, piece: Piece, columns: Sequence[str], broken: Broken
    ) -> Iterator[Rows]:
        """Yield the records. A record with too few or too many values is broken."""
        layout = detect_layout(path)
        skipped: list[int] = []

        def skip(row: Any) -> str:
            number = row.number - 1
            # The second attempt, with larger blocks, repeats the same records. Report each once.
            if not skipped or number > skipped[-1]:
                skipped.append(number)
                broken(number, f"{row.actual_columns} values for {row.expected_columns} columns")
            return "skip"

        done = 0
        for block in _BLOCKS:
            with _body(path, piece, layout.start) as (stream, read):
                try:
                    batches = _open_csv(stream, layout, columns, block, skip)
                    for rows in _join(_number_rows(batches, skipped, done, block)):
                        yield replace(_right(rows, layout, columns, broken), size=read(rows.size))
                        done = int(rows.numbers[-1]) + 1
                    return
                except pa.ArrowInvalid as error:
                    if "Empty CSV" in str(error):
                        return
                    if _STRADDLING not in str(error) or block == _BLOCKS[-1]:
                        raise _describe_read_error(path, layout, error) from error

    def row(self, path: Path, piece: Piece, number: int) -> int:
        """Return the line where a record begins. A record may span several lines."""
        layout = detect_layout(path)
        start = max(piece.start, layout.start)
        with open_text(path) as file:
            line = 1 + _newlines(file, start)
            text = io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="")
            records = csv.reader(
                text,
                delimiter=layout.delimiter,
                quotechar=layout.quote or None,
                quoting=csv.QUOTE_MINIMAL if layout.quote else csv.QUOTE_NONE,
                escapechar=layout.escape or None,
            )
            before = 0
            for record in records:
                if record:
                    if not number:
                        return line + before
                    number -= 1
                before = records.line_num
        return line + before


def _open_csv(
    stream: Any, layout: CsvLayout, columns: Sequence[str], block: int, skip: Callable[[Any], str]
) -> Any:
    names = _names(layout)
    return arrow_csv.open_csv(
        stream,
        read_options=arrow_csv.ReadOptions(column_names=names, use_threads=False, block_size=block),
        parse_options=arrow_csv.ParseOptions(
            delimiter=layout.delimiter,
            quote_char=layout.quote or False,
            escape_char=layout.escape or False,
            newlines_in_values=bool(layout.quote),
            invalid_row_handler=skip,
        ),
        convert_options=arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            include_columns=[*columns, *(names[at] for at in layout.empty)],
            strings_can_be_null=False,
        ),
    )


def _names(layout: CsvLayout) -> list[str]:
    # Give unnamed columns a unique name, because pyarrow selects columns by name.
    return [name or f"\0{place}" for place, name in enumerate(layout.names)]


def _right(rows: Rows, layout: CsvLayout, columns: Sequence[str], broken: Broken) -> Rows:
    """Return the rows that are not repeated headers and have no value in unnamed columns."""
    table, names = rows.table, _names(layout)
    bad = np.zeros(len(table), np.bool_)
    for at in layout.empty:
        values = pc.utf8_trim_whitespace(table[names[at]])
        for place in np.flatnonzero(pc.not_equal(values, "").to_numpy()):
            why = f"a value ({values[int(place)].as_py()[:40]!r}) in column {at + 1}"
            broken(int(rows.numbers[place]), f"{why}, which has no name")
            bad[place] = True
    # Concatenated files repeat the header. Do not check this if a single column is read, because a
    # value may equal the column's name.
    if len(columns) > 1 and pc.any(again := pc.equal(table[columns[0]], columns[0])).as_py():
        for name in columns[1:]:
            again = pc.and_(again, pc.equal(table[name], name))
        found = again.to_numpy() & ~bad
        for place in np.flatnonzero(found):
            broken(int(rows.numbers[place]), "it repeats the header")
        bad |= found
    table = table.select(list(columns))
    return Rows(table.filter(pa.array(~bad)) if bad.any() else table, rows.numbers[~bad])


def _number_rows(batches: Any, skipped: Sequence[int], done: int, block: int) -> Iterator[Rows]:
    """Yield the records whose number is at least `done`, with their numbers."""
    start = 0
    for batch in batches:
        # Pyarrow calls the handler for all invalid records of a block before it returns the block.
        late = [each for each in skipped if each >= start]
        every = np.arange(start, start + batch.num_rows + len(late))
        kept = every[~np.isin(every, late)][: batch.num_rows] if late else every
        if len(kept):
            start = int(kept[-1]) + 1
        new = kept >= done
        if new.any():
            table = pa.Table.from_batches([batch])
            yield Rows(table if new.all() else table.filter(pa.array(new)), kept[new], size=block)


def _join(found: Iterator[Rows]) -> Iterator[Rows]:
    """Join the rows of several blocks, because each step of a scan has a fixed cost."""
    held: list[Rows] = []
    for rows in found:
        held.append(rows)
        if sum(each.size for each in held) >= _JOINED:
            yield _concatenate(held)
            held = []
    if held:
        yield _concatenate(held)


def _concatenate(held: Sequence[Rows]) -> Rows:
    table = pa.concat_tables([each.table for each in held]).combine_chunks()
    numbers = np.concatenate([each.numbers for each in held])
    return Rows(table, numbers, size=sum(each.size for each in held))


@contextmanager
def _body(path: Path, piece: Piece, begin: int) -> Iterator[tuple[Any, Callable[[int], int]]]:
    """Yield a stream, and a function that converts a size in memory to bytes of the file.

    Pyarrow reads up to 32 blocks ahead. For compressed files, the function counts these blocks too.
    """
    start, counted = max(piece.start, begin), 0

    def locate(here: int) -> int:
        nonlocal counted
        before, counted = counted, max(here, counted)
        return counted - before

    if is_whole(path):
        with open_text(path) as file:
            file.read(start)
            yield pa.PythonFile(file, mode="r"), lambda _block: locate(position(file))
        return
    size = max(0, (path.stat().st_size if piece.stop == END else piece.stop) - start)
    with pa.OSFile(str(path)) as file:
        yield file.get_stream(start, size), lambda block: locate(min(counted + block, size))


def _line_ends(file: IO[bytes], size: int) -> Iterator[int]:
    """Yield ends of lines about `size` bytes apart."""
    last = os.fstat(file.fileno()).st_size
    while file.tell() + size < last:
        file.seek(size, os.SEEK_CUR)
        file.readline()
        yield file.tell()


def _safe_ends(file: IO[bytes], size: int) -> Iterator[int | None]:
    """Yield record ends about `size` bytes apart, or None if one is ambiguous."""
    while chunk := file.read(size) + file.readline():
        lines, is_open = [chunk], chunk.count(_QUOTE) % 2
        while is_open and (line := file.readline()):
            lines.append(line)
            is_open ^= line.count(_QUOTE) % 2
        if any(map(_STRAY.search, lines)):
            yield None
            return
        yield file.tell()


def _newlines(file: IO[bytes], count: int) -> int:
    found = 0
    while count > 0 and (chunk := file.read(min(count, _HEAD))):
        found += chunk.count(b"\n") or chunk.count(b"\r")
        count -= len(chunk)
    return found


def _describe_read_error(path: Path, layout: CsvLayout, error: Exception) -> UserError:
    reason = str(error).splitlines()[0]
    # Arrow's message contains "Expected" if a row that is not UTF-8 has the wrong length.
    if "UTF8" in reason or "UTF-8" in reason or "Expected" in reason:
        return UserError(
            f"data.source: {path}, {_first_not_unicode(path, layout)}; write the file as UTF-8"
        )
    if _STRADDLING in reason:
        reason = f"a row is longer than {_BLOCKS[-1] >> 20} MiB, or a quote is not closed"
    return UserError(f"data.source: {path} is not a readable CSV file: {reason}")


def _first_not_unicode(path: Path, layout: CsvLayout) -> str:
    with open_text(path) as file:
        lines = file if layout.newline == b"\n" else iter(file.read().split(layout.newline))
        for number, line in enumerate(lines, 1):
            try:
                line.decode()
            except UnicodeDecodeError as error:
                mark = layout.delimiter.encode()
                value = line[: error.start].rpartition(mark)[2] + line[error.start :]
                guess = value.partition(mark)[0].strip()[:40].decode("cp1252", errors="replace")
                return f"row {number} is not UTF-8: perhaps {guess!r} in Windows-1252"
    return "a row is not UTF-8"

"""The layout of a CSV file: delimiter, quotes, header, and the lines around the table.

The first rows determine everything except the quotes. A quote that opens in one row and closes many
rows later swallows the rows in between. Therefore, a file with quotes is scanned to its end, in one
fast pass if all quotes are correct.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flotilla.trainer.data.files import text_values
from flotilla.trainer.data.files.formats.raw_rows import open_text
from flotilla.trainer.data.files.text_values import NUMBER
from flotilla.trainer.runtime.errors import UserError

_BOM = b"\xef\xbb\xbf"
_DELIMITERS = ",;\t|"
_HEAD = 1 << 20
_SAMPLE = 200
_VALUE_OR_NEWLINE = re.compile(rb'(?P<value>"(?<![^,;\t|\r\n]")[^"]*+(?:""[^"]*+)*+"?)|\r\n|\n|\r')
# Maximum number of lines of a quoted value in the first rows.
_MOST_LINES = 50
# Maximum number of rows above the header, such as a title.
_MOST_ABOVE = 20
_FEWEST = 2
_SEPARATOR = re.compile(rb'"?sep=(.|\\t)"?,*\r?\n', re.IGNORECASE)
_NAMED = 5
_NEARLY_ALL = 0.9
_ESCAPE = "\\"
_CHUNK = 4 << 20
# A column has a fixed set of values if at most this share of its first values is distinct.
_FEW_VALUES = 0.2
_SURE_ROWS = 5
# Part of the csv module's message for a quote within a value. The other messages of the module are
# for unclosed quotes.
_NOT_AN_END = "expected after"
# A larger quoted value is considered unclosed. The limit applies to all users of the csv module.
csv.field_size_limit(8 << 20)


@dataclass(frozen=True, kw_only=True)
class CsvLayout:
    """The layout of a CSV file.

    Attributes:
        names: names of the columns. An empty name marks a column that is left out.
        empty: indices of columns without a name, which must be empty in each row.
        quote: the quote character, or empty if quotes are ordinary characters.
        escape: the character that escapes a quote within a value, or empty if quotes are doubled.
        start: offset of the first row, in bytes.
        has_lines: whether each row is one line, because no value contains a newline.
    """

    names: tuple[str, ...]
    delimiter: str
    start: int
    has_lines: bool = False
    empty: tuple[int, ...] = ()
    quote: str = '"'
    escape: str = ""
    newline: bytes = b"\n"
    notes: tuple[str, ...] = ()


class _Record(NamedTuple):
    text: str
    end: int


def detect_layout(path: Path) -> CsvLayout:
    """Return the layout of a file. Raises `UserError`."""
    status = path.stat()
    return _infer_layout(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1024)
def _infer_layout(path: Path, size: int, changed: int) -> CsvLayout:
    del size, changed
    with open_text(path) as file:
        head = file.read(_HEAD)
    start = 0
    while head.startswith(_BOM, start):
        start += len(_BOM)
    separator = _SEPARATOR.match(head, start)
    given = ""
    if separator:
        given = separator[1].decode(errors="replace").replace("\\t", "\t")
        start = separator.end()
    newline = b"\n" if b"\n" in head else b"\r"
    first = _Head(path, _records(head[start:]), given)
    found = first.layout()
    found = replace(found, newline=newline, start=found.start + start)
    if found.quote.encode() not in head and len(head) < _HEAD:
        return replace(found, has_lines=True)
    return _Quotes(path, found, first.rows(len(found.names))).find_layout()


def _records(head: bytes) -> list[_Record]:
    """Return the first records as strings. Bytes that are not UTF-8 are escaped."""
    found: list[_Record] = []
    start = 0
    while start < len(head) and len(found) < _SAMPLE:
        end = _find_end(head, start)
        if end == len(head) >= _HEAD and found:
            break
        found.append(_Record(head[start:end].decode(errors="surrogateescape"), end))
        start = end
    return found


def _find_end(head: bytes, start: int) -> int:
    for found in _VALUE_OR_NEWLINE.finditer(head, start):
        if not found["value"]:
            return found.end()
        if found.end() == len(head) or found["value"].count(b"\n") > _MOST_LINES:
            # The end of a record cannot be found after an unclosed quote, so end the record at the
            # end of the line.
            return head.find(b"\n", found.start()) + 1 or len(head)
    return len(head)


class _Head:
    def __init__(self, path: Path, records: Sequence[_Record], given: str) -> None:
        self._path = path
        self._lines: list[int] = []
        line, kept = 1 + bool(given), []
        for each in records:
            # Skip empty rows, which Excel writes as rows of delimiters.
            if each.text.strip(f" {_DELIMITERS}{given}\r\n"):
                kept.append(each)
                self._lines.append(line)
            line += each.text.count("\n") or each.text.count("\r")
        if not kept:
            raise UserError(f"data.source: {path} is empty; write a header and rows")
        if "\0" in kept[0].text:
            raise UserError(
                f"data.source: {path} is not a CSV file, because it has binary data; set "
                "data.format to its format"
            )
        if re.match(r'\{\s*"|\[\s*[\[{]', kept[0].text) or kept[0].text.strip() in ("[", "{"):
            raise UserError(f"data.source: {path} is JSON; set data.format: jsonl")
        self._records = kept
        self._delimiter = given or _delimiter(path, [each.text for each in kept])
        self._quote = '"'
        self._rows = [_cells(each.text, self._delimiter) for each in kept]
        has_quotes = any('"' in each.text for each in kept)
        if "'" in kept[-1].text or has_quotes:
            dialect = {"escapechar": _ESCAPE} if has_quotes else {"quotechar": "'"}
            quoted = [_cells(each.text, self._delimiter, **dialect) for each in kept]
            if len({*map(len, quoted)}) == 1 < len({*map(len, self._rows)}):
                self._quote, self._rows = dialect.get("quotechar", '"'), quoted
        bodies = self._rows[1:] or self._rows
        self._width = Counter(map(len, bodies)).most_common(1)[0][0]

    def rows(self, width: int) -> list[list[str]]:
        below = self._rows[self._header() + 1 :]
        return [row for row in below if len(row) == width]

    def layout(self) -> CsvLayout:
        place = self._header()
        cells = [each.strip() for each in self._rows[place]]
        quote = self._quote
        if len(cells) >= _FEWEST and all(re.fullmatch("'[^']*'", each) for each in cells):
            quote, cells = "'", [each[1:-1] for each in cells]
        rows, notes = self.rows(self._width), []
        if place:
            notes.append(
                f"row {self._lines[place]} is the header; the lines above it are skipped "
                f"({self._records[0].text.strip()[:40]!r})"
            )
        names, index = self._fit_names(place, cells, rows)
        rows = self.rows(len(names))
        where = f"data.source: {self._path}, row {self._lines[place]}"
        if any("\udc80" <= letter <= "\udcff" for name in names for letter in name):
            raise UserError(f"{where} is not UTF-8; write the file as UTF-8")
        empty = tuple(
            at
            for at, name in enumerate(names)
            if not name and at not in index and not any(row[at].strip() for row in rows)
        )
        is_unique = len({row[0] for row in rows}) == len(rows)
        if not names[0] and 0 not in (*index, *empty) and is_unique:
            index = (0,)
        if index:
            notes.append(
                "the first column has no name and is ignored as an index; to keep it, name it"
            )
        _check(self._path, where, names, {*index, *empty})
        _check_values(self._path, names, rows)
        below = self._rows[place + 1] if place + 1 < len(self._rows) else []
        # Skip the line below the header of a Markdown table.
        is_line = any(below) and all(re.fullmatch(r":?-{2,}:?|", each.strip()) for each in below)
        notes += self._doubts(place, names, rows[is_line:])
        return CsvLayout(
            names=tuple(names),
            delimiter=self._delimiter,
            start=self._records[place + is_line].end,
            empty=empty,
            quote=quote,
            notes=tuple(notes),
        )

    def _doubts(self, place: int, names: Sequence[str], rows: Sequence[list[str]]) -> Iterator[str]:
        """Yield notes on a header that may be a row, and on a row that may be a header."""
        if numbers := _odd_numbers(names):
            yield (
                f"row {self._lines[place]} is used as the header, although names such as "
                f"{numbers[0]!r} are numbers; if it is not a header, put the names of the columns "
                "above it"
            )
        # Survey tools write the questions, and loggers the units, in a row below the header.
        columns = zip(*rows, strict=True)
        few = [each for each in columns if len({*each}) <= _FEW_VALUES * len(each)]
        is_other = all(each.count(each[0]) == 1 for each in few)
        if len(few) > 1 and is_other and _are_names([each[0] for each in few]):
            row = self._lines[self._rows.index(rows[0])]
            yield (
                f"row {row} has values that no row below it has, such as "
                f"{few[0][0].strip()[:40]!r}; remove it if it is a second header"
            )

    def _header(self) -> int:
        place = next(
            (at for at, each in enumerate(self._records) if not each.text.startswith("#")), 0
        )
        # The last row that begins with "#" may be the header.
        if place and len(self._rows[place - 1]) == self._width > 1 and not self._is_names(place):
            place -= 1
        if len(_full(self._rows[place])) > 1 and len(self._rows[place]) == self._width:
            return place
        for at in range(place, min(place + _MOST_ABOVE, len(self._rows))):
            if len(self._rows[at]) == self._width > 1 and len(_full(self._rows[at])) > 1:
                # A shorter row may be a header with missing names.
                alone = all(len(_full(row)) < _FEWEST for row in self._rows[place:at])
                names = self._is_names(at) if not alone else _are_names(self._rows[at])
                return at if names else place
        return place

    def _is_names(self, place: int) -> bool:
        """Return whether a row must be a header, because a column has only numbers below it."""
        below = [row for row in self._rows[place + 1 :] if len(row) == self._width]
        if any(text_values.is_null(cell.strip()) for cell in self._rows[place]):
            return False
        return _are_names(self._rows[place]) and any(
            all(re.match(NUMBER, row[at].strip()) for row in below)
            for at in range(len(self._rows[place]))
            if below
        )

    def _has_row_names(self, place: int, rows: Sequence[Sequence[str]]) -> bool:
        """Return whether the first column, which has no name, has the row names of R.

        R writes no name above them. They are quoted and distinct, or numbered from 1.
        """
        first = [row[0] for row in rows]
        is_quoted = all(each.text.startswith('"') for each in self._records[place:])
        return first == [str(at + 1) for at in range(len(rows))] or (
            is_quoted and len({*first}) == len(first)
        )

    def _fit_names(
        self, place: int, cells: list[str], rows: Sequence[Sequence[str]]
    ) -> tuple[list[str], tuple[int, ...]]:
        """Return a name for each value of a row, and the positions of the index columns."""
        more = self._width - len(cells)
        if not rows or not more:
            return cells, ()
        if more < 0 and not any(cells[more:]):
            return cells[:more], ()
        if more > 0 and not any(cell.strip() for row in rows for cell in row[len(cells) :]):
            return [*cells, *[""] * more], ()
        if more == 1 and len(rows) > _FEWEST and self._has_row_names(place, rows):
            return ["", *cells], (0,)
        share = len(rows) / max(1, len(self._rows) - place - 1)
        if share < _NEARLY_ALL and len(rows) > 1:
            return cells, ()
        row = next(at for at, each in enumerate(self._rows) if at > place and each is rows[0])
        cause = "add the missing names, or remove a title above the header"
        if more < 0:
            cause = "remove the extra names, or add the missing values"
        elif self._delimiter == "," and any(
            one[-1:].isdigit() and two[:1].isdigit() for row in rows for one, two in pairwise(row)
        ):
            cause = "quote numbers that have a comma, or add the missing names"
        elif re.search(r", [\"']|, '|^'", self._records[row].text):
            cause = "write texts in double quotes, right after the delimiter"
        raise UserError(
            f"data.source: {self._path}, row {self._lines[place]}: the header has {len(cells)} "
            f"names ({', '.join(cells[:_NAMED])}), but {len(rows)} of the first "
            f"{len(self._rows) - place - 1} rows have {self._width} values, such as row "
            f"{self._lines[row]}; {cause}"
        )


def _odd_numbers(names: Sequence[str]) -> list[str]:
    """Return the names that are numbers, or [] if some are and are consecutive, such as years."""
    numbers = [name for name in names if re.match(NUMBER, name)]
    if len(numbers) == len(names):
        return numbers
    counts = [int(name) for name in numbers if name.isdecimal()]
    steps = {after - before for before, after in pairwise(counts)}
    return [] if len(counts) == len(numbers) and steps <= {1} else numbers


def _check(path: Path, where: str, names: Sequence[str], left_out: set[int]) -> None:
    # pandas numbers the columns from 0 if they have no names.
    is_counted = len(names) > _FEWEST and [*names] == [str(at) for at in range(len(names))]
    if all(re.match(NUMBER, name) for name in names) and not is_counted:
        raise UserError(
            f"data.source: {path} has no header: its first row is {', '.join(names[:_NAMED])}; "
            "put a row with the names of the columns before it"
        )
    named = [name for at, name in enumerate(names) if at not in left_out]
    for name, count in Counter(named).items():
        if name and count == 1:
            continue
        places = [at + 1 for at, each in enumerate(names) if each == name]
        if name:
            raise UserError(
                f"{where} has two columns named {name!r} ({places}); rename one of them"
            )
        raise UserError(f"{where} has no name for column {places[0]}; name it")


def _check_values(path: Path, names: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Raise `UserError` if most names, except numbers, are also values of their columns."""
    texts = [at for at, name in enumerate(names) if name and not re.match(NUMBER, name)]
    below = [cells for row in rows if (cells := [cell.strip() for cell in row]) != [*names]]
    found = [at for at in texts if any(row[at] == names[at] for row in below)]
    if len(names) > 1 and 2 * len(found) > len(texts) and (len(found) > 1 or len(texts) == 1):
        raise UserError(
            f"data.source: {path} seems to have no header, because values of its first row "
            f"({', '.join(names[at] for at in found[:_NAMED])}) occur again in their columns; put "
            "a row with the names of the columns before it"
        )


def _delimiter(path: Path, texts: Sequence[str]) -> str:
    """Return the delimiter with which most rows have the same number of values."""
    best, found = (False, 0.0, 0), ""
    for mark in _DELIMITERS:
        widths = [len(_cells(text, mark)) for text in texts if not text.startswith("#")]
        width, count = Counter(widths[1:] or widths or [1]).most_common(1)[0]
        if width > 1:
            score = (widths[0] == width, count / len(widths), width)
            best, found = max((best, found), (score, mark))
    if found:
        return found
    rows = [_cells(text.strip(), " ") for text in texts]
    lengths = {len(row) for row in rows[1:]}
    blanks = {len(text.split()) for text in texts}
    is_even = len(texts) > _FEWEST and len(lengths) == 1 and lengths != {1}
    if is_even and not any("" in row for row in rows) and 0 <= len(rows[1]) - len(rows[0]) <= 1:
        return " "
    if len(texts) > _FEWEST and len(blanks) == 1 and blanks != {1}:
        raise UserError(
            f"data.source: {path} has columns of fixed width, or several spaces between columns; "
            "separate the values with commas"
        )
    return max(_DELIMITERS, key=texts[0].count)


def _cells(text: str, delimiter: str, **dialect: Any) -> list[str]:
    try:
        return next(csv.reader([text.rstrip("\r\n")], delimiter=delimiter, **dialect))
    except (csv.Error, StopIteration):
        # Ignore quotes in a row that the csv module rejects, such as one with a value above 8 MiB.
        return text.split(delimiter)


def _full(row: Sequence[str]) -> list[str]:
    return [cell for cell in row if cell.strip()]


def _are_names(row: Sequence[str]) -> bool:
    names = [cell.strip() for cell in row]
    return all(names[1:]) and len({*names}) == len(names) and not any(
        re.match(NUMBER, name) for name in names
    )  # fmt: skip


class _Quotes:
    """Determines whether quotes are doubled, escaped by backslashes, or ordinary characters."""

    def __init__(self, path: Path, layout: CsvLayout, rows: Sequence[Sequence[str]]) -> None:
        self._path, self._layout, self._rows = path, layout, rows
        self._quote, self._delimiter = layout.quote, layout.delimiter

    def find_layout(self) -> CsvLayout:
        layout, path = self._layout, self._path
        if not self._has_doubtful():
            return replace(layout, has_lines=True)
        swallows, is_odd = self._first_swallow()
        stray = self._find_stray_escape() if is_odd else None
        if stray:
            raise UserError(
                f"data.source: {path} escapes quotes with backslashes, but row {stray} has a "
                "backslash outside quotes, which may be an escape or an ordinary character; "
                'write "" for a quote within a quoted text '
                "(Spark: option('escape', '\"'))"
            )
        if stray is not None:
            return replace(layout, escape=_ESCAPE)
        if not swallows:
            return layout
        if not self._is_literal():
            raise UserError(
                f"data.source: {path}: {swallows}, so several rows are read as one value; close or "
                'remove the quote, or write "" for a quote within a quoted text'
            )
        note = (
            f"{swallows}, and all rows have {len(layout.names)} values if quotes are ignored; "
            "therefore, quotes are read as ordinary characters"
        )
        return replace(layout, quote="", has_lines=True, notes=(*layout.notes, note))

    @cached_property
    def _typical(self) -> Sequence[frozenset[str] | str]:
        return [_typical(column) for column in zip(*self._rows, strict=True)]

    def _pattern(self, text: str) -> str:
        """Return a pattern for `text` after a quote that opens a value."""
        marks = {"q": re.escape(self._quote), "d": re.escape(self._delimiter)}
        whole = "<q>(?<![^<d>\r\n]<q>)" + text
        return re.sub("<([qd])>", lambda found: marks[found[1]], whole)

    def _has_doubtful(self) -> bool:
        """Return whether a quoted value has a newline, or text between quote and delimiter."""
        text = "[^<q>\r\n]*+(?:<q><q>[^<q>\r\n]*+)*+(?:[\r\n]|<q>[^<d>\r\n])"
        pattern = re.compile(self._pattern(text).encode())
        with open_text(self._path) as file:
            file.read(self._layout.start)
            while chunk := file.read(_CHUNK):
                lines = chunk + file.readline()
                if not self._has_plain_quotes(lines) and pattern.search(lines):
                    return True
        return False

    def _has_plain_quotes(self, lines: bytes) -> bool:
        """Return whether quotes only enclose values that contain no quotes or newlines."""
        text = np.frombuffer(b"\n" + lines + b"\n", np.uint8)
        is_quote = text == ord(self._quote)
        marks = np.flatnonzero(is_quote | (text == ord("\n")) | (text == ord("\r")))
        quotes = np.flatnonzero(is_quote[marks])
        opening, closing = quotes[::2], quotes[1::2]
        if not np.array_equal(opening + 1, closing):
            return False
        ends = np.isin(np.arange(256), [*b"\r\n", *self._delimiter.encode()])
        around = text[marks[opening] - 1], text[marks[closing] + 1]
        return all(ends[each].all() for each in around)

    def _records(self, **dialect: Any) -> Iterator[tuple[int, list[str], str]]:
        """Yield each record's first row number, its lines, and the error in its quotes or ""."""
        # Allow spaces after a closing quote.
        spaces = re.compile(
            f"{re.escape(self._quote)} +(?={re.escape(self._delimiter)}|[\r\n]|\\Z)"
        )
        taken: list[str] = []

        def read(lines: Iterable[str]) -> Iterator[str]:
            for line in lines:
                taken.append(line)
                yield line if dialect else spaces.sub(self._quote, line)

        with open_text(self._path) as file:
            row = 1 + file.read(self._layout.start).count(self._layout.newline)
            lines = io.TextIOWrapper(file, "utf-8", "replace", newline="")
            marks: dict[str, Any] = {"delimiter": self._delimiter, "quotechar": self._quote}
            records = csv.reader(read(lines), strict=True, **(marks | dialect))
            while True:
                taken.clear()
                wrong = ""
                try:
                    if next(records, None) is None:
                        return
                except csv.Error as error:
                    wrong = str(error)
                yield row, taken, wrong
                row += len(taken)

    def _first_swallow(self) -> tuple[str, bool]:
        """Describe the first quoted value that swallows rows. Return whether any is malformed."""
        is_odd = False
        for row, lines, wrong in self._records():
            is_odd = is_odd or bool(wrong)
            is_closed = not wrong or _NOT_AN_END in wrong
            more = len(lines) - (is_closed or lines[-1][-1:] not in "\r\n")
            if more > 0 and (wrong or self._has_rows(lines)):
                what = f"ends in row {row + more}"
                said = what if is_closed else f"is not closed in {more} lines"
                return f"row {row} opens a quote that {said}", is_odd
        return "", is_odd

    def _has_rows(self, lines: Sequence[str]) -> bool:
        rows = [line.rstrip("\r\n") for line in lines if line.strip()]
        if not any(self._typical) and len(rows) < _SURE_ROWS:
            return False
        fits = [_fits(each.split(self._delimiter), self._typical, self._quote) for each in rows]
        return fits[0] and fits[-1] and sum(fits) >= _NEARLY_ALL * len(fits)

    def _find_stray_escape(self) -> int | None:
        """Return the row of a stray backslash (0: none), or None if backslashes are not escapes."""
        quoted = re.compile(self._pattern(r"(?:[^<q>\\]|<q><q>|\\.)*+<q>"), re.DOTALL)
        stray = 0
        for row, lines, wrong in self._records(escapechar=_ESCAPE):
            if wrong:
                return None
            text = "".join(lines)
            if not stray and _ESCAPE in text and _ESCAPE in quoted.sub("", text):
                stray = row
        return stray

    def _is_literal(self) -> bool:
        """Return whether no value is quoted, and rows have equal lengths if quotes are ignored."""
        text = r"[^<q>\r\n]*+(?:<q><q>[^<q>\r\n]*+)*+<q>(?=[<d>\r\n]|\Z)"
        quoted = re.compile(self._pattern(text))
        widths = set()
        for _, (line, *_), _ in self._records(quoting=csv.QUOTE_NONE):
            if quoted.search(line):
                return False
            if line.strip():
                widths.add(line.count(self._delimiter))
        return len(widths) == 1


def _typical(values: Sequence[str]) -> frozenset[str] | str:
    """Return a column's distinct values or the pattern of its numbers, or "" for free text."""
    if all(re.match(NUMBER, value.strip()) for value in values if value.strip()):
        return NUMBER
    few = frozenset(values)
    return few if len(few) <= _FEW_VALUES * len(values) else ""


def _fits(cells: Sequence[str], typical: Sequence[frozenset[str] | str], quote: str) -> bool:
    if len(cells) != len(typical):
        return False
    return all(
        not known
        or quote in cell
        or (
            cell in known
            if isinstance(known, frozenset)
            else not cell or re.match(known, cell.strip())
        )
        for cell, known in zip(cells, typical, strict=True)
    )

"""Detect how a CSV file uses quotes; a stray quote may swallow the rows below it."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from flotilla.trainer.data.files.formats.decompression import open_text
from flotilla.trainer.data.files.text_values import NUMBER

ESCAPE = "\\"
_CHUNK = 4 << 20
_NEARLY_ALL = 0.9
# Below this share of distinct values in its first rows, a column has a fixed set of values.
_FEW_VALUES = 0.2
_SURE_ROWS = 5
# Message of the csv module for a quote within a value; its other messages are for unclosed quotes.
_NOT_AN_END = "expected after"
# A larger quoted value is considered unclosed. The limit applies to all users of the csv module.
csv.field_size_limit(8 << 20)


@dataclass(kw_only=True)
class QuoteUse:
    """How quotes are used in a file.

    Attributes:
        swallows: where a quote swallows the rows below it, and how many; empty if none does.
        is_escaped: whether quotes within quoted values are escaped by a backslash.
        stray: if `is_escaped`, the number of a row with a backslash outside quotes; 0 if there is
            none.
        is_literal: whether all rows have the same number of values if quotes are ordinary
            characters.
    """

    swallows: str = ""
    is_escaped: bool = False
    stray: int = 0
    is_literal: bool = False


@dataclass(frozen=True, kw_only=True)
class QuoteSearch:
    """Finds out how quotes are used in a file.

    Attributes:
        path: path of the file.
        start: offset of the first row, in bytes.
        delimiter: separator of values.
        quote: the quote character.
        newline: the line separator.
        rows: some correct rows, for comparison.
    """

    path: Path
    start: int
    delimiter: str
    quote: str
    newline: bytes
    rows: Sequence[Sequence[str]]

    def use(self) -> QuoteUse:
        """Return how quotes are used; if they are correct, this takes one fast pass."""
        if not self._has_doubtful():
            return QuoteUse()
        swallows, is_odd = self._first_swallow()
        if is_odd and (escaped := self._escapes()):
            return escaped
        return QuoteUse(swallows=swallows, is_literal=bool(swallows) and self._is_literal())

    @cached_property
    def _typical(self) -> Sequence[frozenset[str] | str]:
        return [_typical(column) for column in zip(*self.rows, strict=True)]

    def _pattern(self, text: str) -> str:
        """Return a pattern for `text` after a quote that opens a value."""
        marks = {"q": re.escape(self.quote), "d": re.escape(self.delimiter)}
        whole = "<q>(?<![^<d>\r\n]<q>)" + text
        return re.sub("<([qd])>", lambda found: marks[found[1]], whole)

    def _has_doubtful(self) -> bool:
        """Return whether a quoted value has a newline, or text between quote and delimiter."""
        text = "[^<q>\r\n]*+(?:<q><q>[^<q>\r\n]*+)*+(?:[\r\n]|<q>[^<d>\r\n])"
        pattern = re.compile(self._pattern(text).encode())
        with open_text(self.path) as file:
            file.read(self.start)
            while chunk := file.read(_CHUNK):
                if pattern.search(chunk + file.readline()):
                    return True
        return False

    def _records(self, **dialect: Any) -> Iterator[tuple[int, list[str], str]]:
        """Yield each record's first row number, its lines, and the error in its quotes if any."""
        # Spaces after a closing quote are allowed.
        spaces = re.compile(f"{re.escape(self.quote)} +(?={re.escape(self.delimiter)}|[\r\n]|\\Z)")
        taken: list[str] = []

        def read(lines: Iterable[str]) -> Iterator[str]:
            for line in lines:
                taken.append(line)
                yield line if dialect else spaces.sub(self.quote, line)

        with open_text(self.path) as file:
            row = 1 + file.read(self.start).count(self.newline)
            lines = io.TextIOWrapper(file, "utf-8", "replace", newline="")
            marks: dict[str, Any] = {"delimiter": self.delimiter, "quotechar": self.quote}
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
        """Locate the first value that swallows rows; also return whether any value is malformed."""
        is_odd = False
        for row, lines, wrong in self._records():
            is_odd = is_odd or bool(wrong)
            is_closed = not wrong or _NOT_AN_END in wrong
            more = len(lines) - (is_closed or lines[-1][-1:] not in "\r\n")
            if more > 0 and (wrong or self._has_rows(lines)):
                what = f"takes {more} lines, to row {row + more}"
                said = what if is_closed else f"is not closed in {more} lines"
                return f"row {row} opens a quote that {said}", is_odd
        return "", is_odd

    def _has_rows(self, lines: Sequence[str]) -> bool:
        """Return whether the lines of a record look like rows of the table."""
        rows = [line.rstrip("\r\n") for line in lines if line.strip()]
        if not any(self._typical) and len(rows) < _SURE_ROWS:
            return False
        fits = [_fits(each.split(self.delimiter), self._typical, self.quote) for each in rows]
        return fits[0] and fits[-1] and sum(fits) >= _NEARLY_ALL * len(fits)

    def _escapes(self) -> QuoteUse | None:
        """Return the result for backslash escapes; None if records are still malformed."""
        quoted = re.compile(self._pattern(r"(?:[^<q>\\]|<q><q>|\\.)*+<q>"), re.DOTALL)
        stray = 0
        for row, lines, wrong in self._records(escapechar=ESCAPE):
            if wrong:
                return None
            text = "".join(lines)
            if not stray and ESCAPE in text and ESCAPE in quoted.sub("", text):
                stray = row
        return QuoteUse(is_escaped=True, stray=stray)

    def _is_literal(self) -> bool:
        """Return whether rows have equal lengths without quotes, and no value is quoted."""
        text = r"[^<q>\r\n]*+(?:<q><q>[^<q>\r\n]*+)*+<q>(?=[<d>\r\n]|\Z)"
        quoted = re.compile(self._pattern(text))
        widths = set()
        for _, (line, *_), _ in self._records(quoting=csv.QUOTE_NONE):
            if quoted.search(line):
                return False
            if line.strip():
                widths.add(line.count(self.delimiter))
        return len(widths) == 1


def _typical(values: Sequence[str]) -> frozenset[str] | str:
    """Return a column's distinct values or the pattern of its numbers; empty for free text."""
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

"""Quotes of a CSV: one that opens in the middle of a table may swallow the rows below it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from flotilla.trainer.data.files.formats.decompression import open_text
from flotilla.trainer.data.files.text_values import NUMBER

ESCAPE = "\\"
_CHUNK = 4 << 20
# A quoted value above this size is taken as unclosed.
_LONGEST = 8 << 20
_NEARLY_ALL = 0.9
# A column whose distinct values are below this share of the first rows has a closed set of values.
_FEW_VALUES = 0.2
_SURE_ROWS = 5


@dataclass(kw_only=True)
class QuoteUse:
    """The use of quotes in a file.

    Attributes:
        swallows: where a quote swallows the rows below it, and how many; empty if none does.
        is_escaped: whether quotes within quoted values are escaped by a backslash.
        stray: with `is_escaped`, a row with a backslash outside quotes; 0 if there is none.
        is_literal: whether all rows have equally many values when quotes are ordinary characters.
    """

    swallows: str = ""
    is_escaped: bool = False
    stray: int = 0
    is_literal: bool = False


@dataclass(frozen=True, kw_only=True)
class QuoteSearch:
    """Searches a file for quotes.

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
        """Return the use of quotes; a file with correct quotes takes one quick pass."""
        if not self._has_doubtful():
            return QuoteUse()
        swallows, is_odd = self._first_swallow()
        if is_odd and (escaped := self._escapes()):
            return escaped
        return QuoteUse(swallows=swallows, is_literal=bool(swallows) and self._is_literal())

    @cached_property
    def _typical(self) -> Sequence[frozenset[str] | str]:
        """Typical values of each column in the correct rows."""
        return [_typical(column) for column in zip(*self.rows, strict=True)]

    def _pattern(self, text: bytes) -> re.Pattern[bytes]:
        names = {b"q": re.escape(self.quote.encode()), b"d": re.escape(self.delimiter.encode())}
        # A quote opens a value only after this pattern.
        whole = rb"<q>(?<![^<d>\r\n]<q>)" + text
        return re.compile(re.sub(rb"<([qd])>", lambda found: names[found[1]], whole), re.DOTALL)

    def _chunks(self, *, whole_lines: bool) -> Iterator[bytes]:
        with open_text(self.path) as file:
            file.read(self.start)
            while chunk := file.read(_CHUNK):
                yield chunk + (file.readline() if whole_lines else b"")

    def _has_doubtful(self) -> bool:
        """Return whether a quoted value has a newline, or text between quote and delimiter."""
        pattern = self._pattern(rb"[^<q>\r\n]*+(?:<q><q>[^<q>\r\n]*+)*+(?:[\r\n]|<q>[^<d>\r\n])")
        return any(pattern.search(chunk) for chunk in self._chunks(whole_lines=True))

    def _values(self, pattern: re.Pattern[bytes]) -> Iterator[tuple[int, bytes, re.Match[bytes]]]:
        """Yield the quoted values: the row, and the match with its buffer."""
        with open_text(self.path) as file:
            row = 1 + file.read(self.start).count(self.newline)
            buffer, done, data = b"", 0, b" "
            while data:
                data = file.read(_CHUNK)
                buffer, done = buffer[max(0, done - 1) :] + data, min(done, 1)
                for found in pattern.finditer(buffer, done):
                    is_short = found.end() - found.start() < _LONGEST
                    if data and found.end() >= len(buffer) - 1 and is_short:
                        break
                    row += buffer.count(self.newline, done, found.start())
                    yield row, buffer, found
                    row += found[0].count(self.newline)
                    done = found.end()
                else:
                    # The last character may precede a quote.
                    end = max(done, len(buffer) - 1)
                    row += buffer.count(self.newline, done, end)
                    done = end
                    continue
                row += buffer.count(self.newline, done, found.start())
                done = found.start()

    def _first_swallow(self) -> tuple[str, bool]:
        """Locate the first value that swallows rows, and say whether any is malformed."""
        pattern = self._pattern(rb"[^<q>]*+(?:<q><q>[^<q>]*+)*+(<q>?)")
        after = re.compile(rb" *(?:\Z|[\r\n]|%b)" % re.escape(self.delimiter.encode()))
        is_odd = False
        for row, buffer, found in self._values(pattern):
            lines = found[0].count(self.newline)
            is_right = bool(found[1]) and bool(after.match(buffer, found.end()))
            is_odd = is_odd or not is_right
            if lines and not (is_right and not self._has_rows(buffer, found)):
                if not found[1]:
                    return f"row {row} opens a quote that is not closed in {lines} lines", is_odd
                return (
                    f"row {row} opens a quote that takes {lines} lines, to row {row + lines}",
                    is_odd,
                )
        return "", is_odd

    def _has_rows(self, buffer: bytes, found: re.Match[bytes]) -> bool:
        """Return whether the lines of a value look like rows of the table."""
        begin = 1 + buffer.rfind(self.newline, 0, found.start())
        end = buffer.find(self.newline, found.end())
        text = buffer[begin : end if end >= 0 else len(buffer)].decode(errors="replace")
        lines = [each.rstrip("\r") for each in text.split(self.newline.decode()) if each.strip()]
        if not any(self._typical) and len(lines) < _SURE_ROWS:
            return False
        fits = [_fits(each.split(self.delimiter), self._typical, self.quote) for each in lines]
        return fits[0] and fits[-1] and sum(fits) >= _NEARLY_ALL * len(fits)

    def _escapes(self) -> QuoteUse | None:
        """Return the use with backslash escapes; None if values are still malformed."""
        pattern = self._pattern(rb"[^<q>\\]*+(?:(?:<q><q>|\\[<q>\\])[^<q>\\]*+)*+(<q>?)")
        ends = (b"", b"\r", b"\n", self.delimiter.encode())
        within: Counter[int] = Counter()
        for row, buffer, found in self._values(pattern):
            if not found[1] or buffer[found.end() : found.end() + 1] not in ends:
                return None
            if b"\\" in found[0]:
                for at, line in enumerate(found[0].split(self.newline), row):
                    within[at] += line.count(b"\\")
        return QuoteUse(is_escaped=True, stray=self._stray(within))

    def _stray(self, within: Mapping[int, int]) -> int:
        """Return a row with more backslashes than its quotes contain; 0 if there is none."""
        with open_text(self.path) as file:
            row = 1 + file.read(self.start).count(self.newline)
            for at, line in enumerate(file, row):
                if line.count(b"\\") > within.get(at, 0):
                    return at
        return 0

    def _is_literal(self) -> bool:
        """Return whether rows have equal lengths without quotes, and no value is within quotes."""
        quoted = self._pattern(rb"[^<q>\r\n]*+(?:<q><q>[^<q>\r\n]*+)*+<q>(?=[<d>\r\n]|\Z)")
        widths: Counter[int] = Counter()
        for chunk in self._chunks(whole_lines=True):
            if quoted.search(chunk):
                return False
            widths.update(
                line.count(self.delimiter.encode())
                for line in chunk.split(self.newline)
                if line.strip()
            )
        return len(widths) == 1


def _typical(values: Sequence[str]) -> frozenset[str] | str:
    """Return the distinct values of a column or the pattern of its numbers; empty for free text."""
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

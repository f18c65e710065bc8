"""How a CSV uses quotes: one that opens in the middle of a table may take the rows below it."""

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
# A quoted value that takes more is not closed.
_LONGEST = 8 << 20
_NEARLY_ALL = 0.9
# A column of the first rows with fewer different values than this share has these alone.
_FEW_VALUES = 0.2
_SURE_ROWS = 5


@dataclass(kw_only=True)
class QuoteUse:
    """How a file uses quotes.

    Attributes:
        swallows: says where a quote takes the rows below it, and how many; empty for nowhere.
        is_escaped: whether quotes within quoted values have a backslash before them.
        stray: a row with a backslash outside quotes, where `is_escaped`; 0 for none.
        is_literal: whether all rows have as many values where quotes are letters.
    """

    swallows: str = ""
    is_escaped: bool = False
    stray: int = 0
    is_literal: bool = False


@dataclass(frozen=True, kw_only=True)
class QuoteSearch:
    """Looks through a file.

    Attributes:
        path: of the file.
        start: byte at which its first row begins.
        delimiter: between values.
        quote: what quotes a value.
        newline: by which rows are counted.
        rows: some that are right, by which others are known.
    """

    path: Path
    start: int
    delimiter: str
    quote: str
    newline: bytes
    rows: Sequence[Sequence[str]]

    def use(self) -> QuoteUse:
        """Say how quotes are used; of a file whose quotes are right, in one quick pass."""
        if not self._has_doubtful():
            return QuoteUse()
        swallows, is_odd = self._first_swallow()
        if is_odd and (escaped := self._escapes()):
            return escaped
        return QuoteUse(swallows=swallows, is_literal=bool(swallows) and self._is_literal())

    @cached_property
    def _typical(self) -> Sequence[frozenset[str] | str]:
        """What values each column has in the rows that are right."""
        return [_typical(column) for column in zip(*self.rows, strict=True)]

    def _pattern(self, text: bytes) -> re.Pattern[bytes]:
        names = {b"q": re.escape(self.quote.encode()), b"d": re.escape(self.delimiter.encode())}
        # A quote opens a value only where this begins.
        whole = rb"<q>(?<![^<d>\r\n]<q>)" + text
        return re.compile(re.sub(rb"<([qd])>", lambda found: names[found[1]], whole), re.DOTALL)

    def _chunks(self, *, whole_lines: bool) -> Iterator[bytes]:
        with open_text(self.path) as file:
            file.read(self.start)
            while chunk := file.read(_CHUNK):
                yield chunk + (file.readline() if whole_lines else b"")

    def _has_doubtful(self) -> bool:
        """Say whether a quoted value has a newline, or more between its quote and the delimiter."""
        pattern = self._pattern(rb"[^<q>\r\n]*+(?:<q><q>[^<q>\r\n]*+)*+(?:[\r\n]|<q>[^<d>\r\n])")
        return any(pattern.search(chunk) for chunk in self._chunks(whole_lines=True))

    def _values(self, pattern: re.Pattern[bytes]) -> Iterator[tuple[int, bytes, re.Match[bytes]]]:
        """Yield the quoted values: the row, and the match with what it is in."""
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
                    # The last letter may be one before a quote.
                    end = max(done, len(buffer) - 1)
                    row += buffer.count(self.newline, done, end)
                    done = end
                    continue
                row += buffer.count(self.newline, done, found.start())
                done = found.start()

    def _first_swallow(self) -> tuple[str, bool]:
        """Say where the first value is that takes rows, and whether any is not well-formed."""
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
        """Say whether the lines of a value are rows of the table."""
        begin = 1 + buffer.rfind(self.newline, 0, found.start())
        end = buffer.find(self.newline, found.end())
        text = buffer[begin : end if end >= 0 else len(buffer)].decode(errors="replace")
        lines = [each.rstrip("\r") for each in text.split(self.newline.decode()) if each.strip()]
        if not any(self._typical) and len(lines) < _SURE_ROWS:
            return False
        fits = [_fits(each.split(self.delimiter), self._typical, self.quote) for each in lines]
        return fits[0] and fits[-1] and sum(fits) >= _NEARLY_ALL * len(fits)

    def _escapes(self) -> QuoteUse | None:
        """Return the use where a backslash is before a quote; None if values are odd then too."""
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
        """Return a row with more backslashes than are in its quotes; 0 for none."""
        with open_text(self.path) as file:
            row = 1 + file.read(self.start).count(self.newline)
            for at, line in enumerate(file, row):
                if line.count(b"\\") > within.get(at, 0):
                    return at
        return 0

    def _is_literal(self) -> bool:
        """Say whether rows have one length without quotes, and no value is within quotes."""
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
    """Return the values that a column has, the pattern of numbers, or nothing of texts."""
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

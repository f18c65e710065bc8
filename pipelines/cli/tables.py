"""Tables that fit the width of a terminal, and that are complete in a file or a pipe.

Cells are never truncated or wrapped within a word, so that ids and URIs can be copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from rich.console import Console, ConsoleOptions
from rich.text import Text

from flotilla.trainer.runtime.masking import join_lines

# Number of spaces between two columns. There are two, so that a program can distinguish them from
# a space between words.
_GAP = 2
_NOTHING = "-"
Row = Mapping[str, str | Text]
_Columns = Mapping[str, Sequence[Text]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells below column headers. Control characters in the cells are escaped.

    Attributes:
        spare: columns that are dropped, in this order, if the terminal is too narrow.
        right: right-aligned columns.
        words: columns whose cells are sentences, which may wrap.
        once: columns that, on a terminal, show a value only if it differs from the row above.
        short: shorter headers for a narrow terminal, explained above the table.
        has_heads: whether the first line contains the headers.
    """

    rows: Sequence[Row]
    spare: Sequence[str] = ()
    right: Collection[str] = ()
    words: Collection[str] = ()
    once: Collection[str] = ()
    short: Mapping[str, str] = field(default_factory=dict)
    has_heads: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Draw the columns that fit on a terminal, or all columns in a file or a pipe."""
        yield from self.lines(options.max_width if console.file.isatty() else None)

    def lines(self, width: int | None) -> list[Text]:
        """Return the lines of the table for a terminal of this width. None means no limit."""
        if not self.rows:
            return []
        columns = {title: self._column(title, width) for title in self.rows[0]}
        rooms = {title: _room(each) for title, each in columns.items()}
        if width is None:
            return self._block(columns, rooms)
        if self.short and _total_width(rooms.values()) > width:
            return self._shorten_heads(width)
        for title in self.spare:
            if _total_width(rooms.values()) > width:
                del columns[title], rooms[title]
        narrow = self._narrow(columns, rooms, width)
        blocks = [list(rooms)] if _total_width(narrow.values()) <= width else _split(rooms, width)
        lines: list[Text] = []
        for number, titles in enumerate(blocks):
            lines += [Text()] if lines else []
            # In the blocks after the first, skip rows whose cells are all empty.
            adding = [row for row in self.rows if not number or any(row[t] for t in titles[1:])]
            table = replace(self, rows=adding)
            part = {title: table._column(title, width) for title in titles}
            lines += self._block(part, self._narrow(part, rooms, width))
        return lines

    def _shorten_heads(self, width: int) -> list[Text]:
        rows = [{self.short.get(title, title): row[title] for title in row} for row in self.rows]
        right = [self.short.get(title, title) for title in self.right]
        table = replace(self, rows=rows, right=right, short={}).lines(width)
        return [*(Text(f"{new}  {old}") for old, new in self.short.items()), Text(), *table]

    def _column(self, title: str, width: int | None) -> list[Text]:
        cells = [escape_controls(row[title]).copy() for row in self.rows]
        if width is None:
            cells = [each if each.plain else Text(_NOTHING) for each in cells]
        elif title in self.once:
            before = [None, *(each.plain for each in cells)]
            cells = [
                Text() if each.plain == last else each
                for each, last in zip(cells, before, strict=False)
            ]
        head = Text(title, style="bold")
        # Set the alignment on each text, because Rich reads it from there.
        for each in (head, *cells):
            each.justify = "right" if title in self.right else "left"
        return [head, *cells]

    def _narrow(self, columns: _Columns, rooms: Mapping[str, int], width: int) -> dict[str, int]:
        """Return the column widths. Columns of words shrink to their longest word if needed."""
        found = {title: rooms[title] for title in columns}
        least = {
            title: max(word.cell_len for each in columns[title] for word in each.split(" "))
            for title in columns
            if title in self.words
        }
        while _total_width(found.values()) > width:
            able = [title for title, most in least.items() if found[title] > most]
            if not able:
                break
            found[max(able, key=found.__getitem__)] -= 1
        return found

    def _block(self, columns: _Columns, rooms: Mapping[str, int]) -> list[Text]:
        lines = []
        for cells in list(zip(*columns.values(), strict=True))[0 if self.has_heads else 1 :]:
            placed = list(zip(cells, rooms.values(), strict=True))
            lines_of = (wrap_text(cell, room) for cell, room in placed)
            for parts in zip_longest(*lines_of, fillvalue=Text()):
                line = Text(" " * _GAP).join(
                    _pad(part, *place) for part, place in zip(parts, placed, strict=True)
                )
                line.rstrip()
                line.no_wrap, line.overflow = True, "ignore"
                lines.append(line)
        return lines


def escape_controls(text: str | Text) -> Text:
    """Return a text as one line without control characters, which is safe for a terminal."""
    given = text if isinstance(text, Text) else Text(text)
    line = join_lines(given.plain)
    if line == given.plain:
        return given
    made = given.blank_copy(line)
    for each in given.spans:
        begin, end = (len(join_lines(given.plain[:at])) for at in (each.start, each.end))
        made.stylize(each.style, begin, end)
    return made


def _room(cells: Sequence[Text]) -> int:
    return max(each.cell_len for each in cells)


def _total_width(rooms: Iterable[int]) -> int:
    return sum(room + _GAP for room in rooms) - _GAP


def _split(rooms: Mapping[str, int], width: int) -> Iterator[list[str]]:
    """Divide the columns into blocks that fit the width. Each block repeats the first column."""
    first, *others = rooms
    block = [first]
    for title in others:
        if len(block) > 1 and _total_width(rooms[each] for each in [*block, title]) > width:
            yield block
            block = [first]
        block.append(title)
    yield block


def wrap_text(cell: Text, room: int) -> list[Text]:
    """Wrap a text between words."""
    lines: list[Text] = []
    for word in cell.split(" "):
        if lines and lines[-1].cell_len + 1 + word.cell_len <= room:
            lines[-1] = Text(" ").join([lines[-1], word])
        else:
            lines.append(word)
    return lines if cell.cell_len > room else [cell]


def _pad(part: Text, cell: Text, room: int) -> Text:
    space = Text(" " * max(room - part.cell_len, 0))
    return space + part if cell.justify == "right" else part + space

"""The one form of tables: what fits a terminal, and all of it in a file or a pipe.

No cell is cut, and none is wrapped within a word: an id or a URI can be copied from every table.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from rich.console import Console, ConsoleOptions
from rich.text import Text

from flotilla.trainer.runtime.masking import unbroken

# Between two columns, so that a program can tell them from words.
_GAP = 2
_NOTHING = "-"
Row = Mapping[str, str | Text]
_Columns = Mapping[str, Sequence[Text]]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of cells, of which a text is shown as it is, by the heads of their columns.

    Attributes:
        spare: columns that are left out where there is no room, in this order.
        right: columns of numbers.
        words: columns whose cells are sentences, which go on in a further line.
        once: columns whose value is drawn again only where it changes.
        short: shorter heads for a narrow terminal, which are explained above the table.
        has_heads: whether the first line has the heads.
    """

    rows: Sequence[Row]
    spare: Sequence[str] = ()
    right: Collection[str] = ()
    words: Collection[str] = ()
    once: Collection[str] = ()
    short: Mapping[str, str] = field(default_factory=dict)
    has_heads: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        """Draw what fits, or all that there is where nobody looks."""
        yield from self.lines(options.max_width if console.file.isatty() else None)

    def lines(self, width: int | None) -> list[Text]:
        """Return the lines of the table for a terminal of this width; all of it for None."""
        if not self.rows:
            return []
        columns = {title: self._column(title, width) for title in self.rows[0]}
        rooms = {title: _room(each) for title, each in columns.items()}
        if width is None:
            return self._block(columns, rooms)
        if self.short and _taken(rooms.values()) > width:
            return self._shortened(width)
        for title in self.spare:
            if _taken(rooms.values()) > width:
                del columns[title], rooms[title]
        narrow = self._narrowed(columns, rooms, width)
        blocks = [list(rooms)] if _taken(narrow.values()) <= width else _split(rooms, width)
        lines: list[Text] = []
        for number, titles in enumerate(blocks):
            lines += [Text()] if lines else []
            # Below the first block a row is there for what it adds.
            adding = [row for row in self.rows if not number or any(row[t] for t in titles[1:])]
            table = replace(self, rows=adding)
            part = {title: table._column(title, width) for title in titles}
            lines += self._block(part, self._narrowed(part, rooms, width))
        return lines

    def _shortened(self, width: int) -> list[Text]:
        """Return the lines of the table with its short heads, below what these are short for."""
        rows = [{self.short.get(title, title): row[title] for title in row} for row in self.rows]
        right = [self.short.get(title, title) for title in self.right]
        table = replace(self, rows=rows, right=right, short={}).lines(width)
        return [*(Text(f"{new}  {old}") for old, new in self.short.items()), Text(), *table]

    def _column(self, title: str, width: int | None) -> list[Text]:
        """Return the head and the cells of a column."""
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
        # Sides of a text, which rich keeps next to it.
        for each in (head, *cells):
            each.justify = "right" if title in self.right else "left"
        return [head, *cells]

    def _narrowed(self, columns: _Columns, rooms: Mapping[str, int], width: int) -> dict[str, int]:
        """Return the room of columns; of words less, as far as the longest one leaves some."""
        found = {title: rooms[title] for title in columns}
        least = {
            title: max(word.cell_len for each in columns[title] for word in each.split(" "))
            for title in columns
            if title in self.words
        }
        while _taken(found.values()) > width:
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
                    _padded(part, *place) for part, place in zip(parts, placed, strict=True)
                )
                line.rstrip()
                line.no_wrap, line.overflow = True, "ignore"
                lines.append(line)
        return lines


def escape_controls(text: str | Text) -> Text:
    """Return a text as a terminal shows it: on one line, and no command for the terminal."""
    given = text if isinstance(text, Text) else Text(text)
    line = unbroken(given.plain)
    if line == given.plain:
        return given
    made = given.blank_copy(line)
    for each in given.spans:
        begin, end = (len(unbroken(given.plain[:at])) for at in (each.start, each.end))
        made.stylize(each.style, begin, end)
    return made


def _room(cells: Sequence[Text]) -> int:
    return max(each.cell_len for each in cells)


def _taken(rooms: Iterable[int]) -> int:
    return sum(room + _GAP for room in rooms) - _GAP


def _split(rooms: Mapping[str, int], width: int) -> Iterator[list[str]]:
    """Yield the columns of each block that fits the width; the first column begins all of them."""
    first, *others = rooms
    block = [first]
    for title in others:
        if len(block) > 1 and _taken(rooms[each] for each in [*block, title]) > width:
            yield block
            block = [first]
        block.append(title)
    yield block


def wrap_text(cell: Text, room: int) -> list[Text]:
    """Return a text in lines that are as long as there is room, and never end within a word."""
    lines: list[Text] = []
    for word in cell.split(" "):
        if lines and lines[-1].cell_len + 1 + word.cell_len <= room:
            lines[-1] = Text(" ").join([lines[-1], word])
        else:
            lines.append(word)
    return lines if cell.cell_len > room else [cell]


def _padded(part: Text, cell: Text, room: int) -> Text:
    space = Text(" " * max(room - part.cell_len, 0))
    return space + part if cell.justify == "right" else part + space

"""Text on the terminal: tables of runs, how a run ended, and the console that prints them.

Tables fit the width of a terminal, and are complete in a file or a pipe. Cells are never truncated
or wrapped within a word, so that ids and URIs can be copied.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

from flotilla.components.table import EXIT_STEP, name_step_of
from flotilla.pipelines.runs.outcome import RunResult, find_model, measure_duration
from flotilla.trainer import storage
from flotilla.trainer.events.progress import duration
from flotilla.trainer.report.headline import describe_constant, main_value
from flotilla.trainer.report.wording import key_metrics
from flotilla.trainer.runtime.masking import join_lines, one_line
from flotilla.trainer.runtime.streams import discard

if TYPE_CHECKING:
    from flotilla.components.records.step_record import StepRecord
    from flotilla.pipelines.runs.kfp_run import RemoteRun, Step

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
        rooms = {title: max(cell.cell_len for cell in each) for title, each in columns.items()}
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


# Terminals that support hyperlinks (OSC 8), recognized by the variables that they set.
_PROGRAMS = ("ghostty", "Hyper", "iTerm.app", "rio", "terminology", "vscode", "WezTerm", "zed")
_TERMS = ("alacritty", "contour", "foot", "wezterm", "xterm-ghostty", "xterm-kitty")
_VARIABLES = ("DOMTERM", "KITTY_WINDOW_ID", "KONSOLE_VERSION", "WT_SESSION")
# Version numbers of VTE 0.50 and later.
_VTE = re.compile(r"[5-9]\d{3}|\d{5,}")
_COLOURS = {
    "done": "green",
    "blessed": "green",
    "refused": "red",
    "failed": "red",
    "interrupted": "yellow",
    "canceled": "yellow",
    "running": "cyan",
    "ending": "yellow",
}


class Terminal(Console):
    """A console that keeps working if the reader closes the stream.

    The run then continues and ends with its usual exit code. All text is escaped, so that it cannot
    control the terminal, contain markup or start a new line.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        """Turn off markup and emoji, so that `package.module:x:` is printed unchanged."""
        super().__init__(stderr=stderr, highlight=False, emoji=False, markup=False)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print lines without wrapping them, so that their content can be copied."""
        super().print(*objects, **{"soft_wrap": True, **options})

    @property
    def can_redraw(self) -> bool:
        """Whether lines can be redrawn in place (not in a file or with TERM=dumb)."""
        return self.is_terminal and not self.is_dumb_terminal

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Escape control characters in all printed and live text."""
        if isinstance(renderable, str | Text):
            renderable = escape_controls(renderable)
        return super().render(renderable, options)

    def on_broken_pipe(self) -> None:
        """Discard further output, because the inherited method would exit and end the run."""
        discard(self.file)

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError:
            # A run must not fail because its display on standard error fails. A failure to write
            # the result to standard output is reported.
            if self.file is not sys.stderr:
                raise
            discard(self.file)


def mark(status: str) -> Text:
    """Return the status of a step or a run as colored text."""
    # Use no color for an unknown status, which a newer version may have recorded.
    return Text(status, _COLOURS.get(status, ""))


def closing_table(result: RunResult) -> Table:
    """Return the table of a run's stages, with step, status, duration and key metrics."""
    rows: list[Row] = [
        {
            "step": name_step_of(each.step),
            "stage": each.step,
            "status": mark(each.status),
            "duration": duration(each.seconds),
            "metrics": _metrics(each.metrics),
        }
        for each in result.steps
    ]
    return Table(rows=rows, right=("duration",), words=("metrics",), once=("step",))


def show_result(console: Console, result: RunResult) -> None:
    """Print the table of all stages, then the published URIs, one per line."""
    console.print(closing_table(result))
    where = [
        (step.step, text)
        for step in result.steps
        # Leave out the report, whose URI is printed later as the last line.
        if step.step != EXIT_STEP.name and (text := display_path(step.uri))
    ]
    if where:
        console.print()
    width = max((len(name) for name, _ in where), default=0)
    for name, text in where:
        # Never truncate or wrap URIs, because users copy them.
        console.print(f"{name:<{width}}  {text}")


_GOOD, _BAD = ("blessed", "done", "trained"), ("refused", "failed")


def show_verdict(console: Console, result: RunResult, *, is_said: bool = False) -> None:
    """Print how a run ended and the path of its report.

    The text is wrapped on a terminal. If the failure was already printed (`is_said`), the headline
    is left out.
    """
    room = console.width if console.file.isatty() else sys.maxsize
    for line in verdict_lines(result)[1 if is_said else 0 :]:
        for part in wrap_text(escape_controls(line), room):
            console.print(part)
    if report := result.artifacts.get("report"):
        console.print(_link(console, report))


def verdict_lines(result: RunResult) -> list[Text]:
    """Return the colored lines that tell how a run ended.

    These are the headline, the positive classes, the reasons for a refusal, and the notes.
    """
    notes = result.notes
    colour = "red" if result.status in _BAD else "yellow"
    if result.status in _GOOD and not notes:
        colour = "green"
    return [
        Text(one_line(result.headline), colour),
        *(Text(one_line(str(each))) for each in result.measured.get("positive") or ()),
        *(Text.assemble(("-", "red"), " ", one_line(each)) for each in result.reasons),
        *(Text(f"note: {one_line(each)}", "yellow") for each in notes),
    ]


def display_path(uri: str) -> str:
    """Convert a local URI to a path, which is relative if it is below the current folder."""
    path = storage.local_path(uri) if uri else None
    if path is None:
        return uri
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def takes_links(stream: IO[str], environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a stream is a terminal that is known to support hyperlinks."""
    term = environment.get("TERM", "")
    if not stream.isatty() or environment.get("NO_COLOR") or term in ("", "dumb"):
        return False
    if forced := environment.get("FORCE_HYPERLINK"):
        return forced != "0"
    # A terminal multiplexer drops hyperlinks or prints their codes, unless configured otherwise.
    if term.startswith(("screen", "tmux")):
        return False
    vte = environment.get("VTE_VERSION", "")
    return (
        term.startswith(_TERMS)
        or environment.get("TERM_PROGRAM") in _PROGRAMS
        or _VTE.fullmatch(vte) is not None
        or any(map(environment.get, _VARIABLES))
    )


def link_address(path: Path) -> str:
    """Return the `file:` URL of a path, with the host name, because the terminal may be remote."""
    return f"file://{quote(socket.gethostname())}{quote(os.fsencode(path.absolute()))}"


def _link(console: Console, uri: str) -> Text:
    path = storage.local_path(uri)
    is_linked = path is not None and takes_links(console.file)
    style = Style(link=link_address(path)) if path is not None and is_linked else ""
    return Text(display_path(uri), style)


def _metrics(metrics: Mapping[str, Any]) -> Text:
    found = Text(" ".join(f"{name}={text}" for name, text in key_metrics(metrics).items()))
    found.highlight_regex(r"\bdecision=refused\b", "red")
    return found


# States that have different names in Flotilla and KFP.
_STATUS = {
    "PENDING": "waiting",
    "RUNTIME_STATE_UNSPECIFIED": "waiting",
    "SUCCEEDED": "done",
    "CANCELING": "ending",
}


def steps_table(run: RemoteRun) -> Table:
    """Return the table of the steps of a KFP run, with state, duration and current stage."""
    rows: list[Row] = []
    for each in run.steps:
        at = run.doing.get(each.name) if each.state == "RUNNING" else None
        rows.append(
            {
                "step": each.name,
                "status": word(each.state),
                "duration": duration(each.seconds),
                "stage": at.step if at else "",
                "progress": str(at.metrics.get("progress", "")) if at else "",
            }
        )
    return Table(rows=rows, right=("duration",), words=("progress",))


def remote_runs_table(runs: Iterable[RemoteRun]) -> Table:
    """Return the table of the runs on a KFP instance, with the states that KFP reports."""
    rows: list[Row] = [
        {
            "run": run.run_id,
            "name": run.name,
            "state": word(run.state),
            "began UTC": stamp(run.created),
            "duration": duration((run.finished - run.created).total_seconds())
            if run.finished and run.created
            else "",
        }
        for run in runs
    ]
    return Table(rows=rows, spare=("duration", "began UTC"), right=("duration",))


def runs_table(runs: Iterable[RunResult]) -> Table:
    """Return the table of the runs on this machine."""
    rows: list[Row] = []
    for run in runs:
        moment, seconds = measure_duration(run)
        rows.append(
            {
                "run": run.run_id,
                "verdict": mark(run.status),
                "model": find_model(run),
                "began UTC": stamp(moment),
                "duration": "" if seconds is None else duration(seconds),
                "metric": _far(run),
                "constant": describe_constant(run.measured),
            }
        )
    # The columns that a narrow terminal drops, in this order. The id of the run already contains
    # the model and the date. The metric is kept, because it matters most.
    spare = ("constant", "model", "began UTC", "duration")
    return Table(rows=rows, spare=spare, right=("duration", "constant"), words=("metric",))


def _far(run: RunResult) -> str:
    """Return the main metric of a run, or the progress of its training if there is no metric."""
    if value := main_value(run.measured):
        return value
    reached = [each.metrics for each in run.steps if each.status == "running"]
    for each in reached:
        if each.get("global_step") and each.get("steps"):
            epoch = f", epoch {each['epoch']:.3g}" if each.get("epoch") else ""
            return f"step {each['global_step']}/{each['steps']}{epoch}"
        if text := each.get("progress"):
            return str(text)
    return ""


def word(state: str) -> Text:
    """Return Flotilla's name for a KFP state, in its color."""
    return mark(_STATUS.get(state, state.lower()))


def stamp(moment: datetime | None) -> str:
    """Format a time for a table, to the minute."""
    return f"{moment:%Y-%m-%d %H:%M}" if moment else ""


def step_line(step: Step, at: StepRecord | None) -> Text:
    """Return the line that shows a step of a KFP run, with its current stage."""
    if step.state == "RUNNING":
        stage = f": {at.step}" if at and at.step != step.name else ""
        return Text(f"{step.name}{stage} ...")
    seconds = f" in {duration(step.seconds)}" if step.state in ("SUCCEEDED", "FAILED") else ""
    return Text.assemble(f"{step.name} ", word(step.state), seconds)

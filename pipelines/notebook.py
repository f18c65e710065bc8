"""Formats results for notebooks: a heading and a small table, escaped, without secrets."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from flotilla.trainer.report.wording import format_value, round_value
from flotilla.trainer.runtime.masking import join_lines

# Maximum number of rows that a notebook shows.
_MOST_ROWS = 100


def short(name: str, *words: object, **metrics: object) -> str:
    """Return a one-line text such as `RunResult(digits-1 blessed, accuracy=0.97)`."""
    said = " ".join(str(each) for each in words if each not in ("", None))
    values = [f"{key}={round_value(value)}" for key, value in metrics.items() if value is not None]
    return join_lines(f"{name}({', '.join(filter(None, [said, *values]))})")


def card(heading: str, facts: Mapping[str, object]) -> str:
    """Return an HTML table of the non-empty facts, below a heading."""
    rows = [(name, value) for name, value in facts.items() if value not in ("", None, (), {}, [])]
    return table(heading, ("", ""), rows)


def table(heading: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table of at most the first 100 rows, below a heading."""
    found = [[_cell(value) for value in row] for row in rows]
    left = len(found) - _MOST_ROWS
    lines = [f"<p><b>{_escape(heading)}</b></p><table>"]
    if any(heads):
        lines.append(f"<tr>{''.join(f'<th>{_escape(head)}</th>' for head in heads)}</tr>")
    lines += [
        f"<tr>{''.join(f'<td>{_escape(cell)}</td>' for cell in row)}</tr>"
        for row in found[:_MOST_ROWS]
    ]
    return "".join([*lines, "</table>", f"<p>and {left} more rows</p>" if left > 0 else ""])


def _cell(value: object) -> str:
    return round_value(value) if isinstance(value, float) else format_value(value)


def _escape(text: str) -> str:
    return html.escape(join_lines(text))

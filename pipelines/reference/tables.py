"""Tables and words of Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

NOTICE = "<!-- Made from the code by `make golden`; change the descriptions there. -->"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; a bar or a line break in a cell is written so that it stays in its cell."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def code(value: object) -> str:
    """Return a value as a person writes it into YAML, set as code."""
    return f"`{value if isinstance(value, str) and value else json.dumps(value)}`"


def codes(values: Iterable[object]) -> str:
    """Return several values, set as code."""
    return ", ".join(map(code, values))


def paragraph(text: str) -> str:
    """Return a docstring as Markdown: without its indentation, paragraphs kept."""
    parts = (" ".join(part.split()) for part in text.strip().split("\n\n"))
    return "\n\n".join(parts)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")

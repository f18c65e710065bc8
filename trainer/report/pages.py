"""The Jinja environment for all HTML pages, with autoescaping and without scripts."""

from __future__ import annotations

from pathlib import Path

import jinja2

from flotilla.trainer.events.progress import duration
from flotilla.trainer.report.rules import sentence
from flotilla.trainer.report.wording import (
    format_value,
    interval_text,
    like,
    round_value,
    spell_metric,
    title_metric,
)
from flotilla.trainer.runtime.masking import printable

_OWN = Path(__file__).parent


def environment(folder: Path = _OWN) -> jinja2.Environment:
    """Return an environment for templates in `folder`, which may include this package's."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _OWN]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals["share"] = like(0.5)
    made.filters.update(
        duration=duration,
        formatted=format_value,
        interval=interval_text,
        rounded=round_value,
        sentence=sentence,
        spoken=spell_metric,
        titled=title_metric,
        words=lambda name: str(name).replace("_", " "),
    )
    return made

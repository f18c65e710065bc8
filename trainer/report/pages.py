"""The environment of every page: escaped, without script, with one style and one set of words."""

from __future__ import annotations

from pathlib import Path

import jinja2

from trainer.report.wording import duration, formatted, interval_text, rounded, sentence, titled

_OWN = Path(__file__).parent


# What turns the direction of the text around it: a rule would be read from the right.
_TURNING = dict.fromkeys(
    (*range(0x202A, 0x202F), *range(0x2066, 0x206A)), "\N{REPLACEMENT CHARACTER}"
)


def _in_order(value: object) -> object:
    return value.translate(_TURNING) if isinstance(value, str) else value


def environment(folder: Path = _OWN) -> jinja2.Environment:
    """Return the environment of the templates in `folder`; those of this room can be included."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, _OWN]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=_in_order,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters.update(
        duration=duration,
        formatted=formatted,
        interval=interval_text,
        rounded=rounded,
        sentence=sentence,
        titled=titled,
        words=lambda name: str(name).replace("_", " "),
    )
    return made

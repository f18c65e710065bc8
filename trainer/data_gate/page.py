"""The page of a validation: findings, and each feature next to that of the champion's dataset."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from trainer.data_gate.profile import DatasetProfile
from trainer.masking import masked

_TEMPLATE = Path(__file__).with_name("page.html.j2")


def render(
    tree: Mapping[str, Any], dataset: DatasetProfile, champion: DatasetProfile | None
) -> bytes:
    """Return the page as HTML; all that the data says is escaped."""
    text = _template().render(tree=tree, dataset=dataset, champion=champion)
    return masked(text).encode(errors="backslashreplace")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATE.parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(_TEMPLATE.name)

"""`docs/reference/components.md`: the inputs and outputs of every component."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from pipelines.reference.tables import NOTICE, code, paragraph, table
from trainer.parameters import run_parameters

_HEAD = f"""{NOTICE}
# Components

The steps of the pipeline, each a KFP component of its own;
[how to use one alone](../how-to/reuse-components.md). Big things are never inputs: every `String`
that names one holds the URI of a published directory.
"""


def components(made: Iterable[Any]) -> str:
    """Return the page for components, as KFP has made them."""
    return f"{_HEAD}\n{''.join(map(_component, made))}"


def _component(made: Any) -> str:
    spec = made.component_spec
    rows = [*_inputs(spec), *_outputs(spec)]
    told = paragraph(made.description or "")
    return f"## `{made.name}`\n\n{told}\n\n{table(('', 'name', 'type', 'default'), rows)}\n"


def _inputs(spec: Any) -> Iterator[tuple[str, ...]]:
    given = spec.inputs or {}
    keys = {each.name for each in run_parameters()}
    # The first step takes all of them; another one may take a few by itself.
    whole = keys <= given.keys()
    if whole:
        yield "input", "[every run parameter](parameters.md) of the configuration", "", ""
    for name, each in given.items():
        if not (whole and name in keys):
            yield "input", code(name), _type(each), code(each.default) if each.optional else ""


def _outputs(spec: Any) -> Iterator[tuple[str, ...]]:
    for name, each in (spec.outputs or {}).items():
        yield "output", code(name), _type(each), ""


def _type(each: Any) -> str:
    # KFP adds the version of its own schemas.
    return str(each.type).partition("@")[0]

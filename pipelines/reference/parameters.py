"""`docs/reference/parameters.md`: the run parameters of the pipeline, as its YAML declares them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelines.reference.tables import NOTICE, code, table
from trainer.parameters import Parameter, run_parameters

_TITLES = ("parameter", "type", "default", "key", "meaning")
_HEAD = f"""{NOTICE}
# Run parameters

What the KFP UI asks for when a run is created or scheduled, with the defaults that
`flotilla compile` writes into the YAML. Almost each is one key of the
[configuration](configuration.md), with the dots as underscores. A key that holds a list or a
mapping is one parameter of JSON text, such as `{{"accuracy": 0.97}}`; YAML is understood there too.
The first step, `resolve_config`, checks all of them together and ends the run with one line when a
value is not allowed.
"""


def parameters(declared: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page for the parameters that a compiled pipeline declares, by name."""
    known = {each.name: each for each in run_parameters()}
    own = sorted(declared.keys() - known)
    rows = (_row(name, declared[name], known.get(name)) for name in [*known, *own])
    return f"{_HEAD}\n{table(_TITLES, rows)}"


def _row(name: str, told: Mapping[str, Any], parameter: Parameter | None) -> tuple[str, ...]:
    kind = str(told["parameterType"])
    if parameter is None:
        default = code(told.get("defaultValue", ""))
        return code(name), kind, default, "", told.get("description", "")
    key = code(".".join(parameter.key))
    kind = f"{kind}, JSON" if parameter.is_json else kind
    # The YAML has every number as a float.
    return code(name), kind, code(parameter.default), key, parameter.description

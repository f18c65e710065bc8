"""`docs/reference/parameters.md`: the run parameters of the pipeline in KFP."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from pipelines.reference.tables import NOTICE, code, table
from trainer.parameters import Parameter, run_parameters

_KFP = {str: "STRING", int: "NUMBER_INTEGER", float: "NUMBER_DOUBLE", bool: "BOOLEAN"}
_HEAD = f"""{NOTICE}
# Run parameters

What the KFP UI asks for when a run is created or scheduled, and what `flotilla compile` writes into
the YAML as defaults. Each is one key of the [configuration](configuration.md), with the dots as
underscores. A key that holds a list or a mapping is one parameter of JSON text, such as
`{{"accuracy": 0.97}}`; YAML is understood there too. The first step, `resolve_config`, checks all
of them together and ends the run with one line when a value is not allowed.
"""


def parameters(signature: inspect.Signature) -> str:
    """Return the page for the signature of the pipeline."""
    known = {each.name: each for each in run_parameters()}
    rows = (_row(each, known) for each in signature.parameters.values())
    return f"{_HEAD}\n{table(('parameter', 'type', 'default', 'key', 'meaning'), rows)}"


def _row(given: inspect.Parameter, known: Mapping[str, Parameter]) -> tuple[str, ...]:
    parameter = known.get(given.name)
    kind = _KFP[given.annotation]
    if parameter is None:
        return (code(given.name), kind, code(given.default), "", "of the pipeline alone")
    key = ".".join(parameter.key)
    kind = f"{kind}, JSON" if parameter.is_json else kind
    return (code(given.name), kind, code(given.default), code(key), parameter.description)

"""The contract of a compiled pipeline with the code in its image: the interface of its steps.

The YAML holds the source of each component, and calls the code in the image. A digest of the
signatures of the steps shows that both mean the same; a release that changes no step keeps it.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from flotilla.components.table import STEPS
from flotilla.trainer.runtime.errors import ConfigError

#: Of the command of the first step, which KFP's executor passes over. What follows is the mark: the
#: Flotilla that has compiled it, and the digest of its steps.
OPTION = "--compiled_by"
# To be raised when what passes between steps changes its meaning, and no signature shows it.
_REVISION = 3
_LENGTH = 12


@functools.cache
def mark() -> str:
    """Return version and digest of this code."""
    return f"{version('kfp-flotilla')} {_digest()}"


def mark_component(component: Any) -> Any:
    """Let a KFP component name the code that has compiled it; not inside a running step."""
    if hasattr(component, "component_spec"):
        component.component_spec.implementation.container.args += [OPTION, mark()]
    return component


def find_mark(arguments: Sequence[Any]) -> str:
    """Return the mark among the arguments of a command; empty where there is none."""
    given = list(arguments)
    return str(given[given.index(OPTION) + 1]) if OPTION in given[:-1] else ""


def is_of_this_code(compiled_by: str) -> bool:
    """Return whether a mark, or none, is that of a pipeline with the steps of this code."""
    return compiled_by.rpartition(" ")[2] == _digest()


def check() -> None:
    """Raise a `ConfigError` unless this step was compiled for the steps of this code."""
    compiled_by = find_mark(sys.argv)
    if not is_of_this_code(compiled_by):
        refuse(compiled_by)


def refuse(compiled_by: str) -> NoReturn:
    """Raise a `ConfigError`: a pipeline with this mark has other steps than this code."""
    theirs, own = describe_mark(compiled_by), describe_mark(mark())
    raise ConfigError(
        f"the pipeline was compiled by {theirs}, and the image has {own}: their steps "
        "differ; upload the pipeline again with the version of the image (`flotilla upload`), and "
        "make a schedule of it again (`flotilla reschedule`), or set the run parameter image to "
        "the image that it was compiled for"
    )


def describe_mark(compiled_by: str) -> str:
    """Return a mark in words."""
    if not compiled_by:
        return "a Flotilla that left no mark"
    number, _, digest = compiled_by.partition(" ")
    return f"Flotilla {number} (steps {digest})"


@functools.cache
def _digest() -> str:
    signatures = [str(_REVISION), *(_signature(step.name) for step in STEPS)]
    return hashlib.sha256("\n".join(signatures).encode()).hexdigest()[:_LENGTH]


def required_arguments(name: str) -> set[str]:
    """Return the names of what a component takes that has no default."""
    taken = _function(name).args
    return {each.arg for each in taken.args[: len(taken.args) - len(taken.defaults)]}


def _signature(name: str) -> str:
    """Return the signature of a component, from its source: nothing has to be imported."""
    function = _function(name)
    taken = [f"{each.arg}: {_written(each.annotation)}" for each in function.args.args]
    return f"{name}({', '.join(taken)}) -> {_written(function.returns)}"


def _function(name: str) -> ast.FunctionDef:
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"components/{name}.py has no function {name}")


def _written(annotation: ast.expr | None) -> str:
    return ast.unparse(annotation) if annotation else ""

"""The container image of all steps and training tasks, and the mark of the code in it.

The compiled YAML contains the source of each component, which calls code in the image. A digest of
the component signatures and of `_REVISION` shows whether the YAML and the image match.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

from flotilla.components.kfp_internals import add_arguments
from flotilla.components.table import STEPS
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.storage.uri import BOTO_KEYS, KFP_KEYS, KFP_SECRET

IMAGE = "flotilla-python:0.1.0"


def component(function: Callable[..., Any]) -> Any:
    """Make a KFP component from a function. Inside a running step, return the function itself."""
    from kfp import dsl

    # Inside a running step, KFP does not load its compiler, so `dsl.component` does not exist.
    if not hasattr(dsl, "component"):
        return function
    return dsl.component(function, base_image=IMAGE, install_kfp_package=False)


#: Keys of the store's secret. Each key becomes an environment variable of the same name.
SECRET_KEYS = (*KFP_KEYS, *BOTO_KEYS)


@dataclass(frozen=True, kw_only=True)
class PodDefaults:
    """The run's image, and the name of the secret with the credentials of its object store."""

    image: str = IMAGE
    store_secret: str = KFP_SECRET

    def secret_env(self) -> dict[str, str]:
        """Return the secret's variables in the format of `cluster.kubernetes.pod.secret_env`."""
        return {key: f"{self.store_secret}/{key}" for key in SECRET_KEYS if self.store_secret}


DEFAULTS = PodDefaults()

#: Option in the command of the first step. KFP's executor ignores it. Its value is a mark: the
#: Flotilla version that compiled the pipeline, and a digest of the signatures of its steps.
MARK_OPTION = "--compiled_by"
# Increase this number if no signature changes, but a value passed between steps changes its meaning
# or a component, also one of a sweep, calls other functions of the image.
_REVISION = 4
_LENGTH = 12


@functools.cache
def own_mark() -> str:
    """Return the mark of this code: the Flotilla version, and a digest of the steps' signatures."""
    return f"{version('kfp-flotilla')} {_digest()}"


def mark_component(component: Any) -> Any:
    """Add the mark to the command of a KFP component. Do nothing inside a running step."""
    add_arguments(component, [MARK_OPTION, own_mark()])
    return component


def find_mark(arguments: Sequence[Any]) -> str:
    """Return the mark in a command's arguments, or an empty string if there is none."""
    given = list(arguments)
    return str(given[given.index(MARK_OPTION) + 1]) if MARK_OPTION in given[:-1] else ""


def is_of_this_code(compiled_by: str) -> bool:
    """Return whether the digest in a pipeline's mark matches this code; False for an empty mark."""
    return compiled_by.rpartition(" ")[2] == _digest()


def check_mark() -> None:
    """Raise a `ConfigError` if the pipeline of the running step does not match this code."""
    compiled_by = find_mark(sys.argv)
    if not is_of_this_code(compiled_by):
        refuse_mark(compiled_by)


def refuse_mark(compiled_by: str) -> NoReturn:
    """Raise the `ConfigError` for a pipeline that does not match this code."""
    theirs, own = describe_mark(compiled_by), describe_mark(own_mark())
    raise ConfigError(
        f"the pipeline was compiled by {theirs}, but the image contains {own} with different "
        "steps; with the Flotilla version of the image, upload the pipeline again (`flotilla "
        "upload`) and recreate its schedules (`flotilla reschedule`), or set the run parameter "
        "'image' to an image that matches the pipeline"
    )


def describe_mark(compiled_by: str) -> str:
    """Return a readable form of a mark for messages."""
    if not compiled_by:
        return "an unknown version of Flotilla"
    number, _, digest = compiled_by.partition(" ")
    return f"Flotilla {number} (steps {digest})"


@functools.cache
def _digest() -> str:
    signatures = [str(_REVISION), *(_signature(step.name) for step in STEPS)]
    return hashlib.sha256("\n".join(signatures).encode()).hexdigest()[:_LENGTH]


def required_arguments(name: str) -> set[str]:
    """Return the names of a component's arguments that have no default."""
    taken = _function(name).args
    return {each.arg for each in taken.args[: len(taken.args) - len(taken.defaults)]}


def _signature(name: str) -> str:
    function = _function(name)
    taken = [f"{each.arg}: {_format_annotation(each.annotation)}" for each in function.args.args]
    return f"{name}({', '.join(taken)}) -> {_format_annotation(function.returns)}"


def _function(name: str) -> ast.FunctionDef:
    text = Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8")
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return node
    raise LookupError(f"components/{name}.py has no function {name}")


def _format_annotation(annotation: ast.expr | None) -> str:
    return ast.unparse(annotation) if annotation else ""

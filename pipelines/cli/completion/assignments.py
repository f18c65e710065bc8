"""Completion of `--set SECTION.KEY=VALUE`: configuration keys and their values."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from flotilla.pipelines.cli.completion.candidates import Found, never_fail

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


@never_fail
def complete_assignments(incomplete: str) -> Found:
    """Offer the sections and keys after the last dot, or the values of a key after its `=`."""
    key, equals, _ = incomplete.partition("=")
    path, _, last = key.rpartition(".")
    fields = _section(path).model_fields
    if equals:
        return [(f"{key}={value}", "") for value in _values(key, fields[last])]
    before = f"{path}." if path else ""
    return [
        (f"{before}{name}{'.' if _inner(field) else '='}", field.description or "")
        for name, field in fields.items()
    ]


def _section(path: str) -> type[BaseModel]:
    from flotilla.trainer.config.schema import Config

    found: type[BaseModel] = Config
    for name in path.split(".") if path else ():
        inner = _inner(found.model_fields[name])
        if inner is None:
            raise ValueError(f"{path} is not a section")
        found = inner
    return found


def _inner(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a section, or None for any other key, such as a list of sections."""
    from pydantic import BaseModel

    # Skip `Literal` types, because they are not classes.
    kinds = [each for each in _kinds(field.annotation) if isinstance(each, type)]
    return next((each for each in kinds if issubclass(each, BaseModel)), None)


def _kinds(kind: Any) -> Iterator[Any]:
    origin, args = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from _kinds(args[0])
    elif origin in (Union, types.UnionType):
        for each in args:
            yield from _kinds(each)
    elif origin is None or origin is Literal:
        yield kind


def _values(key: str, field: FieldInfo) -> list[str]:
    from flotilla.trainer.config.base import AUTO, AUTOMATIC, OR_AUTO

    default = AUTO if field.default == AUTOMATIC else field.default
    found = [default] if isinstance(default, str | bool | int | float) else []
    for kind in _kinds(field.annotation):
        found += get_args(kind) if get_origin(kind) is Literal else []
        found += [False, True] if kind is bool else []
    found += _names(key)
    found += [AUTO] if OR_AUTO in field.metadata else []
    texts = (each if isinstance(each, str) else json.dumps(each) for each in found)
    return [*dict.fromkeys(filter(None, texts))]


def _names(key: str) -> tuple[str, ...]:
    from flotilla.trainer.config.base import AUTO
    from flotilla.trainer.config.model import MODELS
    from flotilla.trainer.config.optimizer import OF_MODEL, OPTIMIZERS
    from flotilla.trainer.config.schema import STRATEGIES, TASKS

    known = {
        "model.name": (AUTO, *MODELS),
        "task.name": (AUTO, *TASKS),
        "training.strategy": STRATEGIES,
        "training.optimizer.name": (*OPTIMIZERS, OF_MODEL),
    }
    return known.get(key, ())

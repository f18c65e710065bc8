"""`docs/reference/configuration.md`: every key of the configuration, from the config model."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelines.reference.tables import NOTICE, code, codes, paragraph, table
from trainer.config import Config
from trainer.schedule_config import ARGS, ScheduleConfig

_WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "`true` or `false`",
    type(None): "`null`",
}
# A type may have a bound, and the key a stricter one.
_BOUNDS: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "ge": ("at least", max),
    "gt": ("above", max),
    "le": ("at most", min),
    "lt": ("below", min),
}
# From here on a power of two is the end of what a machine can count, and says more as such.
_LARGE = 2**31
_TITLES = ("key", "type", "default", "allowed", "meaning")
_HEAD = f"""{NOTICE}
# Configuration

A run is one YAML file, and `--set section.key=value` over it, as often as needed. A key that is
left out has its default; a key that is not in this list, a value of another type or out of bounds
is refused by name before anything starts (exit code 2). `configs/digits.yaml` shows every key in
one file; [parameters.md](parameters.md) names the run parameters of KFP that are made of them.

Numbers may be written as `1e-3`. In `cluster.kubernetes` a *name*, a *key*, a *value* and a
*variable* are texts as Kubernetes takes them. A key of one role is laid over that of
`cluster.kubernetes.pod`: a mapping key by key, all else as a whole where it is not empty.
"""


def configuration() -> str:
    """Return the page."""
    sections = "".join(_section(Config, "", set()))
    return f"{_HEAD}\n{sections}{_relations()}"


def _section(model: type[BaseModel], path: str, seen: set[type[BaseModel]]) -> Iterator[str]:
    """Yield the part of a section, and of all sections in it; one that was there is referred to."""
    title = f"## `{path}`\n\n" if path else "## The file\n\n"
    yield f"{title}{paragraph(model.__doc__ or '')}\n\n"
    seen.add(model)
    yield table(_TITLES, (_row(path, name, field) for name, field in model.model_fields.items()))
    yield "\n"
    if model is ScheduleConfig:
        yield from _schedules(path)
    for name, field in model.model_fields.items():
        inner, where = _inner(field.annotation), _joined(path, name)
        if inner and inner not in seen:
            is_list = get_origin(field.annotation) is tuple
            yield from _section(inner, f"{where}[]" if is_list else where, seen)


def _schedules(path: str) -> Iterator[str]:
    for name, model in ARGS.items():
        yield f"### `{path}.args` of `{name}`\n\n{paragraph(model.__doc__ or '')}\n\n"
        if fields := model.model_fields.items():
            yield table(_TITLES, (_row(f"{path}.args", key, field) for key, field in fields))
            yield "\n"


def _row(path: str, name: str, field: FieldInfo) -> tuple[str, ...]:
    where = _joined(path, name)
    inner = _inner(field.annotation)
    said = field.description or paragraph(inner.__doc__ or "") if inner else field.description or ""
    if inner and inner is field.annotation:
        return (code(where), "section", "", "", said)
    kind = _annotated((field.annotation, *field.metadata))
    return (code(where), kind, _default(field), _allowed(field), said)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _inner(kind: Any) -> type[BaseModel] | None:
    """Return the section that a key holds, or holds a list of."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return next(filter(None, map(_inner, get_args(kind))), None)


def _type(kind: Any) -> str:
    args = get_args(kind)
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return "sections"
    if origin := get_origin(kind):
        return _COMPOSED[origin](args)
    return _WORDS[kind]


def _annotated(args: tuple[Any, ...]) -> str:
    return next((each for each in args[1:] if isinstance(each, str)), "") or _type(args[0])


def _mapping(args: tuple[Any, ...]) -> str:
    # What only the code can check that the values are for.
    return "mapping" if args[1] is Any else f"mapping of {_type(args[0])} to {_type(args[1])}"


def _union(args: tuple[Any, ...]) -> str:
    return " or ".join(map(_type, args))


_COMPOSED: dict[Any, Callable[[tuple[Any, ...]], str]] = {
    Annotated: _annotated,
    Literal: lambda _args: "text",
    Union: _union,
    types.UnionType: _union,
    tuple: lambda args: f"list of {_type(args[0])}",
    dict: _mapping,
}


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "none: it has to be said"
    value = field.default
    return code(list(value) if isinstance(value, tuple) else value)


def _allowed(field: FieldInfo) -> str:
    kind = field.annotation
    words = [
        f"{word} {_number(stricter(values))}"
        for name, (word, stricter) in _BOUNDS.items()
        if (values := _bounds(field, name))
    ]
    if least := _bounds(field, "min_length"):
        words.append("not empty" if least == [1] else f"{_number(max(least))} or more of them")
    choices = kind if get_origin(kind) is Literal else next(iter(get_args(kind)), None)
    if get_origin(choices) is Literal:
        words.append(codes(get_args(choices)))
    return ", ".join(words)


def _bounds(field: FieldInfo, name: str) -> list[float]:
    found = (getattr(each, name, None) for each in field.metadata)
    return [each for each in found if each is not None]


def _number(value: float) -> str:
    if value >= _LARGE and not int(value) & (int(value) - 1):
        return f"2^{int(value).bit_length() - 1}"
    return f"{value:.15g}"


def _relations() -> str:
    """Return what keys have to be to each other: the words of the checks themselves."""
    checks = Config.__pydantic_decorators__.model_validators
    rules = [" ".join((getattr(Config, name).__doc__ or "").split()) for name in checks]
    listed = "".join(f"- {rule}\n" for rule in rules if rule)
    return f"## What keys have to be to each other\n\n{listed}"

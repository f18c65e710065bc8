"""The configuration as flat run parameters: `training.optimizer.name` is `training_optimizer_name`.

Kubeflow Pipelines has typed scalars; a key that holds a list, a mapping or free values is a
parameter of JSON text, and one that holds a word or a mapping takes either. Both directions are
derived from the config model, so that a new key of the configuration is a run parameter without
further code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from types import UnionType
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from trainer.config.base import Section, Whole
from trainer.config.load import parse_config, parse_value
from trainer.config.schema import Config
from trainer.errors import ConfigError

_SCALARS = (str, int, float, bool)


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One run parameter: its name and type for KFP, and the key of the configuration it sets.

    `choices` are all values that it may have; empty where they cannot be listed. `is_either` says
    that it takes a word or the JSON text of a mapping.
    """

    name: str
    key: tuple[str, ...]
    type: type[str] | type[int] | type[float] | type[bool]
    is_json: bool
    default: str | int | float | bool
    description: str
    choices: tuple[str, ...] = ()
    is_either: bool = False


def run_parameters() -> tuple[Parameter, ...]:
    """Return a parameter for every leaf of the configuration, in its order."""
    return tuple(_leaves(Config, ()))


def to_parameters(config: Config) -> dict[str, Any]:
    """Return the value of every run parameter for `config`."""
    return {p.name: _flat(config, p) for p in run_parameters()}


def from_parameters(values: Mapping[str, Any]) -> Config:
    """Build the configuration from run parameters, as KFP passes them.

    Raises:
        ConfigError: a value is not allowed, or a JSON text is not JSON.
    """
    tree: dict[str, Any] = {}
    for parameter in run_parameters():
        node = tree
        for part in parameter.key[:-1]:
            node = node.setdefault(part, {})
        node[parameter.key[-1]] = _deep(values[parameter.name], parameter)
    return parse_config(tree)


def _leaves(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[Parameter]:
    for name, field in model.model_fields.items():
        key = (*path, name)
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section) and not issubclass(kind, Whole):
            yield from _leaves(kind, key)
            continue
        is_json = kind not in _SCALARS and not isinstance(field.default, str)
        scalar = kind if kind in _SCALARS else str
        yield Parameter(
            name="_".join(key),
            key=key,
            type=scalar,  # type: ignore[arg-type]
            is_json=is_json,
            default=_text(field.default) if is_json else scalar(field.default),
            description=_described(field.description or "", kind, is_json=is_json),
            choices=tuple(_choices(kind)) if get_origin(kind) is Literal else (),
            is_either=get_origin(kind) is UnionType,
        )


def _described(description: str, kind: Any, *, is_json: bool) -> str:
    """Return the description of a parameter: its meaning, allowed words and form."""
    choices = [word for word in _choices(kind) if word not in description]
    take = "one of" if get_origin(kind) is Literal else "some of"
    words = f"{description}; {take}: {', '.join(_choices(kind))}" if choices else description
    return f"{words} (JSON)" if is_json else words


def _choices(kind: Any) -> list[str]:
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [word for each in get_args(kind) for word in _choices(each)]


def _text(value: Any) -> str:
    """Return JSON; of a section only the values that are not the default."""
    return json.dumps(value, default=_set_values)


def _set_values(section: BaseModel) -> dict[str, Any]:
    return section.model_dump(mode="json", exclude_defaults=True)


def _flat(config: Config, parameter: Parameter) -> Any:
    value: Any = reduce(getattr, parameter.key, config)
    as_text = parameter.is_json or (parameter.is_either and not isinstance(value, str))
    return _text(value) if as_text else parameter.type(value)


def _deep(value: Any, parameter: Parameter) -> Any:
    is_mapping = parameter.is_either and value.lstrip().startswith("{")
    if not (parameter.is_json or is_mapping):
        return value
    with suppress(ValueError):
        return json.loads(value)
    try:
        return parse_value(value)
    except ConfigError:
        key = ".".join(parameter.key)
        example = f", such as {parameter.default}" if parameter.default else ""
        raise ConfigError(f"{key}: {value!r} is not JSON{example}") from None

"""Converts settings of other forms: mappings in Python, and the run parameters of old pipelines.

A mapping may be nested or have dotted keys. It becomes `section.key=value` strings, which the
parser of `--set` checks.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypedDict

from pydantic import BaseModel

from flotilla.trainer.config.base import Section, Whole
from flotilla.trainer.config.form import FIELDS
from flotilla.trainer.config.load import is_section, parse_config, parse_value
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.storage.uri import KFP_SECRET

Settings = Mapping[str, Any] | Sequence[str]
# Characters that JSON does not escape, but YAML reads as line breaks or rejects.
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")


class Sections(TypedDict, total=False):
    """Sections of the configuration as keyword arguments, such as `training={"steps": 200}`."""

    data: Mapping[str, Any]
    task: Mapping[str, Any]
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    program: Mapping[str, Any]
    cluster: Mapping[str, Any]
    evaluation: Mapping[str, Any]
    gate: Mapping[str, Any]
    export: Mapping[str, Any]
    registry: Mapping[str, Any]
    storage: Mapping[str, Any]


def make_assignments(
    settings: Settings = (), sections: Mapping[str, Any] | None = None
) -> tuple[str, ...]:
    """Return `--set` strings for `settings`, then for `sections`. Raises `ConfigError`."""
    if isinstance(settings, Mapping):
        texts = [*_texts(settings)]
    elif isinstance(settings, str) or not all(isinstance(each, str) for each in settings):
        raise ConfigError(
            f"settings {settings!r} is neither a mapping, such as {{'training.steps': 200}}, nor a "
            "list of strings such as 'section.key=value'"
        )
    else:
        texts = [*settings]
    return (*texts, *_texts(sections or {}))


def format_search(search: Settings) -> Iterator[str]:
    """Yield the `--set` strings of a search.

    A list contains the values to try. A string, such as a range, is kept unchanged.
    """
    if not isinstance(search, Mapping):
        yield from make_assignments(search)
        return
    for key, values in search.items():
        if isinstance(values, str):
            yield f"{key}={values}"
        elif isinstance(values, Mapping) or not isinstance(values, Iterable):
            raise ConfigError(f"search: {key}: {values!r} is neither a list of values nor a range")
        else:
            yield f"{key}={','.join(value_text(key, each) for each in values)}"


def value_text(key: str, value: Any) -> str:
    """Format a value for `--set KEY=`. Raises `ConfigError` if it is not plain data."""
    if isinstance(value, str | os.PathLike):
        text = str(os.fspath(value))
        try:
            if parse_value(text, key) == text:
                return text
        except ConfigError:
            # The text is not valid YAML without quotes.
            pass
        value = text
    try:
        text = json.dumps(value, ensure_ascii=False, default=plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{key}: the value is not plain data: {error}") from None
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _texts(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a `--set` string for each key. A section yields a string for each of its keys."""
    for name, value in tree.items():
        path = (*above, *str(name).split("."))
        if isinstance(value, Mapping) and is_section(path):
            yield from _texts(value, path)
        else:
            key = ".".join(path)
            yield f"{key}={value_text(key, value)}"


def plain(value: Any) -> Any:
    """Return the JSON equivalent of a path, a mapping, or a NumPy number or array."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


# The run parameters of old pipelines, which had one string or number for each configuration key:
# `training.steps` was `training_steps`, and a list or a mapping was JSON. Existing schedules still
# contain these parameters. An error message explains how to set each of them now.

#: For each former parameter of the steps' pods: the compile option that replaces it, and the
#: default of the parameter.
OPTIONS: dict[str, tuple[str, Any]] = {
    "step_cpu": ("--cpu", "1"),
    "step_memory": ("--memory", "4Gi"),
    "step_gpus": ("--gpus", "0"),
    "step_node_selector": ("--node-selector", {}),
    "step_tolerations": ("--toleration", []),
    "store_secret": ("--store-secret", KFP_SECRET),
}


@functools.cache
def keys() -> dict[str, tuple[tuple[str, ...], Any]]:
    """Return the configuration key and the model field of each parameter, by parameter name."""
    return {"_".join(key): (key, field) for key, field in _leaves(Config, ())}


def _leaves(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, field in model.model_fields.items():
        kind, key = field.annotation, (*path, name)
        if isinstance(kind, type) and issubclass(kind, Section) and not issubclass(kind, Whole):
            yield from _leaves(kind, key)
        else:
            yield key, field


def are_old_parameters(values: Mapping[str, Any]) -> bool:
    """Return whether these are the run parameters of an old pipeline."""
    return "training_steps" in values


def convert_parameters(values: Mapping[str, Any]) -> Config:
    """Return the configuration that these parameters describe. Raises `ConfigError`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        if name in OPTIONS or name == "image":
            continue
        key, field = keys().get(name) or (tuple(name.split("_", 1)), None)
        node = tree
        for part in key[:-1]:
            node = node.setdefault(part, {})
        node[key[-1]] = _deep(value, field)
    return parse_config(tree)


def describe_ignored(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a message for each pod parameter with a non-default value, which is ignored."""
    return tuple(
        f"{name}={values[name]} is no longer a run parameter; {describe_replacement(name)}"
        for name, (_, default) in OPTIONS.items()
        if values.get(name, default) != default
    )


def _deep(value: Any, field: Any) -> Any:
    kind = field.annotation if field else str
    if kind in (int, float) and isinstance(value, float) and value.is_integer():
        return int(value)
    if kind in (str, int, float, bool) or not isinstance(value, str):
        return value
    # A key whose default is a string accepts a string or a mapping. Do not parse a string.
    if isinstance(field.default, str) and not value.lstrip().startswith("{"):
        return value
    with suppress(ValueError):
        return json.loads(value)
    return parse_value(value)


def describe_replacement(name: str) -> str:
    """Return a hint on how to set a former run parameter or a form field in this version."""
    if name == "image":
        return "use --image IMAGE"
    if name in OPTIONS:
        return f"use {OPTIONS[name][0]} of `flotilla compile` and `flotilla upload`"
    by_field = {each.name: each.key for each in FIELDS if each.key}
    if key := by_field.get(name):
        return f"use --set {'.'.join(key)}=..."
    if name not in keys():
        return "set a key of the configuration with --set SECTION.KEY=VALUE"
    key = keys()[name][0]
    # The form has no field for a dataset. Its name is entered in the field for the source.
    same = ("data", "source") if key == ("data", "dataset") else key
    fields = (f"the field {each}, or " for each, of in by_field.items() if of == same)
    return f"use {next(fields, '')}--set {'.'.join(key)}=..."

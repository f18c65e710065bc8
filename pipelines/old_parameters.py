"""The run parameters of old pipelines, which had one string or number for each configuration key.

`training.steps` was `training_steps`, and a list or a mapping was JSON. Existing schedules still
contain these parameters. An error message explains how to set each of them now.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from pydantic import BaseModel

from flotilla.trainer.config.base import Section, Whole
from flotilla.trainer.config.form import FIELDS
from flotilla.trainer.config.load import parse_config, parse_value
from flotilla.trainer.config.schema import Config
from flotilla.trainer.storage.uri import KFP_SECRET

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

"""The form of a run: the common configuration keys as typed fields, and `settings`.

Kubeflow Pipelines shows a form for the parameters of a pipeline. `settings` is a mapping of all
other keys, as in a YAML file. It rejects keys that have a field, so that each key is set in one
place. To use a value that a drop-down list lacks, choose its entry `settings`, and set the key in
the field `settings`.

In local runs, `settings` is `{"json": TEXT}` with the whole configuration, because KFP's local
runner changes the types of values in a mapping.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import reduce
from typing import Any

from flotilla.trainer.config.base import AUTO, AUTOMATIC
from flotilla.trainer.config.load import BY_DATA, parse_config
from flotilla.trainer.config.model import MODELS
from flotilla.trainer.config.schema import STRATEGIES, Config
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.runtime.json_records import parse_mapping
from flotilla.trainer.storage.uri import is_uri

#: `SETTINGS` is the field for all other keys, and also an entry of each drop-down list. `WHOLE` is
#: the key, in the value of this field, that contains a whole configuration.
SETTINGS, WHOLE = "settings", "json"
_SOURCE, _DATASET, _LABEL = ("data", "source"), ("data", "dataset"), ("data", "label")
_STEPS = ("training", "steps")
# Number fields in which zero means `auto`.
_AUTOMATIC = ("steps", "batch_size", "learning_rate")
# A label field that begins with this character contains JSON rather than a single name.
_LIST = "["


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field, with its KFP type, its default, and the configuration key that it sets.

    `choices` are the entries of the drop-down list. Without choices, the user may type any value.
    """

    name: str
    key: tuple[str, ...]
    type: type[str] | type[int] | type[float] | type[dict[str, Any]]
    description: str
    choices: tuple[str, ...] = ()

    @property
    def default(self) -> Any:
        """The value in the default configuration."""
        return _value(Config(), self)


def _field(name: str, path: str, kind: Any, description: str, *choices: str) -> Field:
    key = tuple(path.split("."))
    listed = (*choices, SETTINGS) if choices else ()
    return Field(name=name, key=key, type=kind, description=description, choices=listed)


#: The fields, in the order in which a user plans a run.
FIELDS = (
    _field("name", "name", str, "name of the model in the registry"),
    _field("source", "data.source", str,
           "URI of files (gs://, s3:// or minio://), which may contain {SPAN} or {DATE}; or the "
           "name of a TFDS dataset, or package.module:Builder"),
    _field("label", "data.label", str,
           'column to predict, or a list such as ["a", "b"]; empty: the label of the dataset'),
    _field("model", "model.name", str, "Keras model; auto: depends on the inputs", AUTO, *MODELS),
    _field("steps", "training.steps", int, "number of global steps (applied updates); 0: auto"),
    _field("epochs", "training.epochs", float,
           "number of passes over the training split; 0: train for the number in steps"),
    _field("batch_size", "training.batch_size", int,
           "number of examples from which a replica computes one gradient; 0: auto"),
    _field("learning_rate", "training.optimizer.learning_rate", float,
           "initial learning rate of the schedule; 0: auto"),
    _field("strategy", "training.strategy", str, "distribution strategy of training", *STRATEGIES),
    _field("workers", "cluster.workers", int, "number of workers"),
    _field("servers", "cluster.parameter_servers", int, "number of parameter servers"),
    _field("gpus", "cluster.gpus_per_worker", int,
           "number of GPUs for each worker, or for the chief if there are no workers"),
    _field("storage_root", "storage.root", str,
           "URI below which results are published; empty: the pipeline root"),
    Field(name=SETTINGS, key=(), type=dict, description=(
          "other configuration keys, nested by section as in the YAML file: "
          '{"training": {"patience": 3}, "gate": {"min": {"accuracy": 0.9}}}')),
)  # fmt: skip
_OF_KEYS = tuple(each for each in FIELDS if each.key)


def to_form(config: Config) -> dict[str, Any]:
    """Return the value of every field for a configuration."""
    return {each.name: _value(config, each) for each in FIELDS}


def to_local_form(config: Config) -> dict[str, Any]:
    """Return the form for KFP's local runner, with the whole configuration as one JSON string."""
    return {**to_form(config), SETTINGS: {WHOLE: config.model_dump_json()}}


def from_form(values: Mapping[str, Any]) -> Config:
    """Convert a form with the value types of KFP to a `Config`. Raises `ConfigError`."""
    settings = parse_settings(values[SETTINGS])
    if WHOLE in values[SETTINGS]:
        return parse_config(settings)
    tree = deepcopy(settings)
    for each in _OF_KEYS:
        value, key = _whole(values[each.name]), each.key
        if each.choices and value == SETTINGS:
            _require_in(settings, each)
            continue
        if key == _SOURCE:
            _refuse_twice(settings, _DATASET, each)
            _refuse_twice(settings, key, each)
            key = _SOURCE if "://" in value or value.startswith("/") else _DATASET
        elif key == _LABEL:
            value = _labels(value)
        elif each.name in _AUTOMATIC and not value:
            value = AUTO
        _refuse_twice(settings, each.key, each)
        _put(tree, key, value)
    if values["epochs"]:
        # Remove the steps, which conflict with epochs. A form always contains them.
        _remove(tree, _STEPS)
    return parse_config(tree)


def parse_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a value of `settings` as a nested mapping. Raises `ConfigError`."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings: {settings!r} is not a mapping of sections")
    if WHOLE not in settings:
        return {str(key): _whole(value) for key, value in settings.items()}
    try:
        return parse_mapping(str(settings[WHOLE]).encode())
    except ValueError:
        raise ConfigError(f"settings.{WHOLE} must contain the text of a configuration") from None


def _whole(value: Any) -> Any:
    """Convert whole floats to integers, because KFP passes every number as a double."""
    if isinstance(value, Mapping):
        return {key: _whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_whole(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _value(config: Config, field: Field) -> Any:
    if not field.key:
        return _settings(config)
    value: Any = reduce(getattr, field.key, config)
    if field.key == _SOURCE:
        source = config.data.source
        path = source and not is_uri(source)
        return os.path.abspath(source) if path else source or config.data.dataset
    if field.key == _LABEL:
        plain = len(value) == 1 and not value[0].startswith(_LIST)
        return value[0] if plain else json.dumps(value) if value else ""
    if field.choices and value not in field.choices:
        return SETTINGS
    if field.name in _AUTOMATIC and value == AUTOMATIC:
        # KFP rejects a whole number for a floating-point field.
        return 0.0 if field.type is float else 0
    return value


def _settings(config: Config) -> dict[str, Any]:
    """Return all keys that differ from their defaults and have no field in the form."""
    tree = config.model_dump(mode="json", exclude_defaults=True)
    if config.training.steps == AUTOMATIC:
        # If steps are `auto`, parsing sets missing keys of `BY_DATA` to other values than their
        # usual defaults, so write all of these keys.
        whole = config.training.model_dump(mode="json")
        tree["training"] |= {name: whole[name] for name in BY_DATA}
    for key in (*(each.key for each in _OF_KEYS if _value(config, each) != SETTINGS), _DATASET):
        _remove(tree, key)
    return tree


def _remove(tree: dict[str, Any], key: tuple[str, ...]) -> None:
    first, *rest = key
    if rest and isinstance(below := tree.get(first), dict):
        _remove(below, tuple(rest))
    if not rest or tree.get(first) == {}:
        tree.pop(first, None)


def _labels(text: str) -> list[str]:
    if not text.lstrip().startswith(_LIST):
        return [text] if text else []
    try:
        return list(map(str, json.loads(text)))
    except ValueError:
        raise ConfigError(f'label: {text!r} is not a list such as ["a", "b"]') from None


def _put(tree: dict[str, Any], key: tuple[str, ...], value: Any) -> None:
    *sections, last = key
    for section in sections:
        below = tree.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"settings.{section}: {below!r} is not a section")
        tree = below
    tree[last] = value


def _has(settings: Mapping[str, Any], key: tuple[str, ...]) -> bool:
    first, *rest = key
    below = settings.get(first)
    return first in settings and (
        not rest or (isinstance(below, dict) and _has(below, tuple(rest)))
    )


def _refuse_twice(settings: Mapping[str, Any], key: tuple[str, ...], field: Field) -> None:
    if _has(settings, key):
        own = f", or choose {SETTINGS!r} there and keep it in settings" if field.choices else ""
        raise ConfigError(
            f"settings: the field {field.name} of the form sets {'.'.join(key)}; set it there{own}"
        )


def _require_in(settings: Mapping[str, Any], field: Field) -> None:
    if not _has(settings, field.key):
        path = ".".join(field.key)
        raise ConfigError(
            f"{field.name}: the value {SETTINGS!r} needs {path} in settings; add it, or choose "
            "another value"
        )

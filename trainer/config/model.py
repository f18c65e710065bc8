"""The section `model`, and `training.warm_start`, the initial weights of a new run.

A model's function checks its own arguments, which requires TensorFlow. The arguments of dynamic
embedding tables are also checked here, so that a mistake is found before data are prepared.

A string in `training.warm_start` names the source of all weights: the URI of a checkpoint, a
`.keras` file or an exported model, the path of a `.keras` file, or `champion`. A mapping `{from,
include, exclude}` selects some weights: `include` and `exclude` are lists of globs for the paths of
the model's variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, ValidationInfo, field_validator

from flotilla.trainer.config.base import AUTO, Free, Section, key, known_name
from flotilla.trainer.runtime.errors import UserError, nearest
from flotilla.trainer.storage.uri import FORMS, check_path, is_uri, uri_of

MODELS = {
    "softmax": "flotilla.trainer.models.classifiers:softmax",
    "mlp": "flotilla.trainer.models.classifiers:mlp",
    "cnn": "flotilla.trainer.models.classifiers:cnn",
    "two_tower": "flotilla.trainer.models.two_tower:two_tower",
    "two_tower_ranker": "flotilla.trainer.models.two_tower:two_tower_ranker",
    "gru": "flotilla.trainer.models.classifiers:gru",
    "tabular": "flotilla.trainer.models.tabular:tabular",
    "text": "flotilla.trainer.models.tabular:text",
    "sequence": "flotilla.trainer.models.sequence:sequence",
}
#: The models whose argument `tables` configures the embedding tables of features.
RECOMMENDERS = ("two_tower", "two_tower_ranker")
_OF_TABLES = ("capacity", "shards", "min_count", "min_age", "max_age", "initializer")
#: The largest count of an id without a row. The count is stored in a byte.
MOST_COUNTED = 255
#: Default number of steps for which a row must be unused before another id may get it.
MIN_AGE = 16
# Maximum values of the settings of a table, and of its capacity. Larger values must be mistakes.
_MOST, _MOST_ROWS = 2**31 - 1, 2**40
#: The value that stands for the checkpoint of the registry's champion.
CHAMPION = "champion"
KERAS = ".keras"
_FROM, _INCLUDE, _EXCLUDE = _KEYS = ("from", "include", "exclude")


class ModelConfig(Section):
    """The Keras model."""

    name: str = key(
        "mlp",
        f"{AUTO} (depends on the inputs; the default if data.source is set), {', '.join(MODELS)}, "
        "or package.module:function",
    )
    args: Free = key({}, "keyword arguments for the model's function")

    _known_model = field_validator("name")(known_name("model", (AUTO, *MODELS)))

    @field_validator("args")
    @classmethod
    def _check_tables(cls, args: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        tables = args.get("tables")
        if info.data.get("name") in RECOMMENDERS and isinstance(tables, dict):
            for name, arguments in tables.items():
                require_table(name, arguments)
        return args


def require_table(name: str, arguments: Any) -> None:
    """Raise a `ValueError` if the configuration of a feature's table is invalid."""
    if not isinstance(arguments, Mapping) or "capacity" not in arguments:
        raise ValueError(f"tables.{name}: {arguments!r} has no capacity; write {{capacity: COUNT}}")
    sizes = {each: value for each, value in arguments.items() if each != "initializer"}
    for each, value in sizes.items():
        if each not in _OF_TABLES:
            hint = nearest(str(each), _OF_TABLES) or f" (one of {', '.join(_OF_TABLES)})"
            raise ValueError(f"tables.{name}: there is no key {each!r}{hint}")
        if type(value) is not int:
            raise ValueError(f"tables.{name}.{each}: {value!r} is not a whole number")
    try:
        require_sizes(sizes)
    except ValueError as error:
        raise ValueError(f"tables.{name}.{error}") from None


def require_sizes(given: Mapping[str, int]) -> None:
    """Raise a `ValueError` if a setting of a dynamic table is out of range or inconsistent."""
    least = {"capacity": given.get("shards", 1), "min_age": 0, "max_age": 0}
    most = {"capacity": _MOST_ROWS, "min_count": MOST_COUNTED}
    for name, value in given.items():
        if value < least.get(name, 1):
            raise ValueError(
                f"{name}: {value!r} is not allowed; it must be at least {least.get(name, 1)}"
            )
        if value > most.get(name, _MOST):
            raise ValueError(
                f"{name}: {value!r} is not allowed; it must be at most {most.get(name, _MOST)}"
            )
    min_age, max_age = given.get("min_age", MIN_AGE), given.get("max_age", 0)
    if 0 < max_age <= min_age:
        raise ValueError(
            f"max_age: {max_age} is not allowed; it must be above min_age ({min_age}), or 0"
        )


@dataclass(frozen=True, kw_only=True)
class InitialWeights:
    """The source of initial weights, and globs that select some. Without globs, all are loaded."""

    source: str
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @property
    def is_partial(self) -> bool:
        """Whether some variables may keep their initial values."""
        return bool(self.include or self.exclude)

    def value(self) -> str | dict[str, Any]:
        """Return the value of `training.warm_start`, a string if all weights are loaded."""
        globs = {_INCLUDE: list(self.include), _EXCLUDE: list(self.exclude)}
        named = {name: each for name, each in globs.items() if each}
        return {_FROM: self.source, **named} if named else self.source


def initial_weights(value: str | Mapping[str, Any]) -> InitialWeights:
    """Parse a value of `training.warm_start`. Raises `ValueError`."""
    if isinstance(value, str):
        return InitialWeights(source=_check_source(value))
    for name in value:
        if name not in _KEYS:
            hint = nearest(str(name), _KEYS) or f" (one of {', '.join(_KEYS)})"
            raise ValueError(f"there is no key {name!r}{hint}")
    source = value.get(_FROM)
    if not isinstance(source, str) or not source:
        raise ValueError(f"the URI of the weights is missing; write {{{_FROM}: URI}}")
    include, exclude = (_globs(value, name) for name in (_INCLUDE, _EXCLUDE))
    return InitialWeights(source=_check_source(source), include=include, exclude=exclude)


def _globs(value: Mapping[str, Any], name: str) -> tuple[str, ...]:
    globs = value.get(name, [])
    if not isinstance(globs, list | tuple) or not all(isinstance(g, str) and g for g in globs):
        raise ValueError(f"{name}: {json.dumps(globs, default=str)} is not a list of globs")
    return tuple(globs)


def is_weights_file(source: str) -> bool:
    """Return whether the source of initial weights is a `.keras` file, not a directory."""
    return source.partition("?")[0].endswith(KERAS)


def _check_source(source: str) -> str:
    if not source or source == CHAMPION:
        return source
    if is_weights_file(source) and "://" not in source:
        source = uri_of(source)
    if not is_uri(source):
        hint = nearest(source, [CHAMPION])
        raise ValueError(
            f"it must be {CHAMPION}, the URI of a checkpoint ({FORMS}), or a {KERAS} file{hint}"
        )
    try:
        check_path(source)
    except UserError as error:
        raise ValueError(str(error)) from None
    return source.rstrip("/")


def _canonical(value: Any) -> Any:
    if not isinstance(value, str | Mapping):
        raise ValueError(f"write a URI, {CHAMPION}, or {{{', '.join(_KEYS)}}}")
    return initial_weights(value).value()


WarmStart = Annotated[str | dict[str, Any], BeforeValidator(_canonical)]

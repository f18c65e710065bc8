"""The model, its initial weights, the optimizer and its learning rate schedule.

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
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from flotilla.trainer.config.base import (
    AS_WRITTEN,
    AUTO,
    OR_AUTO,
    Free,
    Section,
    key,
    known_name,
    suggest,
)
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
    "sequence": "flotilla.trainer.models.tabular:sequence",
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
            raise ValueError(f"tables.{name}: there is no key {each!r}{suggest(each, _OF_TABLES)}")
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
            raise ValueError(f"there is no key {name!r}{suggest(name, _KEYS)}")
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


# `tests/trainer/optimizers/test_optimizers.py` compares this list with Keras.
OPTIMIZERS = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "ftrl", "lamb", "lion",
    "muon", "nadam", "rmsprop", "sgd",
)  # fmt: skip

OF_MODEL = "model"


class OptimizerConfig(Section):
    """A Keras optimizer by name. `args` are its further arguments."""

    name: str = key(
        "adam",
        f"{', '.join(OPTIMIZERS)}, or {OF_MODEL} (the optimizer that the model is compiled with)",
    )
    learning_rate: Annotated[float, Field(gt=0), OR_AUTO, AS_WRITTEN] = key(
        0.003, "initial learning rate of the schedule"
    )
    args: Free = key({}, "further arguments of the optimizer, such as beta_1")
    dense_updates: bool = key(
        False, "update all rows of embedding tables, not only the rows that a batch uses"
    )

    @field_validator("name")
    @classmethod
    def _check_optimizer(cls, value: str) -> str:
        known = (*OPTIMIZERS, OF_MODEL)
        if value not in known:
            raise ValueError(f"there is no optimizer with this name{suggest(value, known)}")
        return value

    @model_validator(mode="after")
    def _refuse_other_keys(self) -> OptimizerConfig:
        """Reject other keys of `training.optimizer` if its name is `model`, which sets them."""
        first = OptimizerConfig.model_fields["learning_rate"].default
        for name, unset in {"learning_rate": first, "args": {}}.items():
            if self.name == OF_MODEL and getattr(self, name) != unset:
                raise ValueError(f"{name}: the model's own optimizer sets it; leave it out")
        return self


class ConstantArgs(Section):
    """A constant learning rate."""


class CosineArgs(Section):
    """A half cosine that falls from the learning rate to `alpha` times that rate by the end."""

    alpha: float = key(0.0, "final learning rate, as a share of the initial one", ge=0, le=1)


class ExponentialArgs(Section):
    """The learning rate, multiplied by `decay_rate` every `decay_steps`."""

    decay_steps: int = Field(ge=1, description="number of global steps between two decays")
    decay_rate: float = Field(
        gt=0, le=1, description="factor by which each decay multiplies the learning rate"
    )
    staircase: bool = key(False, "decay only every decay_steps instead of continuously")


class PiecewiseArgs(Section):
    """The learning rate times one of `factors`. Each boundary switches to the next factor."""

    boundaries: tuple[int, ...] = Field(
        min_length=1, description="global steps at which the factor changes, ascending"
    )
    factors: tuple[float, ...] = Field(
        min_length=2,
        description="factors that multiply the learning rate; one more than boundaries",
    )

    @model_validator(mode="after")
    def _fit(self) -> PiecewiseArgs:
        if any(later <= earlier for earlier, later in pairwise((0, *self.boundaries))):
            raise ValueError("boundaries must increase and start at 1 or more")
        if len(self.factors) != len(self.boundaries) + 1:
            raise ValueError("there must be one more factor than boundaries")
        if min(self.factors) < 0:
            raise ValueError("factors must be 0 or more")
        return self


ARGS: dict[str, type[Section]] = {
    "constant": ConstantArgs,
    "cosine": CosineArgs,
    "exponential": ExponentialArgs,
    "piecewise": PiecewiseArgs,
}


class ScheduleConfig(Section):
    """A schedule by name, after a linear warm-up. `args` are its arguments."""

    name: Literal["constant", "cosine", "exponential", "piecewise"] = key(
        "constant", "learning rate schedule"
    )
    warmup_steps: Annotated[int, Field(ge=0), OR_AUTO, AS_WRITTEN] = key(
        0, "number of global steps for the linear warm-up"
    )
    args: Free = key({}, "arguments of the schedule")

    @model_validator(mode="after")
    def _check_args(self) -> ScheduleConfig:
        self.parse()
        return self

    def parse(self) -> Section:
        """Return the validated arguments as an instance of the schedule's model class."""
        model = ARGS[self.name]
        try:
            return model.model_validate_json(json.dumps(self.args))
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(["args", *map(str, first["loc"])])
            takes = ", ".join(model.model_fields) or "none"
            message = first["msg"].removeprefix("Value error, ")
            raise ValueError(f"{key} of {self.name}: {message} (it takes {takes})") from None

"""The sections for the optimizer and its learning rate schedule."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from flotilla.trainer.config.base import AS_WRITTEN, OR_AUTO, Free, Section, key
from flotilla.trainer.runtime.errors import nearest

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
            hint = nearest(value, known) or f" (one of {', '.join(known)})"
            raise ValueError(f"there is no optimizer with this name{hint}")
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

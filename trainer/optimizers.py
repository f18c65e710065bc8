"""Make a Keras optimizer by its name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import keras

from trainer.config import TrainingConfig
from trainer.errors import ConfigError, nearest
from trainer.schedules import learning_rate

# Two wrap another optimizer; the third one's weights have to be swapped before an evaluation.
NOT_OFFERED = ("LossScaleOptimizer", "MultiOptimizer", "ScheduleFreeAdamW")

# Arguments that Keras offers and that would be wrong here: the first ones have a place of their
# own, the others need a training loop that scales the loss, skips steps or swaps weights.
REFUSED: dict[str, str] = {
    "learning_rate": "set training.optimizer.learning_rate",
    "name": "it has no effect",
    "loss_scale_factor": "the loss is not scaled",
    "gradient_accumulation_steps": "every gradient is applied; raise training.batch_size",
    "use_ema": "averages of weights are not kept",
    "ema_momentum": "averages of weights are not kept",
    "ema_overwrite_frequency": "averages of weights are not kept",
}


def available() -> dict[str, type[keras.optimizers.Optimizer]]:
    """Return Keras's optimizers by their names in lower case."""
    return {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value)
        and issubclass(value, keras.optimizers.Optimizer)
        and value is not keras.optimizers.Optimizer
        and name not in NOT_OFFERED
    }


def build_optimizer(training: TrainingConfig) -> keras.optimizers.Optimizer:
    """Return the optimizer with its schedule, without variables yet (`build` was not called).

    Raises:
        ConfigError: an argument that the optimizer does not have, or a value it does not take.
    """
    config = training.optimizer
    kind = available()[config.name]
    defaults = {
        parameter.name: parameter.default
        for parameter in inspect.signature(kind).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD and parameter.name not in REFUSED
    }
    for argument, value in config.args.items():
        _check(config.name, defaults, argument, value)
    try:
        return kind(learning_rate=learning_rate(training), **config.args)
    except (ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"training.optimizer.args of {config.name}: {reason}") from error


def _check(optimizer: str, defaults: Mapping[str, Any], argument: str, value: object) -> None:
    key = f"training.optimizer.args.{argument}"
    if argument in REFUSED:
        raise ConfigError(f"{key} cannot be set: {REFUSED[argument]}")
    if argument not in defaults:
        hint = nearest(argument, defaults)
        raise ConfigError(f"{key}: {optimizer} takes {', '.join(defaults)}{hint}")
    default = defaults[argument]
    if value is None and default is None:
        return
    fits, allowed = _expected(argument, default, value)
    if not fits:
        raise ConfigError(f"{key}: {value!r} is not allowed; it has to be {allowed}")


def _expected(argument: str, default: object, value: object) -> tuple[bool, str]:
    if argument == "exclude_layers":
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return fits, "a list of texts"
    if isinstance(default, bool):
        return isinstance(value, bool), "true or false"
    if argument.endswith("_steps"):
        return isinstance(value, int) and not isinstance(value, bool), "a whole number"
    return isinstance(value, int | float) and not isinstance(value, bool), "a number"

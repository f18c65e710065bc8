"""Keras optimizers by name, with a learning rate schedule over the global step.

Gradients of embedding rows (`tf.IndexedSlices`) stay sparse, and contain each row once.
`flotilla.trainer.embeddings.row_updates` makes the updates of rows lazy.

Keras implements Adam with thirty small operations per variable. If TensorFlow has a kernel for the
optimizer, `fuse` uses it instead. A kernel needs one pass over the values and locks the variable,
so that each dense update is atomic.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import schedules
from keras.optimizers.schedules import LearningRateSchedule as Schedule

from flotilla.trainer.config.model import OF_MODEL, CosineArgs, ExponentialArgs, PiecewiseArgs
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.embeddings.batch_rows import RowsOnce
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, nearest

# Optimizers that cannot be used. The first two wrap another optimizer, and the third one uses
# different weights in an evaluation.
NOT_OFFERED = ("LossScaleOptimizer", "MultiOptimizer", "ScheduleFreeAdamW")

# Keras arguments that are refused. They have no effect, or another key has the same effect under
# every strategy.
REFUSED: dict[str, str] = {
    "learning_rate": "set training.optimizer.learning_rate",
    "name": "leave it out, because it has no effect",
    "loss_scale_factor": "set training.mixed_precision: float16, which scales the loss",
    "gradient_accumulation_steps": "set training.accumulate",
    "use_ema": "set training.ema",
    "ema_momentum": "set training.ema",
    "ema_overwrite_frequency": "set training.ema, which does not overwrite the weights",
}
# Arguments that are checked here, because Keras accepts any number, even if training then diverges.
_SHARES = ("beta_1", "beta_2", "rho")
_POSITIVE = ("clipnorm", "clipvalue", "global_clipnorm")
_ADAMS = (keras.optimizers.Adam, keras.optimizers.AdamW)

# Prefixes of the checkpoint paths of variables and of their averages.
MODEL = "model/"
AVERAGE = "average/"


def available() -> dict[str, type[keras.optimizers.Optimizer]]:
    """Return Keras's optimizers by lower-case name."""
    return {
        name.lower(): value
        for name, value in vars(keras.optimizers).items()
        if inspect.isclass(value)
        and issubclass(value, keras.optimizers.Optimizer)
        and value is not keras.optimizers.Optimizer
        and name not in NOT_OFFERED
    }


def build_optimizer(
    training: TrainingConfig, of_model: keras.optimizers.Optimizer | None = None
) -> keras.optimizers.Optimizer:
    """Return the configured or the model's own optimizer. Raises `ConfigError`."""
    if training.optimizer.name == OF_MODEL:
        optimizer = _clone(accept_compiled(training, of_model))
    else:
        optimizer = _find_keras(training)
    _keep_sparse(optimizer)
    return optimizer


def accept_compiled(
    training: TrainingConfig, of_model: keras.optimizers.Optimizer | None
) -> keras.optimizers.Optimizer:
    """Return the optimizer of a compiled model. Raises `ConfigError` if it is not supported."""
    key = "training.optimizer.name"
    if of_model is None:
        raise ConfigError(
            f"{key}: {OF_MODEL} is the optimizer that the model is compiled with, but the model is "
            f"not compiled; compile it, or name one of {', '.join(available())}"
        )
    if isinstance(of_model, keras.optimizers.LossScaleOptimizer):
        # Keras wraps all optimizers in float16 models. Here the strategy scales the loss.
        if training.mixed_precision != "float16":
            raise ConfigError(
                f"{key}: the model is compiled with an optimizer that scales the loss; set "
                "training.mixed_precision: float16"
            )
        of_model = of_model.inner_optimizer
    name = type(of_model).__name__
    if name in NOT_OFFERED:
        raise ConfigError(
            f"{key}: the model is compiled with {name}, which cannot be used here; compile it with "
            "another optimizer"
        )
    for argument in ("loss_scale_factor", "gradient_accumulation_steps", "use_ema"):
        if getattr(of_model, argument, None):
            raise ConfigError(
                f"{key}: the model is compiled with {argument}, which is not supported; leave it "
                f"out and {REFUSED[argument]}"
            )
    if getattr(of_model, "_exclude_from_weight_decay", None):
        raise ConfigError(
            f"{key}: the model's optimizer excludes variables from weight decay by var_list, but "
            "every task creates its own variables; pass var_names to exclude_from_weight_decay"
        )
    return of_model


def _clone(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return a new optimizer with the same settings, created on the current device."""
    try:
        made = type(optimizer).from_config(optimizer.get_config())
    # A user's class may raise any exception.
    except Exception as error:
        raise ConfigError(
            f"training.optimizer.name: the model is compiled with {type(optimizer).__name__}, "
            f"which cannot be recreated from its get_config: {user_code.format_error(error)}"
        ) from error
    if pattern := getattr(optimizer, "_exclude_from_weight_decay_pattern", None):
        made.exclude_from_weight_decay(var_names=[pattern.pattern])
    return made


def _find_keras(training: TrainingConfig) -> keras.optimizers.Optimizer:
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
        optimizer = kind(learning_rate=learning_rate(training), **config.args)
    except (ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"training.optimizer.args of {config.name}: {reason}") from error
    return optimizer


def each_row_once(gradient: Any) -> Any:
    """Add up the values of each row in a sparse gradient, and return other gradients unchanged."""
    if not isinstance(gradient, tf.IndexedSlices) or isinstance(gradient, RowsOnce):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def _keep_sparse(optimizer: keras.optimizers.Optimizer) -> None:
    """Make the optimizer treat a sparse gradient like the equivalent dense gradient.

    If a row was looked up twice, it has two gradients, which Keras would clip and square
    separately. Keras would also convert a gradient to a dense one to clip it by norm. This is not
    necessary, because rows without a gradient do not change the norm.
    """
    clip = optimizer._clip_gradients

    def clip_gradients(gradients: Sequence[Any]) -> list[Any]:
        summed = [each_row_once(gradient) for gradient in gradients]
        sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in summed]
        values = [g.values if rows else g for g, rows in zip(summed, sparse, strict=True)]
        return [
            tf.IndexedSlices(clipped, gradient.indices, gradient.dense_shape) if rows else clipped
            for clipped, gradient, rows in zip(clip(values), summed, sparse, strict=True)
        ]

    # Keras calls this method before every update, even if it does not clip.
    optimizer._clip_gradients = clip_gradients


def _check(optimizer: str, defaults: Mapping[str, Any], argument: str, value: object) -> None:
    key = f"training.optimizer.args.{argument}"
    if argument in REFUSED:
        raise ConfigError(f"{key}: this argument is not supported; {REFUSED[argument]}")
    if argument not in defaults:
        hint = nearest(argument, defaults)
        known = ", ".join(defaults)
        raise ConfigError(f"{key}: {optimizer} has no such argument (it takes {known}){hint}")
    default = defaults[argument]
    if value is None and default is None:
        return
    fits, allowed = _check_value(argument, default, value)
    if not fits:
        raise ConfigError(f"{key}: {value!r} is not allowed; it must be {allowed}")


def _check_value(argument: str, default: object, value: Any) -> tuple[bool, str]:
    if argument == "exclude_layers":
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return fits, "a list of strings"
    if isinstance(default, bool):
        return isinstance(value, bool), "true or false"
    if argument.endswith("_steps"):
        return isinstance(value, int) and not isinstance(value, bool), "a whole number"
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if argument in _SHARES:
        return is_number and 0 <= value < 1, "a number from 0 to below 1"
    if argument in _POSITIVE:
        return is_number and value > 0, "a number above 0"
    return is_number, "a number"


def learning_rate(training: TrainingConfig) -> float | Schedule:
    """Return the learning rate, or a schedule over the optimizer's update counter."""
    rate = training.optimizer.learning_rate
    warmup = training.schedule.warmup_steps
    after = _build_decay(training, rate)
    return Warmup(after=after, rate=rate, steps=warmup) if warmup else after


def _build_decay(training: TrainingConfig, rate: float) -> float | Schedule:
    args = training.schedule.parse()
    if isinstance(args, CosineArgs):
        steps = max(1, training.steps - training.schedule.warmup_steps)
        return schedules.CosineDecay(rate, steps, alpha=args.alpha)
    if isinstance(args, ExponentialArgs):
        return schedules.ExponentialDecay(
            rate, args.decay_steps, args.decay_rate, staircase=args.staircase
        )
    if isinstance(args, PiecewiseArgs):
        # Keras changes the rate one step after a boundary. Here it must change at the boundary.
        boundaries = [boundary - 1 for boundary in args.boundaries]
        return schedules.PiecewiseConstantDecay(boundaries, [rate * f for f in args.factors])
    return rate


class Warmup(Schedule):
    """A schedule that rises linearly from `rate / steps` to `rate`, and then follows `after`."""

    def __init__(self, *, after: float | Schedule, rate: float, steps: int) -> None:
        """Store the warm-up's length, the rate at its end, and the rate or schedule after it."""
        self._after = after
        self._rate = rate
        self._steps = steps

    def __call__(self, step: Any) -> tf.Tensor:
        """Return the learning rate for the next update, after `step` updates."""
        done = tf.cast(tf.convert_to_tensor(step), tf.float32)
        rising = self._rate * (done + 1.0) / self._steps
        later = tf.maximum(done - self._steps, 0.0)
        after = self._after(later) if isinstance(self._after, Schedule) else self._after
        return tf.where(done < self._steps, rising, after)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, as Keras requires of every schedule."""
        return {"after": self._after, "rate": self._rate, "steps": self._steps}


def fuse(optimizer: keras.optimizers.Optimizer) -> None:
    """Make a built optimizer use TensorFlow's kernel, if there is one.

    The kernels use the same formulas as Keras (Kingma and Ba 2015, "Adam", end of section 2;
    Sutskever et al. 2013 for momentum), with equal results except for rounding. Each variable must
    be on one device.
    """
    kernel = _find_kernel(optimizer)
    if kernel is None:
        return
    by_parts = optimizer._backend_update_step

    def update(gradients: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        home = optimizer.iterations.value.device
        with tf.device(home):
            rates = {home: _rates(optimizer, tf.cast(learning_rate, tf.float32))}
        rest = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if isinstance(gradient, tf.IndexedSlices) or variable.value.dtype != tf.float32:
                # Leave embedding rows and variables of other types to Keras.
                rest.append((gradient, variable))
                continue
            device = variable.value.device
            if device not in rates:
                # Send the scalars to each device only once, in one message.
                with tf.device(home):
                    packed = tf.stack(rates[home])
                with tf.device(device):
                    rates[device] = tf.unstack(tf.identity(packed))
            with tf.device(device):
                kernel(optimizer, tf.cast(gradient, tf.float32), variable, *rates[device])
        if rest:
            by_parts(*map(list, zip(*rest, strict=True)), learning_rate)

    optimizer._backend_update_step = update


def _find_kernel(optimizer: keras.optimizers.Optimizer) -> Callable[..., None] | None:
    # Match the exact type, because a subclass may have another formula.
    kind = type(optimizer)
    if kind is keras.optimizers.SGD:
        return _apply_momentum if optimizer.momentum else _apply_descent
    return _apply_adam if kind in _ADAMS and not optimizer.amsgrad else None


def _rates(optimizer: Any, learning_rate: tf.Tensor) -> list[tf.Tensor]:
    """Return the scalars of an update, which are the same for all variables."""
    if type(optimizer) not in _ADAMS:
        return [learning_rate]
    step = tf.cast(optimizer.iterations.value + 1, tf.float32)
    betas = (optimizer.beta_1, optimizer.beta_2)
    return [learning_rate, *(tf.pow(tf.cast(beta, tf.float32), step) for beta in betas)]


def _apply_adam(  # noqa: PLR0913, PLR0917
    optimizer: Any, gradient: tf.Tensor, variable: Any, rate: Any, power_1: Any, power_2: Any
) -> None:
    index = optimizer._get_variable_index(variable)
    tf.raw_ops.ResourceApplyAdam(
        var=variable.value.handle,
        m=optimizer._momentums[index].value.handle,
        v=optimizer._velocities[index].value.handle,
        beta1_power=power_1,
        beta2_power=power_2,
        lr=rate,
        beta1=float(optimizer.beta_1),
        beta2=float(optimizer.beta_2),
        epsilon=optimizer.epsilon,
        grad=gradient,
        use_locking=True,
    )


def _apply_descent(_optimizer: Any, gradient: tf.Tensor, variable: Any, rate: Any) -> None:
    tf.raw_ops.ResourceApplyGradientDescent(
        var=variable.value.handle, alpha=rate, delta=gradient, use_locking=True
    )


def _apply_momentum(optimizer: Any, gradient: tf.Tensor, variable: Any, rate: Any) -> None:
    index = optimizer._get_variable_index(variable)
    tf.raw_ops.ResourceApplyKerasMomentum(
        var=variable.value.handle,
        accum=optimizer.momentums[index].value.handle,
        lr=rate,
        grad=gradient,
        momentum=optimizer.momentum,
        use_nesterov=optimizer.nesterov,
        use_locking=True,
    )


def keep_averages(optimizer: keras.optimizers.Optimizer, momentum: float) -> None:
    """Make an optimizer that is not built yet maintain exponential moving averages of the weights.

    Averages replace the weights in evaluation and export. As with Keras's `use_ema`, an average
    starts with the weight after the first update. It is updated on the server by an atomic
    subtraction, so that no update is lost if workers write at the same time.
    """
    optimizer.use_ema, optimizer.ema_momentum = True, momentum

    def move(distribution: Any, pairs: list[tuple[Any, Any]], part: tf.Tensor) -> None:
        def towards(average: Any, variable: Any, part: tf.Tensor) -> None:
            with tf.device(average.device):
                part = tf.cast(part, average.dtype)
                average.assign_sub((average - variable) * part)

        for average, variable in pairs:
            distribution.extended.update(average, towards, args=(variable, part), group=False)

    def update(_variables: Any) -> None:
        with tf.device(optimizer.iterations.value.device):
            is_first = tf.equal(optimizer.iterations.value, 0)
            part = tf.where(is_first, 1.0, 1.0 - momentum)
        pairs = [(average.value, variable.value) for average, variable in _pairs(optimizer)]
        tf.__internal__.distribute.interim.maybe_merge_call(
            move, optimizer._distribution_strategy, pairs, part
        )

    optimizer._update_model_variables_moving_average = update


def find_averages(optimizer: keras.optimizers.Optimizer) -> dict[str, keras.Variable]:
    """Return the averages, keyed by the path of the averaged variable."""
    return {variable.path: average for average, variable in _pairs(optimizer)}


def _pairs(optimizer: keras.optimizers.Optimizer) -> list[tuple[Any, Any]]:
    if not optimizer.use_ema:
        return []
    averages = optimizer._model_variables_moving_average
    pairs = zip(averages, optimizer._trainable_variables, strict=True)
    return [(average, variable) for average, variable in pairs if average is not None]


def begin_averages(variables: Mapping[str, tf.Variable], restored: Collection[str]) -> None:
    """Set the averages that were not restored to the values of their variables."""
    for average, variable in _map_paths(variables).items():
        if average not in restored:
            with tf.device(variables[average].device):
                variables[average].assign(variables[variable].read_value())


@contextmanager
def swap_averages(variables: Mapping[str, tf.Variable]) -> Iterator[None]:
    """Swap weights and averages within the block, which must not train or save."""
    _exchange(variables)
    try:
        yield
    finally:
        _exchange(variables)


def _exchange(variables: Mapping[str, tf.Variable]) -> None:
    for average, variable in _map_paths(variables).items():
        with tf.device(variables[average].device):
            value = variables[variable].read_value()
            variables[variable].assign(variables[average].read_value())
            variables[average].assign(value)


def _map_paths(variables: Mapping[str, tf.Variable]) -> dict[str, str]:
    return {
        path: f"{MODEL}{path.removeprefix(AVERAGE)}"
        for path in variables
        if path.startswith(AVERAGE)
    }

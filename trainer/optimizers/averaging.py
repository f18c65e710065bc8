"""An exponential moving average of the weights, which replaces them in evaluation and export.

The average starts with the weights after the first update, as with Keras's `use_ema`. It is updated
on the server by an atomic subtraction, so that no update is lost if workers write at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

# Prefixes of the checkpoint paths of variables and of their averages.
MODEL = "model/"
AVERAGE = "average/"


def keep_averages(optimizer: keras.optimizers.Optimizer, momentum: float) -> None:
    """Make an optimizer that is not built yet maintain averages of the weights."""
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

"""Pull and push: variables of servers are read once, the gradient is a pure function of them.

A pure function is what XLA can compile where the variables are on other machines, and what several
local steps between a pull and a push need.

`Messages` packs the values that travel between two machines: one message for each server and type,
in each direction, as a message costs more than the bytes in it. The variables themselves stay
unchanged, so that optimizers, checkpoints and placement need no special case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from trainer.strategies.strategy import Batch, Loss


class Messages:
    """The packed values of a list of variables; used inside of `tf.function`."""

    def __init__(self, variables: Sequence[tf.Variable]) -> None:
        """Group the variables by device and type."""
        self._variables = list(variables)
        self._together: dict[tuple[str, tf.DType], list[int]] = {}
        for index, variable in enumerate(self._variables):
            self._together.setdefault((variable.device, variable.dtype), []).append(index)

    def pulled(self) -> list[tf.Tensor]:
        """Return the values of all variables, on the device of the scope."""
        values: list[tf.Tensor] = [None] * len(self._variables)
        for (device, _), indices in self._together.items():
            with tf.device(device):
                packed = _packed([self._variables[i].read_value() for i in indices])
            self._unpack(packed, indices, values)
        return values

    def pushed(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Send values that were computed here, each to the device of its variable."""
        arrived: list[tf.Tensor] = [None] * len(self._variables)
        for (device, dtype), indices in self._together.items():
            packed = _packed([tf.cast(values[i], dtype) for i in indices])
            with tf.device(device):
                self._unpack(packed, indices, arrived)
        return arrived

    def _unpack(self, packed: tf.Tensor, indices: list[int], into: list[tf.Tensor]) -> None:
        if len(indices) == 1:
            into[indices[0]] = packed
            return
        shapes = [self._variables[i].shape for i in indices]
        parts = tf.split(packed, [shape.num_elements() for shape in shapes])
        for index, shape, part in zip(indices, shapes, parts, strict=True):
            into[index] = tf.reshape(part, shape)


def _packed(values: list[tf.Tensor]) -> tf.Tensor:
    if len(values) == 1:
        # The identity places it on the device of the scope.
        return tf.identity(values[0])
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


Tensors = list[tf.Tensor]


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """The values of a model at one moment: trainable ones, and its other state."""

    weights: Tensors
    state: Tensors


def pull(model: keras.Model) -> Pulled:
    """Read every variable of the model, those of each server together."""
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    values = Messages([variable.value for variable in variables]).pulled()
    weights = len(model.trainable_variables)
    return Pulled(weights=values[:weights], state=values[weights:])


def push(model: keras.Model, gradient: Tensors) -> Tensors:
    """Send a gradient to the servers of its variables, and return it there."""
    return Messages([variable.value for variable in model.trainable_variables]).pushed(gradient)


def push_state(model: keras.Model, before: Tensors, after: Tensors) -> None:
    """Send the state that has changed to the variables.

    The change of whole numbers (seeds, counts) is added, which keeps what other workers have added
    since the pull. All else is assigned: moving averages go a part of the way to what they see, and
    the parts of several workers together would overshoot, a variance below zero.
    """
    moved = [
        (variable.value, new - old if variable.value.dtype.is_integer else new)
        for variable, old, new in zip(model.non_trainable_variables, before, after, strict=True)
        if new is not old
    ]
    arrived = Messages([value for value, _ in moved]).pushed([each for _, each in moved])
    for (value, _), each in zip(moved, arrived, strict=True):
        bring = value.assign_add if value.dtype.is_integer else value.assign
        bring(each)


class PureGradient:
    """The function from weights, state and batch to loss, gradient and new state.

    Gradients are dense: a table of which a batch looks up some rows is pulled and pushed whole.
    The function is traced once, however often a graph uses it.
    """

    def __init__(self, model: keras.Model, loss: Loss, *, jit: bool) -> None:
        """Take a model and its loss."""
        self._model, self._loss = model, loss
        self._moving: list[int] = []
        self._traced = tf.function(self._compute, jit_compile=jit or None)

    def __call__(
        self, weights: Tensors, state: Tensors, batch: Batch
    ) -> tuple[tf.Tensor, Tensors, Tensors]:
        """Return the loss, a gradient for each of `weights`, and the state after the batch."""
        value, found, moved = self._traced(weights, state, batch)
        after = list(state)
        for index, each in zip(self._moving, moved, strict=True):
            after[index] = each
        return value, found, after

    def moved(self, before: Tensors, after: Tensors) -> Tensors:
        """Return the state after some batches; the objects of `before` where no layer changes it.

        A TensorFlow loop returns new objects for all that it carries.
        """
        return [new if i in self._moving else before[i] for i, new in enumerate(after)]

    def _compute(self, weights: Tensors, state: Tensors, batch: Batch) -> Any:
        model = self._model
        with tf.GradientTape() as tape:
            tape.watch(weights)
            # Unlike `stateless_call` this goes through `__call__`, which passes `training` on to
            # the layers of a subclassed model.
            with keras.StatelessScope(
                state_mapping=[
                    *zip(model.trainable_variables, weights, strict=True),
                    *zip(model.non_trainable_variables, state, strict=True),
                ],
                collect_losses=True,
            ) as scope:
                outputs = model(batch[0], training=True)
                value = tf.cast(self._loss(model, batch, outputs), tf.float32)
        after = [scope.get_current_value(each) for each in model.non_trainable_variables]
        self._moving = [i for i, old in enumerate(state) if after[i] is not old]
        found = tape.gradient(value, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        gradient = [tf.convert_to_tensor(each) for each in found]
        return value, gradient, [after[i] for i in self._moving]


def pulled_gradient_of(
    model: keras.Model, loss: Loss, *, jit: bool
) -> Callable[[Batch], tuple[tf.Tensor, Tensors]]:
    """Return the function from a batch to loss and gradient; like `strategy.gradient_of`.

    The gradient is already on the servers.
    """
    pure = PureGradient(model, loss, jit=jit)

    def gradient(batch: Batch) -> tuple[tf.Tensor, Tensors]:
        values = pull(model)
        value, found, moved = pure(values.weights, values.state, batch)
        push_state(model, values.state, moved)
        return value, push(model, found)

    return gradient


def local_steps_of(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    loss: Loss,
    *,
    steps: int,
    jit: bool,
) -> Callable[[Any], tf.Tensor]:
    """Return the function that pulls once, takes `steps` local steps, and pushes once.

    The local steps are plain SGD with the optimizer's learning rate; the sum of their gradients is
    pushed, and the server's optimizer applies it as one update (Downpour SGD, Dean et al. 2012,
    section 4.1, with n_fetch = n_push = `steps`). The function takes an iterator of batches and
    returns the mean loss.
    """
    pure = PureGradient(model, loss, jit=jit)

    def update(iterator: Any) -> tf.Tensor:
        values = pull(model)
        # The rate of a schedule is on a server, and a loop that reads it there spans machines.
        rate = tf.identity(tf.cast(optimizer.learning_rate, tf.float32))
        weights, state = values.weights, values.state
        total = [tf.zeros_like(each) for each in weights]
        losses = tf.constant(0.0)
        for _ in tf.range(steps):
            value, found, state = pure(weights, state, next(iterator))
            weights = [w - tf.cast(rate, w.dtype) * g for w, g in zip(weights, found, strict=True)]
            total = [t + g for t, g in zip(total, found, strict=True)]
            losses += value
        optimizer.apply(push(model, total), model.trainable_variables)
        push_state(model, values.state, pure.moved(values.state, state))
        return losses / steps

    return update

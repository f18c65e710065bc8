"""Pull and push: variables of servers are read once, the gradient is a pure function of them.

XLA can compile a pure function where the variables are on other machines, and several local steps
need one. `Messages` packs what travels: one message for each server and type, in each direction, as
a message costs more than the bytes in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from flotilla.trainer.embeddings import table_state
from flotilla.trainer.embeddings.batch_rows import Lookups, Sent, Unforeseen
from flotilla.trainer.optimizers.loss_scale import LossScale
from flotilla.trainer.strategies.strategy import Batch, Loss
from flotilla.trainer.strategies.towers import ONE, Towers

Tensors = list[tf.Tensor]
# A dense tensor, or `IndexedSlices` of looked up rows; zeros of an unused variable.
Gradient = Any


@dataclass(frozen=True)
class ScalarPlace:
    """Where a number is sent that no variable holds, as a float32."""

    device: str
    dtype: ClassVar[tf.DType] = tf.float32
    shape: ClassVar[tf.TensorShape] = tf.TensorShape([])


class Messages:
    """The packed values of a list of variables; used inside of `tf.function`."""

    def __init__(self, variables: Sequence[Any]) -> None:
        """Group by device and type. Where nothing is pulled, a `ScalarPlace` may be among them."""
        self._variables = list(variables)
        self._together: dict[tuple[str, tf.DType], list[int]] = {}
        for index, variable in enumerate(self._variables):
            self._together.setdefault((variable.device, variable.dtype), []).append(index)

    def pulled(self, after: Sequence[Any] = ()) -> list[tf.Tensor]:
        """Return the values of all variables on the device of the scope, once `after` is there."""
        values: list[tf.Tensor] = [None] * len(self._variables)
        for (device, _), indices in self._together.items():
            with tf.device(device), tf.control_dependencies(list(after)):
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


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """The values of a model at one moment: trainable ones, and its other state."""

    weights: Tensors
    state: Tensors


def pull(model: keras.Model) -> Pulled:
    """Read every variable of the model, those of each server together."""
    return _pull(model.trainable_variables, table_state.list_state(model))


def _pull(trainable: Sequence[Any], state: Sequence[Any], after: Sequence[Any] = ()) -> Pulled:
    variables = [variable.value for variable in (*trainable, *state)]
    values = Messages(variables).pulled(after)
    weights = len(trainable)
    return Pulled(weights=values[:weights], state=values[weights:])


def push(model: keras.Model, gradient: Tensors) -> Tensors:
    """Send a gradient to the servers of its variables, and return it there."""
    return Messages([variable.value for variable in model.trainable_variables]).pushed(gradient)


def push_with_loss(model: keras.Model, gradient: Tensors, loss: tf.Tensor, device: str) -> Tensors:
    """Send a gradient as `push` does, and its loss to a device, as its last part.

    Both are one message where the device has trained variables of 32 bits, and is named alike.
    """
    places = [*(each.value for each in model.trainable_variables), ScalarPlace(device)]
    return Messages(places).pushed([*gradient, loss])


def push_state(variables: Sequence[Any], before: Tensors, after: Tensors) -> None:
    """Send the state that has changed to its variables.

    The change of whole numbers (seeds, counts) is added, which keeps what other workers added. All
    else is assigned: the parts of several moving averages together would overshoot.
    """
    moved = [
        (variable.value, new - old if variable.value.dtype.is_integer else new)
        for variable, old, new in zip(variables, before, after, strict=True)
        if new is not old
    ]
    arrived = Messages([value for value, _ in moved]).pushed([each for _, each in moved])
    for (value, _), each in zip(moved, arrived, strict=True):
        bring = value.assign_add if value.dtype.is_integer else value.assign
        bring(each)


class PureGradient:
    """The function from weights, state and batch to loss, gradient and new state, traced once.

    Gradients are dense: a table is pulled and pushed whole, unless its rows are given. `dense` are
    the trained variables without such tables. `state` are the variables that are not trained, but
    the bookkeeping of tables that grow, and those of the loss scale.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: keras.Model,
        loss: Loss,
        *,
        jit: bool,
        scale: LossScale | None = None,
        in_place: bool = False,
        lookups: Lookups | None = None,
    ) -> None:
        """Take a model and its loss.

        `in_place` takes no weights: variables are read where they are, and a gradient of looked up
        rows is `IndexedSlices`. With `lookups` the weights are those of `dense` and then the rows
        of each table, and a batch is a pair of their places and the batch itself.
        """
        self._model, self._loss, self._scale, self._in_place = model, loss, scale, in_place
        self._lookups = lookups
        of_tables = {id(each) for each in lookups.variables()} if lookups else set()
        self.dense = [each for each in model.trainable_variables if id(each) not in of_tables]
        self._not_trained = table_state.list_state(model)
        self.state = [*self._not_trained, *(scale.variables if scale else ())]
        self._moving: list[int] = []
        compute = scale.over(self._compute) if scale else self._compute
        self._traced = tf.function(
            self._only_moved(compute), jit_compile=jit or None, autograph=False
        )

    def __call__(
        self, weights: Tensors, state: Tensors, batch: Batch
    ) -> tuple[tf.Tensor, list[Gradient], Tensors]:
        """Return the loss, a gradient for each of `weights`, and the state after the batch."""
        value, found, moved = self._traced(weights, state, batch)
        after = list(state)
        for index, each in zip(self._moving, moved, strict=True):
            after[index] = each
        return value, found, after

    def pulled(self, after: Sequence[Any] = ()) -> Pulled:
        """Read what the function takes, from wherever it is; see `Messages.pulled`."""
        return _pull([] if self._in_place else self.dense, self.state, after)

    @api.call_with_unspecified_conversion_status
    def forward(self, batch: Batch) -> Tensors:
        """Compute the loss with zeros for all variables but the tables, and return the zeros."""
        variables = [*self.dense, *self._not_trained]
        mapping = [(each, tf.zeros(each.shape, each.value.dtype)) for each in variables]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            self._loss(self._model, batch, self._model(batch[0], training=True))
        return [zeros for _, zeros in mapping]

    def moved(self, before: Tensors, after: Tensors) -> Tensors:
        """Return the state after some batches; the objects of `before` where nothing changes it."""
        return [new if i in self._moving else before[i] for i, new in enumerate(after)]

    def _only_moved(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def moved(weights: Tensors, state: Tensors, batch: Batch) -> Any:
            value, found, after = compute(weights, state, batch)
            self._moving = [i for i, old in enumerate(state) if after[i] is not old]
            return value, found, [after[i] for i in self._moving]

        return moved

    # Functions that the model gives to `tf.map_fn` are converted.
    @api.call_with_unspecified_conversion_status
    def _compute(
        self, weights: Tensors, state: Tensors, batch: Batch, seed: tf.Tensor | None = None
    ) -> tuple[tf.Tensor, list[Gradient], Tensors]:
        model = self._model
        trainable = self.dense
        answered: AbstractContextManager[None] = nullcontext()
        with tf.GradientTape() as tape:
            tape.watch(weights)
            sources = weights
            if self._lookups:
                places, batch = batch
                rows, weights = weights[len(trainable) :], weights[: len(trainable)]
                answered = self._lookups.given(rows, places)
            if self._in_place:
                # Keras looks in the scope for what it regularizes, all of which is needed then.
                trainable = [each for each in trainable if each.regularizer]
                weights = [each.value.read_value() for each in trainable]
            # Unlike `stateless_call` this goes through `__call__`, which passes `training` on to
            # the layers of a subclassed model.
            with (
                keras.StatelessScope(
                    state_mapping=[
                        *zip(trainable, weights, strict=True),
                        *zip(self._not_trained, state, strict=True),
                    ],
                    collect_losses=True,
                ) as scope,
                answered,
            ):
                outputs = model(batch[0], training=True)
                value = tf.cast(self._loss(model, batch, outputs), tf.float32)
        after = [scope.get_current_value(each) for each in self._not_trained]
        if self._in_place:
            sources = [variable.value for variable in model.trainable_variables]
        found = tape.gradient(
            value,
            sources,
            output_gradients=seed,
            unconnected_gradients=tf.UnconnectedGradients.ZERO,
        )
        if not self._in_place:
            found = [tf.convert_to_tensor(each) for each in found]
        return value, found, after


def pulled_gradient_of(  # noqa: PLR0913
    model: keras.Model,
    loss: Loss,
    *,
    jit: bool,
    parts: int = 1,
    scale: LossScale | None = None,
    in_place: bool = False,
    towers: Towers = ONE,
    loss_on: str = "",
) -> Callable[..., tuple[tf.Tensor, list[Gradient]]]:
    """Return the function from what the towers take to loss and gradient.

    It takes what the pulls have to wait for besides, if anything (`Messages.pulled`).

    Args:
        model: has its variables anywhere.
        loss: of a batch.
        jit: whether XLA compiles the gradient.
        parts: where above 1, a batch is a stack of so many batches, taken one after the other, and
            loss and gradient are the means over them. Only one is computed at a time.
        scale: that of the loss, where it is scaled.
        in_place: whether the variables are read where they are. Otherwise they are pulled before,
            and the gradient is on the servers already.
        towers: the devices of a worker; each takes a batch, or a stack of them.
        loss_on: where there is one, and variables are pulled, the device to which the loss is sent
            with the gradient, as its last part (`push_with_loss`).
    """
    pure = PureGradient(model, loss, jit=jit, scale=scale, in_place=in_place)
    compute = towers.pure(accumulated(pure, parts) if parts > 1 else pure, pure.state)

    def gradient(batch: Any, after: Sequence[Any] = ()) -> tuple[tf.Tensor, list[Gradient]]:
        values = pure.pulled(after)
        value, found, moved = compute(values.weights, values.state, batch)
        push_state(pure.state, values.state, pure.moved(values.state, moved))
        if in_place:
            return value, found
        if loss_on:
            return value, push_with_loss(model, found, value, loss_on)
        return value, push(model, found)

    return gradient


def rows_gradient_of(
    model: keras.Model,
    loss: Loss,
    lookups: Lookups,
    *,
    otherwise: Callable[[Batch, Unforeseen], Any],
) -> Callable[[Batch], tuple[tf.Tensor, list[Gradient]]]:
    """Return the function from a batch to loss and gradient, with the rows that the batch looks up.

    Those of a server are one message in each direction. The gradient is on the servers already.

    Args:
        model: has its variables anywhere.
        loss: of a batch.
        lookups: those of the model.
        otherwise: is called where the rows of a batch cannot be known beforehand.
    """
    pure = PureGradient(model, loss, jit=False, lookups=lookups)

    def gradient(batch: Batch) -> tuple[tf.Tensor, list[Gradient]]:
        try:
            ids, places = lookups.asked(pure.forward, batch)
        except Unforeseen as why:
            return otherwise(batch, why)  # type: ignore[no-any-return]
        values, sent = pure.pulled(), Sent(lookups.tables, ids)
        weights = [*values.weights, *sent.rows()]
        value, found, moved = pure(weights, values.state, (places, batch))
        push_state(pure.state, values.state, pure.moved(values.state, moved))
        dense = Messages([each.value for each in pure.dense]).pushed(found[: len(pure.dense)])
        arrived = dict(zip(map(id, pure.dense), dense, strict=True))
        arrived |= sent.gradients(found[len(pure.dense) :])
        return value, [arrived[id(each)] for each in model.trainable_variables]

    return gradient


Compute = Callable[[Tensors, Tensors, Batch], tuple[tf.Tensor, list[Gradient], Tensors]]


def accumulated(compute: Compute, parts: int) -> Compute:
    """Return the function of a stack of batches: means of loss and gradient, and the last state."""

    def over_all(
        weights: Tensors, state: Tensors, batches: Batch
    ) -> tuple[tf.Tensor, list[Gradient], Tensors]:
        def add(
            part: tf.Tensor, total: tf.Tensor, sums: Tensors, state: Tensors
        ) -> tuple[tf.Tensor, tf.Tensor, Tensors, Tensors]:
            value, found, state = compute(weights, state, _part(batches, part))
            return part + 1, total + value, list(map(plus, sums, found)), state

        total, sums, state = compute(weights, state, _part(batches, 0))
        if any(isinstance(each, tf.IndexedSlices) for each in sums):
            # More rows after each batch, of which a loop carries no number.
            for part in range(1, parts):
                # Not before the one before it: only one is in memory at a time.
                with tf.control_dependencies([total]):
                    batch = tf.nest.map_structure(tf.identity, _part(batches, part))
                value, found, state = compute(weights, state, batch)
                total, sums = total + value, list(map(plus, sums, found))
        else:
            _, total, sums, state = tf.while_loop(
                lambda part, *_: part < parts,
                add,
                (tf.constant(1), total, sums, state),
                parallel_iterations=1,
            )
        return total / parts, [over(each, parts) for each in sums], state

    return over_all


def _part(batches: Batch, part: Any) -> Batch:
    part_of: Batch = tf.nest.map_structure(lambda each: each[part], batches)
    return part_of


def plus(one: Gradient, other: Gradient) -> Gradient:
    """Return the sum of two gradients of a variable; sparse ones stay sparse."""
    if isinstance(one, tf.IndexedSlices):
        values = tf.concat([one.values, other.values], 0)
        rows = tf.concat([one.indices, other.indices], 0)
        return tf.IndexedSlices(values, rows, one.dense_shape)
    return one + other


def over(gradient: Gradient, count: Any) -> Gradient:
    """Return the gradient of a variable divided by a number."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / count, gradient.indices, gradient.dense_shape)
    return gradient / count


def apply_and_count(
    optimizer: keras.optimizers.Optimizer, gradient: list[Gradient], variables: Sequence[Any]
) -> None:
    """Apply a gradient, and count the update when the gradient is on the server of the counter.

    Nothing else orders the two: updates that a dying worker does not make would count as applied.
    """
    counter = optimizer.iterations.value
    count = optimizer.iterations.assign_add
    here = [
        found
        for found, variable in zip(gradient, variables, strict=True)
        if variable.value.device == counter.device
    ]
    with tf.device(counter.device):
        # What has to come here anyway, where there is any: that is no further message.
        arrived = [tf.identity(getattr(each, "values", each)) for each in here or gradient[:1]]

    def count_later(by: Any) -> Any:
        # The device is that of the number to add, which waits for what has arrived.
        with tf.device(counter.device), tf.control_dependencies(arrived):
            return count(by)

    optimizer.iterations.assign_add = count_later
    try:
        optimizer.apply(gradient, variables)
    finally:
        optimizer.iterations.assign_add = count

"""Gradients as pure functions of variables that are pulled once from the servers.

XLA can compile a pure function even if the variables are on other machines, and local steps need a
pure function because they change copies of the variables. `Messages` packs all values for a server
into one message per dtype and direction, because the number of messages matters more than their
size.

A worker with several devices computes one gradient on all of them (`Towers`). Each device takes its
own batch. All devices use the same weights, which are pulled once, and the mean of their gradients
is pushed once. Moving averages are averaged over the towers, and each tower has its own seed. Other
state variables may define a `join` method that merges their values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from flotilla.trainer.embeddings import embedding_table
from flotilla.trainer.embeddings.batch_rows import Lookups, Sent, Unforeseen
from flotilla.trainer.embeddings.embedding_table import SEED
from flotilla.trainer.optimizers.loss_scale import LossScale
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.strategies.strategy import Batch, Loss

Tensors = list[tf.Tensor]
# A dense tensor (zeros if the loss ignores the variable), or `IndexedSlices` for some of the rows.
Gradient = Any
# A function from weights, state and batch to the loss, one gradient per weight, and the new state.
Compute = Callable[[Tensors, Tensors, Batch], tuple[tf.Tensor, list[Gradient], Tensors]]


@dataclass(frozen=True)
class ScalarPlace:
    """The device to which `Messages` sends a float32 scalar that belongs to no variable."""

    device: str
    dtype: ClassVar[tf.DType] = tf.float32
    shape: ClassVar[tf.TensorShape] = tf.TensorShape([])


class Messages:
    """Variables whose values a `tf.function` sends in one message per device and dtype."""

    def __init__(self, variables: Sequence[Any]) -> None:
        """Group the variables by device and dtype. A `ScalarPlace` can be pushed but not pulled."""
        self._variables = list(variables)
        self._together: dict[tuple[str, tf.DType], list[int]] = {}
        for index, variable in enumerate(self._variables):
            self._together.setdefault((variable.device, variable.dtype), []).append(index)

    def pull(self, after: Sequence[Any] = ()) -> list[tf.Tensor]:
        """Copy all variables to the current device, after the tensors in `after` are computed."""
        values: list[tf.Tensor] = [None] * len(self._variables)
        for (device, _), indices in self._together.items():
            with tf.device(device), tf.control_dependencies(list(after)):
                packed = _pack([self._variables[i].read_value() for i in indices])
            self._unpack(packed, indices, values)
        return values

    def push(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Send each value to its variable's device, and return the tensors on those devices."""
        arrived: list[tf.Tensor] = [None] * len(self._variables)
        for (device, dtype), indices in self._together.items():
            packed = _pack([tf.cast(values[i], dtype) for i in indices])
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


def _pack(values: list[tf.Tensor]) -> tf.Tensor:
    if len(values) == 1:
        # `identity` copies the value to the current device.
        return tf.identity(values[0])
    return tf.concat([tf.reshape(value, [-1]) for value in values], 0)


@dataclass(frozen=True, kw_only=True)
class Pulled:
    """The values of a model's trainable variables and other state, as read by one pull."""

    weights: Tensors
    state: Tensors


def push(model: keras.Model, gradient: Tensors) -> Tensors:
    """Send each gradient to its variable's server, and return the tensors on the servers."""
    return Messages([variable.value for variable in model.trainable_variables]).push(gradient)


def push_state(variables: Sequence[Any], before: Tensors, after: Tensors) -> None:
    """Write changed state back to its variables.

    Integers, such as seeds, are incremented by the change, which keeps other workers' increments.
    Other values are assigned: a moving average would overshoot if all workers added to it.
    """
    moved = [
        (variable.value, new - old if variable.value.dtype.is_integer else new)
        for variable, old, new in zip(variables, before, after, strict=True)
        if new is not old
    ]
    arrived = Messages([value for value, _ in moved]).push([each for _, each in moved])
    for (value, _), each in zip(moved, arrived, strict=True):
        bring = value.assign_add if value.dtype.is_integer else value.assign
        bring(each)


class PureGradient:
    """A traced function from weights, state and batch to the loss, the gradients and the new state.

    Unless `in_place` is set, gradients are dense: a table is pulled and pushed as a whole, except
    when its rows are passed as weights. `dense` lists the trainable variables without the tables
    whose rows are passed. `state` lists the variables of the loss scale and the non-trainable
    variables, except for the bookkeeping of dynamic tables.
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
        """Create the function for a model and its loss.

        With `in_place`, the function takes no weights, reads the variables on their devices, and
        returns `IndexedSlices` as the gradient of a lookup. With `lookups`, the weights are the
        values of `dense` followed by the rows of each table, and the batch is a pair of the rows'
        places and the actual batch.
        """
        self._model, self._loss, self._scale, self._in_place = model, loss, scale, in_place
        self._lookups = lookups
        of_tables = {id(each) for each in lookups.variables()} if lookups else set()
        self.dense = [each for each in model.trainable_variables if id(each) not in of_tables]
        self._not_trained = embedding_table.list_state(model)
        self.state = [*self._not_trained, *(scale.variables if scale else ())]
        self._moving: list[int] = []
        compute = scale.wrap(self._compute) if scale else self._compute
        self._traced = tf.function(
            self._only_moved(compute), jit_compile=jit or None, autograph=False
        )

    def __call__(
        self, weights: Tensors, state: Tensors, batch: Batch
    ) -> tuple[tf.Tensor, list[Gradient], Tensors]:
        """Return the loss, the gradient of each weight, and the state after the batch."""
        value, found, moved = self._traced(weights, state, batch)
        after = list(state)
        for index, each in zip(self._moving, moved, strict=True):
            after[index] = each
        return value, found, after

    def pull(self, after: Sequence[Any] = ()) -> Pulled:
        """Read the weights and the state from their devices. See `Messages.pull` for `after`."""
        weights = [] if self._in_place else self.dense
        values = Messages([each.value for each in (*weights, *self.state)]).pull(after)
        return Pulled(weights=values[: len(weights)], state=values[len(weights) :])

    @api.call_with_unspecified_conversion_status
    def forward(self, batch: Batch) -> Tensors:
        """Run the model and loss with zeros for all variables but the tables. Return the zeros."""
        variables = [*self.dense, *self._not_trained]
        mapping = [(each, tf.zeros(each.shape, each.value.dtype)) for each in variables]
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            self._loss(self._model, batch, self._model(batch[0], training=True))
        return [zeros for _, zeros in mapping]

    def merge_moved(self, before: Tensors, after: Tensors) -> Tensors:
        """Return the full state after some batches: changed tensors, and others from `before`."""
        return [new if i in self._moving else before[i] for i, new in enumerate(after)]

    def _only_moved(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def compute_moved(weights: Tensors, state: Tensors, batch: Batch) -> Any:
            value, found, after = compute(weights, state, batch)
            self._moving = [i for i, old in enumerate(state) if after[i] is not old]
            return value, found, [after[i] for i in self._moving]

        return compute_moved

    # With this decorator, AutoGraph converts only functions that the model passes to `tf.map_fn`.
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
                answered = self._lookups.answer(rows, places)
            if self._in_place:
                # Keras reads each regularized variable from the scope, so the scope must contain
                # all of them.
                trainable = [each for each in trainable if each.regularizer]
                weights = [each.value.read_value() for each in trainable]
            # Unlike `stateless_call`, this runs `__call__`, which passes `training` to the layers
            # of a subclassed model.
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


@dataclass(frozen=True, kw_only=True)
class Towers:
    """The devices of every worker, such as `/device:GPU:0`. Often, there is only one."""

    devices: tuple[str, ...] = ("/device:CPU:0",)

    def __len__(self) -> int:
        """Return the number of batches in one step."""
        return len(self.devices)

    def take(self, iterator: Any) -> Any:
        """Return the input of one step: a batch, or a list with one batch for each device."""
        return next(iterator) if len(self) == 1 else [next(iterator) for _ in self.devices]

    def gradient(self, gradient: Callable[[Batch], Any]) -> Callable[[Any], Any]:
        """Return a function from the result of `take` to the mean loss and the mean gradient."""
        if len(self) == 1:
            return gradient

        def compute_all(batches: Sequence[Batch]) -> tuple[tf.Tensor, list[Gradient]]:
            found = []
            for device, batch in zip(self.devices, batches, strict=True):
                with tf.device(device):
                    found.append(gradient(batch))
            return _means(found)

        return compute_all

    def pure(self, compute: Compute, state_of: Sequence[Any]) -> Compute:
        """Return a `compute` that runs on all devices. `state_of` lists the state variables."""
        if len(self) == 1:
            return compute
        seeds = [variable.path.endswith(SEED) for variable in state_of]

        def compute_all(weights: Tensors, state: Tensors, batches: Any) -> Any:
            ended = []
            for number, (device, batch) in enumerate(zip(self.devices, batches, strict=True)):
                own = list(state)
                with tf.device(device):
                    if number:
                        own = [
                            each + tf.cast([number, 0], each.dtype) if seed else each
                            for each, seed in zip(state, seeds, strict=True)
                        ]
                    ended.append(compute(weights, own, batch))
            after = [
                each[0] if each[0] is old else _join(variable, each)
                for variable, old, *each in zip(
                    state_of, state, *(moved for *_, moved in ended), strict=True
                )
            ]
            return *_means([(value, found) for value, found, _ in ended]), after

        return compute_all


ONE = Towers()


def list_towers(devices: Sequence[str]) -> Towers:
    """Return the towers of all workers from their device names. Raises `UserError`."""
    specs = [tf.DeviceSpec.from_string(name) for name in devices]
    of_workers = [each for each in specs if each.job == "worker"]
    kind = "GPU" if any(each.device_type == "GPU" for each in of_workers) else "CPU"
    counts = dict.fromkeys(sorted(each.task for each in of_workers), 0)
    for each in of_workers:
        counts[each.task] += each.device_type == kind
    if len(set(counts.values())) > 1:
        found = ", ".join(f"worker-{worker} has {count}" for worker, count in counts.items())
        raise UserError(
            f"every worker needs the same number of {kind}s, but {found}: set CUDA_VISIBLE_DEVICES "
            "if you start tasks yourself"
        )
    return Towers(devices=tuple(f"/device:{kind}:{i}" for i in range(max(counts.values()))))


def mean(gradients: Sequence[Gradient]) -> Gradient:
    """Return the mean of a variable's gradients. Sparse gradients stay sparse."""
    if isinstance(gradients[0], tf.IndexedSlices):
        values = tf.concat([each.values for each in gradients], 0) / len(gradients)
        indices = tf.concat([each.indices for each in gradients], 0)
        return tf.IndexedSlices(values, indices, gradients[0].dense_shape)
    return tf.add_n(list(gradients)) / len(gradients)


def _join(variable: Any, values: Sequence[tf.Tensor]) -> tf.Tensor:
    first = values[0]
    join = getattr(variable, "join", mean if first.dtype.is_floating else None)
    return join(values) if join else first


def _means(found: Sequence[tuple[tf.Tensor, list[Gradient]]]) -> tuple[tf.Tensor, list[Gradient]]:
    gradients = zip(*(gradient for _, gradient in found), strict=True)
    return mean([loss for loss, _ in found]), [mean(each) for each in gradients]


def build_pulled_gradient(  # noqa: PLR0913
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
    """Return a function from the input of one step to the loss and the gradients.

    The function has an optional second argument: tensors that the pulls wait for.

    Args:
        model: the model. Its variables may be on any device.
        loss: the loss of a batch.
        jit: whether XLA compiles the gradient.
        parts: the number of batches in a stack. If it is above 1, the function processes the
            batches one by one and returns the mean loss and gradients.
        scale: the loss scale, if any.
        in_place: whether the variables are read on their devices. Otherwise they are pulled first,
            and the returned gradient is on the servers.
        towers: the devices of a worker. Each takes a batch, or a stack of batches.
        loss_on: the device that receives the loss as the last of the gradients, in one message with
            the trainable float32 variables of the same device name. It is used only if the
            variables are pulled.
    """
    pure = PureGradient(model, loss, jit=jit, scale=scale, in_place=in_place)
    compute = towers.pure(accumulate(pure, parts) if parts > 1 else pure, pure.state)

    def gradient(batch: Any, after: Sequence[Any] = ()) -> tuple[tf.Tensor, list[Gradient]]:
        values = pure.pull(after)
        value, found, moved = compute(values.weights, values.state, batch)
        push_state(pure.state, values.state, pure.merge_moved(values.state, moved))
        if in_place:
            return value, found
        if loss_on:
            places = [*(each.value for each in model.trainable_variables), ScalarPlace(loss_on)]
            return value, Messages(places).push([*found, value])
        return value, push(model, found)

    return gradient


def build_rows_gradient(
    model: keras.Model,
    loss: Loss,
    lookups: Lookups,
    *,
    otherwise: Callable[[Batch, Unforeseen], Any],
) -> Callable[[Batch], tuple[tf.Tensor, list[Gradient]]]:
    """Return a gradient function that pulls only the table rows of its batch.

    For each server and dtype, one message brings the rows and one returns their gradients. The
    returned gradients are on the servers.

    Args:
        model: the model. Its variables may be on any device.
        loss: the loss of a batch.
        lookups: the lookups of the model.
        otherwise: the function to call if the rows of a batch are unknown before the model runs.
    """
    pure = PureGradient(model, loss, jit=False, lookups=lookups)

    def gradient(batch: Batch) -> tuple[tf.Tensor, list[Gradient]]:
        try:
            ids, places = lookups.find_ids(pure.forward, batch)
        except Unforeseen as why:
            return otherwise(batch, why)  # type: ignore[no-any-return]
        values, sent = pure.pull(), Sent(lookups.tables, ids)
        weights = [*values.weights, *sent.rows()]
        value, found, moved = pure(weights, values.state, (places, batch))
        push_state(pure.state, values.state, pure.merge_moved(values.state, moved))
        dense = Messages([each.value for each in pure.dense]).push(found[: len(pure.dense)])
        arrived = dict(zip(map(id, pure.dense), dense, strict=True))
        arrived |= sent.gradients(found[len(pure.dense) :])
        return value, [arrived[id(each)] for each in model.trainable_variables]

    return gradient


def accumulate(compute: Compute, parts: int) -> Compute:
    """Return a function from `parts` batches to the mean loss and gradients, and the last state."""

    def accumulate_all(
        weights: Tensors, state: Tensors, batches: Batch
    ) -> tuple[tf.Tensor, list[Gradient], Tensors]:
        def add(
            part: tf.Tensor, total: tf.Tensor, sums: Tensors, state: Tensors
        ) -> tuple[tf.Tensor, tf.Tensor, Tensors, Tensors]:
            value, found, state = compute(weights, state, _part(batches, part))
            return part + 1, total + value, list(map(add_gradients, sums, found)), state

        total, sums, state = compute(weights, state, _part(batches, 0))
        if any(isinstance(each, tf.IndexedSlices) for each in sums):
            # Unroll the loop: its variables have fixed shapes, but a sparse sum grows each time.
            for part in range(1, parts):
                # Wait for the previous batch, so that only one is in memory at a time.
                with tf.control_dependencies([total]):
                    batch = tf.nest.map_structure(tf.identity, _part(batches, part))
                value, found, state = compute(weights, state, batch)
                total, sums = total + value, list(map(add_gradients, sums, found))
        else:
            _, total, sums, state = tf.while_loop(
                lambda part, *_: part < parts,
                add,
                (tf.constant(1), total, sums, state),
                parallel_iterations=1,
            )
        return total / parts, [divide_gradient(each, parts) for each in sums], state

    return accumulate_all


def _part(batches: Batch, part: Any) -> Batch:
    part_of: Batch = tf.nest.map_structure(lambda each: each[part], batches)
    return part_of


def add_gradients(one: Gradient, other: Gradient) -> Gradient:
    """Return the sum of two gradients of a variable. Sparse gradients stay sparse."""
    if isinstance(one, tf.IndexedSlices):
        values = tf.concat([one.values, other.values], 0)
        rows = tf.concat([one.indices, other.indices], 0)
        return tf.IndexedSlices(values, rows, one.dense_shape)
    return one + other


def divide_gradient(gradient: Gradient, count: Any) -> Gradient:
    """Return the gradient of a variable divided by `count`."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values / count, gradient.indices, gradient.dense_shape)
    return gradient / count


def apply_and_count(
    optimizer: keras.optimizers.Optimizer, gradient: list[Gradient], variables: Sequence[Any]
) -> None:
    """Apply a gradient. Count the update only after the gradient has reached the counter's server.

    Otherwise, an update that a dying worker never applied would be counted as applied.
    """
    counter = optimizer.iterations.value
    count = optimizer.iterations.assign_add
    here = [
        found
        for found, variable in zip(gradient, variables, strict=True)
        if variable.value.device == counter.device
    ]
    with tf.device(counter.device):
        # Prefer gradients of variables on this server, because they need no extra message.
        arrived = [tf.identity(getattr(each, "values", each)) for each in here or gradient[:1]]

    def count_later(by: Any) -> Any:
        with tf.device(counter.device), tf.control_dependencies(arrived):
            return count(by)

    optimizer.iterations.assign_add = count_later
    try:
        optimizer.apply(gradient, variables)
    finally:
        optimizer.iterations.assign_add = count

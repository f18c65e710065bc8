"""What training minimises and a validation measures, for one task and any model.

The loss goes the way of Keras: by `compute_loss` of the model, so that `add_loss`, regularizers,
masks, weights of examples and a `compute_loss` of the user's count under every strategy as they do
in `fit`. What Keras's own loss of a compiled model holds is taken out of it before: a container
that makes variables when it is called first, which no graph on a worker can.

Metrics are Keras's. Their states are sums over the examples: `totals` returns the sums of all of
them as one vector, vectors of several workers are added, and `means` makes values of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from keras.src.losses.loss import scale_loss_for_distribution, unscale_loss_for_distribution

from trainer.errors import UserError
from trainer.tasks.base import Part, Task

LOSS = "loss"
Sums = npt.NDArray[np.float64]


class TaskLoss:
    """The loss of a task in the place of Keras's own container; it has no variables."""

    #: Keras asks each container for the metrics that it makes.
    metrics: tuple[()] = ()
    variables: tuple[()] = ()

    def __init__(self, task: Task) -> None:
        """Minimise the loss of a task."""
        self._loss = task.loss()

    def __call__(self, labels: Any, outputs: Any, weights: Any = None) -> tf.Tensor:
        """Return the mean loss of a batch."""
        return self._loss(labels, outputs, sample_weight=weights)


class Objective:
    """The loss and the metrics of one task."""

    def __init__(self, task: Task) -> None:
        """Measure nothing yet; metrics are made when the first model is measured."""
        self.task = task
        self._loss = TaskLoss(task)
        self._metrics: list[keras.Metric] = []
        self._traced = tf.function(self._sums, reduce_retracing=True)
        self._shapes: list[list[tuple[int, ...]]] = []

    def attach(self, model: keras.Model) -> keras.Model:
        """Make the task's loss that of a model, and return the model."""
        model._compile_loss = self._loss
        model._aggregate_additional_loss = _of_layer
        return model

    def loss(self, model: keras.Model, batch: tuple[Any, ...], outputs: Any) -> tf.Tensor:
        """Return the mean loss of a batch in training, with the losses of layers."""
        inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(batch)
        value = model._compute_loss(inputs, labels, outputs, weights, training=True)
        return tf.cast(value, tf.float32)

    def totals(self, model: keras.Model, batches: tf.data.Dataset) -> tf.Tensor:
        """Return the sums over finite batches: of examples, of the loss, and of all metrics.

        A vector in double precision. It is traced into a graph, which may run elsewhere.
        """
        self._build(*_one_example(model, batches.element_spec))
        total = tf.zeros([self.size], tf.float64)
        # Not over the dataset itself: its functions may not reach variables on other machines.
        for batch in iter(batches):
            inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(batch)
            total += self._sums(labels, in_single_precision(model(inputs, training=False)), weights)
        return total

    def sums(self, part: Part) -> Sums:
        """Return the vector of `totals` for examples that a model has predicted."""
        labels, outputs, weights, _ = part
        first = slice(0, 1)
        self._build(*(at(tree, first) for tree in (labels, outputs, weights)))
        found: Sums = self._traced(labels, outputs, weights).numpy()
        return found

    def means(self, sums: Sums) -> dict[str, float]:
        """Return the mean loss and the metrics from `totals`, or from totals that were added up.

        Raises:
            UserError: there are no examples.
        """
        count, loss, *rest = sums.tolist()
        if not count:
            raise UserError("there are no examples to measure the model on")
        found = {LOSS: loss / count}
        for metric, shapes in zip(self._metrics, self._shapes, strict=True):
            state = []
            for shape in shapes:
                size = int(np.prod(shape))
                state.append(tf.constant(np.reshape(rest[:size], shape), tf.float32))
                del rest[:size]
            found |= named(metric, metric.stateless_result(state))
        return found

    def of_slice(self, part: Part) -> dict[str, Any]:
        """Return `metrics` and `intervals` of some of the examples."""
        found = self.task.of_slice(part)
        metrics = {**self.means(self.sums(part)), **found.get("metrics", {})}
        return {"metrics": metrics, "intervals": found.get("intervals", {})}

    @property
    def size(self) -> int:
        """The length of a vector of `totals`."""
        return 2 + sum(int(np.prod(shape)) for shapes in self._shapes for shape in shapes)

    def _build(self, labels: Any, outputs: Any, weights: Any) -> None:
        """Make the metrics, some of which make their variables at the first update."""
        if self._shapes:
            return
        self._metrics = self.task.metrics()
        predictions = self.task.predictions(outputs)
        # Nothing reads these variables.
        with keras.StatelessScope(initialize_variables=False):
            for metric in self._metrics:
                metric.update_state(labels, predictions, sample_weight=weights)
        self._shapes = [[tuple(v.shape) for v in metric.variables] for metric in self._metrics]

    def _sums(self, labels: Any, outputs: Any, weights: Any) -> tf.Tensor:
        """Return the vector of one batch."""
        count = tf.cast(tf.shape(keras.tree.flatten(labels)[0])[0], tf.float64)
        mean = unscale_loss_for_distribution(self._loss(labels, outputs, weights))
        parts = [count, tf.cast(mean, tf.float64) * count]
        predictions = self.task.predictions(outputs)
        for metric in self._metrics:
            before = [tf.zeros(each.shape, each.dtype) for each in metric.variables]
            parts += metric.stateless_update_state(
                before, labels, predictions, sample_weight=weights
            )
        return tf.concat([tf.reshape(tf.cast(each, tf.float64), [-1]) for each in parts], 0)


def _of_layer(loss: Any) -> tf.Tensor:
    """Return the loss of a layer as a scalar; Keras adds up no two of different precision."""
    return scale_loss_for_distribution(tf.reduce_sum(tf.cast(loss, tf.float32)))


def _one_example(model: keras.Model, spec: Any) -> tuple[Any, Any, Any]:
    """Return labels, outputs and weights of one example of zeros; the model is not run."""
    inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(spec)
    given = tf.nest.map_structure(
        lambda each: keras.KerasTensor((None, *each.shape[1:]), each.dtype.name), inputs
    )
    outputs = model.compute_output_spec(given)
    return (
        tf.nest.map_structure(_zeros, labels),
        tf.nest.map_structure(lambda each: tf.zeros([1, *each.shape[1:]]), outputs),
        None if weights is None else _zeros(weights),
    )


def _zeros(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([1, *spec.shape[1:]], spec.dtype)


def named(metric: keras.Metric, result: Any) -> dict[str, float]:
    """Return what a metric measured by name; one that gives a mapping gives several."""
    if isinstance(result, Mapping):
        return {name: float(value) for name, value in result.items()}
    return {metric.name: float(result)}


def at(tree: Any, rows: Any) -> Any:
    """Return some rows of every array of a tree, in which None stands for nothing."""
    return tf.nest.map_structure(lambda each: None if each is None else each[rows], tree)


def in_single_precision(outputs: Any) -> Any:
    """Return a model's outputs as float32, whatever it computes in."""
    return tf.nest.map_structure(lambda each: tf.cast(each, tf.float32), outputs)

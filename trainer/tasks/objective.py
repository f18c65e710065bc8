"""The training loss and the validation metrics of a task, for any model.

The loss is computed by the model's own Keras method, so that `add_loss`, regularizers, masks,
example weights and a user's `compute_loss` work under every strategy as they do in `fit`. The loss
container of a compiled model is replaced first, because its first call creates variables. A graph
on a worker cannot create variables.

The states of Keras metrics are sums over examples. `totals` returns all of them in one vector, the
vectors of all workers are added, and `means` computes the metrics from the result.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.impl import api

from flotilla.trainer.config.main_metric import LOSS, main_first
from flotilla.trainer.config.schema import OutputConfig
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.tasks import named
from flotilla.trainer.tasks.base import (
    Array,
    Direction,
    Part,
    Tally,
    Target,
    Task,
    example_weights,
    find_activation,
    last_layers,
)
from flotilla.trainer.tasks.compiled import (
    Compiled,
    Measured,
    State,
    Sums,
    TaskLoss,
    Term,
    cast_layer_loss,
    find_at_path,
    read_compiled,
    takes_logits,
    weights_by_class,
    whole_losses,
)

# AutoGraph is slow. Built-in tasks do not need it, because they have no loops or branches over
# tensors.
_BUILT_IN = "flotilla.trainer.tasks."
# Number of calls before a function is traced. With fewer calls, tracing would not save time.
_UNTRACED = 8
# Symbolic labels and outputs for metrics that are created only to check their names.
_ONE = keras.KerasTensor((None,)), keras.KerasTensor((None, 1))


class Objective:
    """The loss and the metrics of a task, as set by the configuration and by a compiled model."""

    def __init__(  # noqa: PLR0913
        self,
        task: Task,
        *,
        loss: str = "",
        metrics: Sequence[str] = (),
        outputs: Mapping[str, OutputConfig] | None = None,
        weights: Mapping[str, Array] | None = None,
        main_metric: str = "",
        better: Direction | None = None,
    ) -> None:
        """Store the configuration.

        Args:
            task: the task, which also provides the defaults.
            loss: name of a loss that replaces the losses of the task and the compiled model.
            metrics: names of additional metrics for every output.
            outputs: loss and metrics of single outputs, by output name.
            weights: class weights for training, keyed by output name as in `Task.parts`.
            main_metric: metric that replaces the task's main metric.
            better: direction of `main_metric`, if neither the task nor Keras defines it.
        """
        self.task = task
        self.main_metric = main_metric or task.main_metric
        self._better = better
        # Directions of metrics from the configuration and the compiled model.
        self._further: dict[str, Direction | None] = {}
        self.compiled: Compiled | None = None
        if loss and len(task.parts) > 1:
            raise ConfigError(
                f"task.loss: one loss is set for several outputs ({', '.join(task.parts)}); set "
                "the loss of each output in task.outputs"
            )
        self._losses = dict.fromkeys(task.parts, ("task.loss", loss)) if loss else {}
        self._named = [(name, "task.metrics", each) for name in task.parts for each in metrics]
        for name, said in (outputs or {}).items():
            key = f"task.outputs.{name}"
            self._losses |= {name: (f"{key}.loss", said.loss)} if said.loss else {}
            self._named += [(name, f"{key}.metrics", each) for each in said.metrics]
        self._class_weights = weights or {}
        self._loss = TaskLoss([*self._own_terms()])
        self._require_names()
        self._forget()

    def _forget(self) -> None:
        """Remove all metrics. They are created again for the next model."""
        #: The ranges of a vector from `totals`: first the loss, then each metric.
        self.states = [State(name=LOSS, begin=0, end=2, shapes=(), measured=None)]
        self._summed = self._sums
        tasks = (self.task, *self.task.parts.values())
        if all(type(each).__module__.startswith(_BUILT_IN) for each in tasks):
            self._summed = api.call_with_unspecified_conversion_status(self._sums)
        self._traced = tf.function(self._summed, reduce_retracing=True)
        self._calls: Counter[bool] = Counter()
        self._traced_alone: dict[str, Any] = {}
        # Outputs with the metrics of a built-in task. Its tally computes these metrics exactly.
        self._exact = {
            _path(name)
            for name, part in self.task.parts.items()
            if type(part).metrics.__module__.startswith(_BUILT_IN)
        }

    def _require_names(self) -> None:
        with named.skip_initial_values():
            for _, key, name in self._named:
                named.metric(name, key, *_ONE)
        for key, name in self._losses.values():
            named.loss(name, key, logits=True)

    def set_thresholds(self, thresholds: Mapping[str, Any]) -> Objective:
        """Return this objective with these decision thresholds. See `Task.set_thresholds`."""
        if not thresholds:
            return self
        found = copy.copy(self)
        found.task = self.task.set_thresholds(thresholds)
        found._forget()
        return found

    def accept(self, model: keras.Model, outputs: Any) -> None:
        """Check that a model fits the task, and use the arguments that it was compiled with.

        Args:
            model: a built model. This method removes the model's optimizer and metrics.
            outputs: the outputs of the model for symbolic inputs.

        Raises:
            ConfigError: the model does not fit the task, or its loss does not fit its outputs.
        """
        last = last_layers(model)
        found = read_compiled(model)
        self.compiled = self.compiled or found
        self._loss = TaskLoss(self._terms(found, outputs, last))
        for term in self._loss.terms:
            if term.part is not None and term.part.positive_by and named.is_by_class(term.loss):
                raise ConfigError(
                    f"the loss needs an output for each class, but {term.part.name} of "
                    f"{term.part.target} has one logit; use BinaryCrossentropy(from_logits=True), "
                    "or set task.name to classification"
                )
        self.task.check_output(outputs, last)
        self._require_measured(outputs)
        if found:
            # Checkpoints and exported models must not contain the model's own optimizer and
            # metrics.
            model.compiled, model.optimizer, model._compile_metrics = False, None, None
        self.attach(model)

    def _require_measured(self, outputs: Any) -> None:
        parts = self.task.parts
        labels: Any = {name: _label(each.target) for name, each in parts.items()}
        labels = labels.get("", labels)
        what = "the loss does not fit"
        try:
            with tf.Graph().as_default():
                placeholder = lambda each: tf.compat.v1.placeholder(each.dtype, each.shape)  # noqa: E731
                self._loss(*(keras.tree.map_structure(placeholder, e) for e in (labels, outputs)))
            what = "the metrics do not fit"
            sizes = {n for each in keras.tree.flatten((labels, outputs)) for n in each.shape}
            # Use a batch size that no axis has. Otherwise, broadcasting could hide wrong shapes.
            rows = next(n for n in count(2) if n not in sizes)
            zeros = partial(_zeros, rows=rows)
            self._build(*(keras.tree.map_structure(zeros, each) for each in (labels, outputs)))
        except ConfigError:
            raise
        # User code may raise any exception.
        except Exception as error:
            hint = named.advise_sparse(each.loss for each in self._loss.terms)
            line = user_code.format_error(error)
            raise ConfigError(f"{what} the labels and outputs: {line}{hint}") from error

    @property
    def optimizer(self) -> keras.optimizers.Optimizer | None:
        """The optimizer that the model was compiled with, if any."""
        return self.compiled.optimizer if self.compiled else None

    def attach(self, model: keras.Model) -> keras.Model:
        """Set this loss as the loss of a model, and return the model."""
        model._compile_loss, model._aggregate_additional_loss = self._loss, cast_layer_loss
        return model

    def _own_terms(self) -> Iterator[Term]:
        weights = self.task.loss_weights
        for name, part in self.task.parts.items():
            yield Term(_path(name), part.loss(), weights.get(name), part)

    def _terms(self, found: Compiled | None, outputs: Any, last: Any) -> list[Term]:
        parts, terms = self.task.parts, [*self._own_terms()]
        if found is not None and found.loss is not None:
            labels = {name: _label(each.target) for name, each in parts.items()}
            terms = [
                self._bind_task(term, last) for term in found.terms(labels.get("", labels), outputs)
            ]
        for name, (key, loss) in self._losses.items():
            path, part = _path(name), parts[name]
            part.from_probabilities = (
                bool(part.link) and find_activation(find_at_path(last, path)) == part.link
            )
            made = named.loss(loss, key, logits=not part.from_probabilities)
            kept = [term for term in terms if term.path != path]
            terms = [*kept, Term(path, made, self.task.loss_weights.get(name), part)]
        return terms

    def _bind_task(self, term: Term, last: Any) -> Term:
        """Return the loss with the task of its output. Set the task's `from_probabilities`."""
        part = find_at_path(self.task.parts, term.path or ("",))
        if not isinstance(part, Task):
            return term
        said = takes_logits(term.loss)
        ends = find_activation(find_at_path(last, term.path)) == part.link
        part.from_probabilities = bool(part.link) and (ends if said is None else not said)
        return term._replace(part=part)

    def loss(self, model: keras.Model, batch: tuple[Any, ...], outputs: Any) -> tf.Tensor:
        """Return the mean training loss of a batch, including losses added by layers."""
        inputs, labels, weights = self.weigh_batch(batch)
        with whole_losses():
            value = model._compute_loss(inputs, labels, outputs, weights, training=True)
        return tf.cast(value, tf.float32)

    def weigh_batch(self, batch: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Return inputs, labels, and training weights, which may be None.

        With several outputs and class weights, the weights are a mapping by output, as in Keras.
        """
        inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(batch)
        if not self._class_weights:
            return inputs, labels, weights
        by_output = dict.fromkeys(self.task.parts, weights)
        for name, of_classes in self._class_weights.items():
            part, true = self.task.parts[name], find_at_path(labels, _path(name))
            by_output[name] = weights_by_class(of_classes, part, true, weights)
        return inputs, labels, by_output.get("", by_output)

    @property
    def directions(self) -> dict[str, Direction | None]:
        """The direction of each metric, by name, or None if it is unknown.

        Metrics that the configuration or a compiled model adds are included after `accept`.
        """
        known = {**self._further, LOSS: "lower", **self.task.directions}
        if self._better and self.main_metric in known:
            known[self.main_metric] = known[self.main_metric] or self._better
        return known

    @property
    def judged_by(self) -> dict[str, Any]:
        """The main metric and the directions of all metrics, to be stored with the results."""
        return {"main_metric": self.main_metric, "directions": self.directions}

    def totals(self, model: keras.Model, batches: tf.data.Dataset) -> tf.Tensor:
        """Return sums over a finite dataset: the number of examples, the loss, and metric states.

        The result is a float64 vector. The call is traced into a graph, which may run on another
        machine.
        """
        self._build(*_one_example(model, batches.element_spec))
        total = tf.zeros([self.states[-1].end], tf.float64)
        # Do not use `Dataset.reduce`, whose function may not be able to read variables on other
        # machines.
        for batch in iter(batches):
            inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(batch)
            given = cast_outputs(model(inputs, training=False))
            loss = None
            if type(model).compute_loss is not keras.Model.compute_loss:
                # Prevent the model's method from changing variables.
                with keras.StatelessScope(), whole_losses():
                    loss = model._compute_loss(inputs, labels, given, weights, training=False)
            total += self._summed(labels, self.task.outputs(given), weights, loss)
        return total

    def sums(self, part: Part, *, all_metrics: bool = True) -> Sums:
        """Return the same vector as `totals`, for examples whose outputs are stored in a part.

        If `all_metrics` is false, the states of metrics that `tally` computes exactly are 0.
        """
        labels, outputs, weights, _ = part
        self._build(*(select_rows(tree, slice(0, 1)) for tree in part[:3]))
        given = tf.nest.map_structure(_tensor, (labels, outputs, weights))
        self._calls[all_metrics] += 1
        calls, function = self._calls[all_metrics], self._summed
        if calls > _UNTRACED:
            function = self._traced
        if calls == _UNTRACED + 1:
            # The first trace accepts any batch size, so that another size needs no second trace.
            any_number = tf.nest.map_structure(_relax_batch, given)
            self._traced.get_concrete_function(*any_number, all_metrics=all_metrics)
        found: Sums = function(*given, all_metrics=all_metrics).numpy()
        return found

    def means(self, sums: Sums) -> dict[str, float]:
        """Compute the mean loss and all defined metrics from a vector of `totals`."""
        return {name: value for name, value in self.measured(sums).items() if value is not None}

    def measured(self, sums: Sums, *, all_metrics: bool = True) -> dict[str, float | None]:
        """Return the mean loss and the metrics from a vector of `totals`, or a sum of such vectors.

        A metric is None if it is undefined for these examples, such as the area under the ROC curve
        for one class. If `all_metrics` is false, metrics that `tally` computes exactly are left
        out.
        """
        if not sums[0]:
            raise UserError("there are no examples to measure the model on")
        found: dict[str, float | None] = {}
        for each in self.states:
            if all_metrics or not (each.measured and self.is_exact(each.measured)):
                found |= each.values(sums)
        return main_first(found, self.main_metric)

    def example_states(self, place: int, part: Part) -> Sums:
        """Return the state of a metric for each example separately [n, size].

        `place` is the metric's index in `states`.
        """
        self._build(*(select_rows(tree, slice(0, 1)) for tree in part[:3]))
        state = self.states[place]
        assert state.measured is not None
        if (values := self.task.example_values(state.name, part)) is not None:
            weights = example_weights(part)
            return np.stack([values * weights, weights], axis=1)
        given = [part.labels, part.outputs, *([] if part.weights is None else [part.weights])]
        if state.name not in self._traced_alone:
            # Trace once per metric. Tracing again for each part would be slower than computing.
            self._traced_alone[state.name] = tf.function(
                partial(self._alone, state.measured), reduce_retracing=True
            )
        found: Sums = self._traced_alone[state.name](given).numpy()
        return found

    def _alone(self, measured: Measured, given: Any) -> tf.Tensor:
        def alone(one: Any) -> tf.Tensor:
            labels, outputs, *weights = tf.nest.map_structure(lambda each: each[tf.newaxis], one)
            before = [tf.zeros(v.shape, v.dtype) for v in measured.metric.variables]
            taken = self._prepare_arguments(
                measured, labels, outputs, weights[0] if weights else None
            )
            after = measured.metric.stateless_update_state(before, *taken)
            return tf.concat([tf.reshape(tf.cast(v, tf.float64), [-1]) for v in after], 0)

        return tf.vectorized_map(alone, tf.nest.map_structure(tf.convert_to_tensor, given))

    def is_exact(self, measured: Measured) -> bool:
        """Return whether an evaluation uses the task's tally instead of this metric."""
        return measured.own and measured.path in self._exact

    def tally(self) -> Measuring:
        """Return an empty accumulator for an evaluation or a slice."""
        return Measuring(self)

    def _build(self, labels: Any, outputs: Any, weights: Any = None) -> None:
        """Create the metrics, and update them once, because some create variables only then."""
        if len(self.states) > 1:
            return
        with named.skip_initial_values():
            for each in [*self._all_metrics(labels, outputs)]:
                each.metric.update_state(*self._prepare_arguments(each, labels, outputs, weights))
                self.states.append(self.states[-1].next_state(each))

    def _all_metrics(self, labels: Any, outputs: Any) -> Iterator[Measured]:
        """Yield each metric of the task, the configuration and the compiled model once."""
        yield from (
            Measured(_path(name), each, f"{name}_" if name else "", own=True)
            for name, part in self.task.parts.items()
            for each in part.metrics()
        )
        seen = {LOSS, *self.task.directions}
        predictions = self.task.predictions(outputs)
        further = (
            Measured(
                path := _path(name),
                named.metric(
                    each, key, find_at_path(labels, path), find_at_path(predictions, path)
                ),
                f"{name}_" if name else "",
            )
            for name, key, each in self._named
        )
        given = self.task.given(outputs)
        compiled = self.compiled.measured(labels, given) if self.compiled else ()
        for each in chain(further, compiled):
            if each.name not in seen:
                self._further[each.name] = named.find_direction(each.metric)
                yield each
            elif each.metric.name not in named.class_name(each.metric):
                raise ConfigError(
                    f"two metrics are called {each.name!r}; rename one in the model or in "
                    "task.metrics"
                )
            seen.add(each.name)

    def _prepare_arguments(
        self, each: Measured, labels: Any, outputs: Any, weights: Any
    ) -> tuple[Any, ...]:
        task, path = self.task, each.path
        part = find_at_path(task.parts, path or ("",))
        true = find_at_path(labels, path)
        if each.plain:
            predictions = task.given(outputs)
            true = part.loss_labels(true) if isinstance(part, Task) else true
        else:
            predictions = task.predictions(outputs)
        return (
            true,
            find_at_path(predictions, path),
            find_at_path(weights, path) if each.weighted else None,
        )

    def _sums(
        self, labels: Any, outputs: Any, weights: Any, loss: Any = None, *, all_metrics: bool = True
    ) -> tf.Tensor:
        """Return the sums of a batch. `loss` is its mean loss, or None to compute that loss."""
        count = tf.cast(tf.shape(keras.tree.flatten(labels)[0])[0], tf.float64)
        if loss is None:
            with whole_losses():
                loss = self._loss(labels, self.task.given(outputs), weights)
        parts = [count, tf.cast(loss, tf.float64) * count]
        for each in filter(None, (state.measured for state in self.states)):
            before = [tf.zeros(v.shape, v.dtype) for v in each.metric.variables]
            if not all_metrics and self.is_exact(each):
                parts += before
                continue
            taken = self._prepare_arguments(each, labels, outputs, weights)
            parts += each.metric.stateless_update_state(before, *taken)
        return tf.concat([tf.reshape(tf.cast(each, tf.float64), [-1]) for each in parts], 0)


def _path(name: str) -> tuple[str, ...]:
    """Return the path of an output. A single output has no name, so its path is empty."""
    return (name,) if name else ()


def _label(target: Target) -> keras.KerasTensor:
    sizes = (None if size < 0 else size for size in target.shape)
    return keras.KerasTensor((None, *sizes), target.dtype)


class Measuring(Tally):
    """Accumulates the exact metrics of a task's tally, and the Keras states of other metrics."""

    def __init__(self, objective: Objective) -> None:
        """Create an empty accumulator."""
        self.count = 0
        self._objective = objective
        self._sums: Any = 0.0
        self._task = objective.task.tally()
        self.inner = (self._task,)

    def add(self, part: Part) -> None:
        """Add the examples of a part."""
        self.count += len(tf.nest.flatten(part.labels)[0])
        self._sums = self._sums + self._objective.sums(part, all_metrics=False)
        self._task.add(part)

    def result(self) -> dict[str, Any]:
        """Return `metrics`, `intervals`, and further results of the task's tally."""
        found: dict[str, Any] = {"metrics": {}, "intervals": {}, **self._task.result()}
        others = self._objective.measured(self._sums, all_metrics=False)
        # The interval belongs to the task's own loss. Drop it if the configured loss differs.
        loss, exact = others[LOSS], found["metrics"].get(LOSS)
        if exact is not None and not math.isfinite(loss or 0.0):
            # The sum in single precision overflowed, so use the exact value.
            loss = exact
        if exact is None or not math.isclose(loss or 0.0, exact, rel_tol=1e-3):
            found["intervals"].pop(LOSS, None)
        return {**found, "metrics": {**found["metrics"], **others, LOSS: loss}}


def _one_example(model: keras.Model, spec: Any) -> tuple[Any, Any, Any]:
    """Return labels, outputs and weights of one example, filled with zeros. No model is run."""
    inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(spec)
    given = tf.nest.map_structure(
        lambda each: keras.KerasTensor((None, *each.shape[1:]), each.dtype.name), inputs
    )
    outputs = model.compute_output_spec(given)
    return (
        tf.nest.map_structure(_zeros, labels),
        tf.nest.map_structure(_zeros, outputs),
        None if weights is None else _zeros(weights),
    )


def _zeros(spec: Any, rows: int = 1) -> tf.Tensor:
    return tf.zeros([rows, *(size or 1 for size in spec.shape[1:])], spec.dtype)


def _tensor(array: Any) -> tf.Tensor | None:
    return None if array is None else tf.convert_to_tensor(array)


def _relax_batch(examples: tf.Tensor | None) -> tf.TensorSpec | None:
    if examples is None:
        return None
    return tf.TensorSpec([None, *examples.shape[1:]], examples.dtype)


def select_rows(tree: Any, rows: Any) -> Any:
    """Return the given rows of all arrays in a nested structure. None stays None."""
    return tf.nest.map_structure(lambda each: None if each is None else each[rows], tree)


def cast_outputs(outputs: Any) -> Any:
    """Cast a model's outputs to float32. With mixed precision, they may have another type."""
    return tf.nest.map_structure(lambda each: tf.cast(each, tf.float32), outputs)

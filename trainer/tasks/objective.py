"""What training minimises and a validation measures, for one task and any model.

The loss goes the way of Keras: by `compute_loss` of the model, so that `add_loss`, regularizers,
masks, weights of examples and a `compute_loss` of the user's count under every strategy as they do
in `fit`. What Keras's own loss of a compiled model holds is taken out of it before: a container
that makes variables when it is called first, which no graph on a worker can.

Metrics are Keras's. Their states are sums over the examples: `totals` returns the sums of all of
them as one vector, vectors of several workers are added, and `means` makes values of it.
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
    Term,
    read_compiled,
    takes_logits,
)
from flotilla.trainer.tasks.task_loss import (
    TaskLoss,
    attach,
    find_at_path,
    weights_by_class,
    whole_losses,
)

# Tasks without loops or branches over tensors, which AutoGraph takes seconds to look for.
_BUILT_IN = "flotilla.trainer.tasks."
# Calls before it is worth a trace, which takes as long as many of them.
_UNTRACED = 8
# Labels and outputs of any shape, for metrics that are looked up by name.
_ONE = keras.KerasTensor((None,)), keras.KerasTensor((None, 1))


class Objective:
    """The loss and the metrics of one task, as configuration and compiled model say them."""

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
        """Measure nothing yet.

        Args:
            task: says what is predicted, and all that is not said otherwise.
            loss: by name, in place of that of the task and of a compiled model.
            metrics: further ones of every output, by name.
            outputs: loss and metrics by name, of those of several outputs that say them.
            weights: of each class in training, by output as in `Task.parts`, where it has some.
            main_metric: in place of that of the task.
            better: its direction, where neither the task nor Keras knows it.
        """
        self.task = task
        self.main_metric = main_metric or task.main_metric
        self._better = better
        # Directions of the metrics that are not the task's own.
        self._further: dict[str, Direction | None] = {}
        self.compiled: Compiled | None = None
        if loss and len(task.parts) > 1:
            raise ConfigError(
                f"task.loss: there are several outputs ({', '.join(task.parts)}); give each its "
                "loss in task.outputs"
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
        """Begin without metrics; they are made for the task when the first model is measured."""
        #: Where the state of the loss and of each metric is in a vector of `totals`.
        self.states = [State(name=LOSS, begin=0, end=2, shapes=(), measured=None)]
        self._summed = self._sums
        tasks = (self.task, *self.task.parts.values())
        if all(type(each).__module__.startswith(_BUILT_IN) for each in tasks):
            self._summed = api.call_with_unspecified_conversion_status(self._sums)
        self._traced = tf.function(self._summed, reduce_retracing=True)
        self._calls: Counter[bool] = Counter()
        self._traced_alone: dict[str, Any] = {}
        # Outputs whose metrics are the tally's: of a task of the user's they may be others.
        self._exact = {
            _path(name)
            for name, part in self.task.parts.items()
            if type(part).metrics.__module__.startswith(_BUILT_IN)
        }

    def _require_names(self) -> None:
        """Refuse a loss or a metric that does not exist."""
        with named.skip_initial_values():
            for _, key, name in self._named:
                named.metric(name, key, *_ONE)
        for key, name in self._losses.values():
            named.loss(name, key, logits=True)

    def at(self, thresholds: Mapping[str, Any]) -> Objective:
        """Return the same one of a model that decides by other thresholds; see `Task.at`."""
        if not thresholds:
            return self
        found = copy.copy(self)
        found.task = self.task.at(thresholds)
        found._forget()
        return found

    def accept(self, model: keras.Model, outputs: Any) -> None:
        """Take what a model was compiled with, and refuse one that does not fit the task.

        Args:
            model: built; it is not compiled any more after it.
            outputs: what it gives for symbolic inputs.

        Raises:
            ConfigError: it does not fit, or its loss does not fit what it gives.
        """
        last = last_layers(model)
        found = read_compiled(model)
        self.compiled = self.compiled or found
        self._loss = TaskLoss(self._terms(found, outputs, last))
        for term in self._loss.terms:
            if term.part is not None and term.part.positive_by and named.is_by_class(term.loss):
                raise ConfigError(
                    f"its loss takes an output for each class, and {term.part.name} of "
                    f"{term.part.target} has one logit: take BinaryCrossentropy(from_logits=True), "
                    "or set task.name: classification"
                )
        self.task.check_output(outputs, last)
        self._require_measured(outputs)
        if found:
            # Neither its optimizer nor its metrics belong into a checkpoint or an exported model.
            model.compiled, model.optimizer, model._compile_metrics = False, None, None
        self.attach(model)

    def _require_measured(self, outputs: Any) -> None:
        """Refuse a loss or a metric that does not take labels and outputs of these shapes."""
        parts = self.task.parts
        labels: Any = {name: _label(each.target) for name, each in parts.items()}
        labels = labels.get("", labels)
        what = "its loss does not fit"
        try:
            with tf.Graph().as_default():
                self._loss(*(keras.tree.map_structure(_placeholder, e) for e in (labels, outputs)))
            what = "its metrics do not fit"
            sizes = {n for each in keras.tree.flatten((labels, outputs)) for n in each.shape}
            # Of as many examples as there are classes, what does not fit might be broadcast.
            rows = next(n for n in count(2) if n not in sizes)
            zeros = partial(_zeros, rows=rows)
            self._build(*(keras.tree.map_structure(zeros, each) for each in (labels, outputs)))
        except ConfigError:
            raise
        # Code of the user's may fail in any way.
        except Exception as error:
            hint = named.advise_sparse(each.loss for each in self._loss.terms)
            line = user_code.format_error(error)
            raise ConfigError(f"{what} labels and outputs: {line}{hint}") from error

    @property
    def optimizer(self) -> keras.optimizers.Optimizer | None:
        """That which the model was compiled with, if it was."""
        return self.compiled.optimizer if self.compiled else None

    def attach(self, model: keras.Model) -> keras.Model:
        """Make the task's loss that of a model, and return the model."""
        attach(model, self._loss)
        return model

    def _own_terms(self) -> Iterator[Term]:
        weights = self.task.loss_weights
        for name, part in self.task.parts.items():
            yield Term(_path(name), part.loss(), weights.get(name), part)

    def _terms(self, found: Compiled | None, outputs: Any, last: Any) -> list[Term]:
        """Return the losses: the configured ones, those of the compiled model, or the task's."""
        parts, terms = self.task.parts, [*self._own_terms()]
        if found is not None and found.loss is not None:
            labels = {name: _label(each.target) for name, each in parts.items()}
            terms = [
                self._taken_from(term, last)
                for term in found.terms(labels.get("", labels), outputs)
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

    def _taken_from(self, term: Term, last: Any) -> Term:
        """Return a loss of the compiled model with the task of its output."""
        part = find_at_path(self.task.parts, term.path or ("",))
        if not isinstance(part, Task):
            return term
        said = takes_logits(term.loss)
        ends = find_activation(find_at_path(last, term.path)) == part.link
        part.from_probabilities = bool(part.link) and (ends if said is None else not said)
        return term._replace(part=part)

    def loss(self, model: keras.Model, batch: tuple[Any, ...], outputs: Any) -> tf.Tensor:
        """Return the mean loss of a batch in training, with the losses of layers."""
        inputs, labels, weights = self.weighed(batch)
        with whole_losses():
            value = model._compute_loss(inputs, labels, outputs, weights, training=True)
        return tf.cast(value, tf.float32)

    def weighed(self, batch: tuple[Any, ...]) -> tuple[Any, Any, Any]:
        """Return inputs, labels, and the weights that examples have in training, or None.

        Of several outputs of which the classes of some weigh these are by output, as in Keras.
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
        """What is measured, by name, and whether higher or lower is better, where it is known.

        Those of the model are known once one was accepted and measured; see `measures`.
        """
        known = {**self._further, LOSS: "lower", **self.task.directions}
        if self._better and self.main_metric in known:
            known[self.main_metric] = known[self.main_metric] or self._better
        return known

    @property
    def judged_by(self) -> dict[str, Any]:
        """What says by which metric models are compared, to be written down."""
        return {"main_metric": self.main_metric, "directions": self.directions}

    def totals(self, model: keras.Model, batches: tf.data.Dataset) -> tf.Tensor:
        """Return the sums over finite batches: of examples, of the loss, and of all metrics.

        A vector in double precision. It is traced into a graph, which may run elsewhere.
        """
        self._build(*_one_example(model, batches.element_spec))
        total = tf.zeros([self.states[-1].end], tf.float64)
        # Not over the dataset itself: its functions may not reach variables on other machines.
        for batch in iter(batches):
            inputs, labels, weights = keras.utils.unpack_x_y_sample_weight(batch)
            given = in_single_precision(model(inputs, training=False))
            loss = None
            if has_own(model, "compute_loss"):
                # What it keeps for itself is not of the training.
                with keras.StatelessScope(), whole_losses():
                    loss = model._compute_loss(inputs, labels, given, weights, training=False)
            total += self._summed(labels, self.task.outputs(given), weights, loss)
        return total

    def sums(self, part: Part, *, all_metrics: bool = True) -> Sums:
        """Return the vector of `totals` for examples that a model has predicted.

        Without all metrics, what `tally` measures exactly is left out.
        """
        labels, outputs, weights, _ = part
        self._build(*(at(tree, slice(0, 1)) for tree in part[:3]))
        given = tf.nest.map_structure(_tensor, (labels, outputs, weights))
        self._calls[all_metrics] += 1
        calls, function = self._calls[all_metrics], self._summed
        if calls > _UNTRACED:
            function = self._traced
        if calls == _UNTRACED + 1:
            # For any number of examples from the first on, or the next number traces it again.
            any_number = tf.nest.map_structure(_of_any_number, given)
            self._traced.get_concrete_function(*any_number, all_metrics=all_metrics)
        found: Sums = function(*given, all_metrics=all_metrics).numpy()
        return found

    def means(self, sums: Sums) -> dict[str, float]:
        """Return what `measured` does, without what these examples do not define."""
        return {name: value for name, value in self.measured(sums).items() if value is not None}

    def measured(self, sums: Sums, *, all_metrics: bool = True) -> dict[str, float | None]:
        """Return the mean loss and the metrics from `totals`, or from totals that were added up.

        None is a metric that these examples do not define, as an area under the ROC of one class.
        Without all metrics, those that `tally` measures are left out; see `sums`.

        Raises:
            UserError: there are no examples.
        """
        if not sums[0]:
            raise UserError("there are no examples to measure the model on")
        found: dict[str, float | None] = {}
        for each in self.states:
            if all_metrics or not (each.measured and self.is_exact(each.measured)):
                found |= each.values(sums)
        return main_first(found, self.main_metric)

    def of_each(self, place: int, part: Part) -> Sums:
        """Return the state [n, size] of a metric that each example would have alone.

        `place` is that of the state in `states`.
        """
        self._build(*(at(tree, slice(0, 1)) for tree in part[:3]))
        state = self.states[place]
        assert state.measured is not None
        if (values := self.task.of_each(state.name, part)) is not None:
            weights = example_weights(part)
            return np.stack([values * weights, weights], axis=1)
        given = [part.labels, part.outputs, *([] if part.weights is None else [part.weights])]
        if state.name not in self._traced_alone:
            # Traced again for every part, it would take longer than all that it computes.
            self._traced_alone[state.name] = tf.function(
                partial(self._alone, state.measured), reduce_retracing=True
            )
        found: Sums = self._traced_alone[state.name](given).numpy()
        return found

    def _alone(self, measured: Measured, given: Any) -> tf.Tensor:
        def alone(one: Any) -> tf.Tensor:
            labels, outputs, *weights = tf.nest.map_structure(lambda each: each[tf.newaxis], one)
            before = [tf.zeros(v.shape, v.dtype) for v in measured.metric.variables]
            taken = self._taken(measured, labels, outputs, weights[0] if weights else None)
            after = measured.metric.stateless_update_state(before, *taken)
            return tf.concat([tf.reshape(tf.cast(v, tf.float64), [-1]) for v in after], 0)

        return tf.vectorized_map(alone, tf.nest.map_structure(tf.convert_to_tensor, given))

    def is_exact(self, measured: Measured) -> bool:
        """Say whether a metric of validations is measured by the task's tally in an evaluation."""
        return measured.own and measured.path in self._exact

    def tally(self) -> Measuring:
        """Return what measures all examples of an evaluation, or those of a slice, by parts."""
        return Measuring(self)

    def _measured(self) -> list[Measured]:
        return [each.measured for each in self.states if each.measured]

    def _build(self, labels: Any, outputs: Any, weights: Any = None) -> None:
        """Make the metrics, some of which make their variables at the first update."""
        if len(self.states) > 1:
            return
        # Nothing reads these variables.
        with named.skip_initial_values():
            for each in [*self._all_metrics(labels, outputs)]:
                each.metric.update_state(*self._taken(each, labels, outputs, weights))
                self.states.append(self.states[-1].followed_by(each))

    def _all_metrics(self, labels: Any, outputs: Any) -> Iterator[Measured]:
        """Yield those of the task, of the configuration and of the compiled model, each once."""
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
                    f"two metrics are called {each.name!r}: give one of the model's, or of "
                    "task.metrics, another name"
                )
            seen.add(each.name)

    def _taken(self, each: Measured, labels: Any, outputs: Any, weights: Any) -> tuple[Any, ...]:
        """Return labels, predictions and weights as a metric takes them."""
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
        """Return the vector of one batch; `loss` is its mean where the model computes its own."""
        count = tf.cast(tf.shape(keras.tree.flatten(labels)[0])[0], tf.float64)
        if loss is None:
            with whole_losses():
                loss = self._loss(labels, self.task.given(outputs), weights)
        parts = [count, tf.cast(loss, tf.float64) * count]
        for each in self._measured():
            before = [tf.zeros(v.shape, v.dtype) for v in each.metric.variables]
            if not all_metrics and self.is_exact(each):
                parts += before
                continue
            taken = self._taken(each, labels, outputs, weights)
            parts += each.metric.stateless_update_state(before, *taken)
        return tf.concat([tf.reshape(tf.cast(each, tf.float64), [-1]) for each in parts], 0)


def has_own(model: keras.Model, method: str) -> bool:
    """Say whether a model overrides a method of Keras's training."""
    return getattr(type(model), method) is not getattr(keras.Model, method)


def _path(name: str) -> tuple[str, ...]:
    """Return the path of an output; that of a single one, which has no name, is empty."""
    return (name,) if name else ()


def _placeholder(spec: Any) -> tf.Tensor:
    return tf.compat.v1.placeholder(spec.dtype, spec.shape)


def _label(target: Target) -> keras.KerasTensor:
    sizes = (None if size < 0 else size for size in target.shape)
    return keras.KerasTensor((None, *sizes), target.dtype)


class Measuring(Tally):
    """The metrics of some examples: exact ones of the task, others by their states."""

    def __init__(self, objective: Objective) -> None:
        """Begin without examples."""
        self.count = 0
        self._objective = objective
        self._sums: Any = 0.0
        self._task = objective.task.tally()

    def add(self, part: Part) -> None:
        """Add some examples."""
        self.count += len(tf.nest.flatten(part.labels)[0])
        self._sums = self._sums + self._objective.sums(part, all_metrics=False)
        self._task.add(part)

    def condense(self) -> None:
        """Hold less of them."""
        self._task.condense()

    def result(self) -> dict[str, Any]:
        """Return `metrics`, `intervals`, and what else the task's tally has."""
        found: dict[str, Any] = {"metrics": {}, "intervals": {}, **self._task.result()}
        others = self._objective.measured(self._sums, all_metrics=False)
        # Weights count otherwise in a loss, which may be another one than the task's.
        loss, exact = others[LOSS], found["metrics"].get(LOSS)
        if exact is not None and not math.isfinite(loss or 0.0):
            # Single precision holds less.
            loss = exact
        if exact is None or not math.isclose(loss or 0.0, exact, rel_tol=1e-3):
            found["intervals"].pop(LOSS, None)
        return {**found, "metrics": {**found["metrics"], **others, LOSS: loss}}


def _one_example(model: keras.Model, spec: Any) -> tuple[Any, Any, Any]:
    """Return labels, outputs and weights of one example of zeros; the model is not run."""
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


def _of_any_number(examples: tf.Tensor | None) -> tf.TensorSpec | None:
    if examples is None:
        return None
    return tf.TensorSpec([None, *examples.shape[1:]], examples.dtype)


def at(tree: Any, rows: Any) -> Any:
    """Return some rows of every array of a tree, in which None stands for nothing."""
    return tf.nest.map_structure(lambda each: None if each is None else each[rows], tree)


def in_single_precision(outputs: Any) -> Any:
    """Return a model's outputs as float32, whatever it computes in."""
    return tf.nest.map_structure(lambda each: tf.cast(each, tf.float32), outputs)

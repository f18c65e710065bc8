"""Several outputs of one model, each with its own task.

    label     a mapping by target name
    outputs   a mapping by target name, in the form of each task
    loss      the weighted sum of the losses
    metrics   the metrics of each task, as `<output>_<metric>`
    answers   the answers of each task, as `<output>_<column>`

Losses in different units, such as a squared income and a cross entropy, are not comparable. Set
`task.outputs.<label>.weight` to balance them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import cycle, islice, product
from types import MappingProxyType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks.base import (
    Constant,
    Direction,
    Examples,
    Floats,
    LazyExamples,
    Part,
    SplitError,
    Tally,
    Target,
    Task,
    example_weights,
)
from flotilla.trainer.tasks.intervals import Moments, above_zero

# Maximum number of combinations of the outputs' constants.
_COMBINATIONS = 16


class MultiOutput(Task):
    """A task that combines one task per output. See the module docstring."""

    name = "multi_output"
    main_metric = "loss"
    parts: Mapping[str, Task] = MappingProxyType({})
    loss_weights: Mapping[str, float] = MappingProxyType({})
    columns: tuple[str, ...] = ()
    output_shape: Any = None

    def __init__(self, parts: Mapping[str, Task], weights: Mapping[str, float]) -> None:
        """Store the tasks and the loss weights of the targets, keyed by target name."""
        super().__init__(Target(name=", ".join(parts), shape=(), dtype="several"))
        self.parts, self.loss_weights = parts, weights
        self.columns = tuple(dict.fromkeys(each for p in parts.values() for each in p.columns))
        self.output_shape = {name: part.output_shape for name, part in parts.items()}
        directions: dict[str, Direction | None] = {"loss": "lower"}
        for name, part in parts.items():
            own = {each: better for each, better in part.directions.items() if each != "loss"}
            directions |= _unique(directions, name, own)
        self.directions = directions  # type: ignore[misc]

    def loss(self) -> keras.losses.Loss:
        """Raise `TypeError`, because each output has its own loss."""
        raise TypeError(f"{self.name} has no single loss; use the loss of each output")

    def chance_loss(self) -> float:
        """Return the weighted sum of the outputs' chance losses."""
        return sum(
            self.loss_weights[name] * part.chance_loss() for name, part in self.parts.items()
        )

    def metrics(self) -> list[keras.Metric]:
        """Return no metrics, because each output has its own."""
        return []

    def set_thresholds(self, thresholds: Mapping[str, Any]) -> Task:
        """Return this task with the given thresholds, which are keyed by output name."""
        parts = {
            name: part.set_thresholds({"": thresholds[name]} if name in thresholds else {})
            for name, part in self.parts.items()
        }
        return MultiOutput(parts, self.loss_weights)

    def outputs(self, given: Any) -> Any:
        """Convert the values that the model returns to the outputs of each task."""
        return {name: part.outputs(given[name]) for name, part in self.parts.items()}

    def given(self, outputs: Any) -> Any:
        """Convert the outputs of each task back to the values that the model returns."""
        return {name: part.given(outputs[name]) for name, part in self.parts.items()}

    def predictions(self, outputs: Any) -> Any:
        """Convert the outputs of each task to predictions."""
        return {name: part.predictions(outputs[name]) for name, part in self.parts.items()}

    def answers(self, outputs: Any) -> dict[str, tf.Tensor]:
        """Return the columns of all tasks, each prefixed with the name of its output."""
        found: dict[str, tf.Tensor] = {}
        for name, part in self.parts.items():
            found |= _add_prefix(name, part.answers(outputs[name]))
        return found

    def outputs_of(self, answers: Mapping[str, Any]) -> Any:
        """Return the outputs of each task, from columns prefixed with the output's name."""
        own = group_by_output(self.parts, answers)
        return {name: part.outputs_of(own[name]) for name, part in self.parts.items()}

    def example_losses(self, labels: Any, outputs: Any) -> Floats:
        """Return the weighted sum of the outputs' losses for each example [n]."""
        each = [
            self.loss_weights[name] * part.example_losses(labels[name], outputs[name])
            for name, part in self.parts.items()
        ]
        result: Floats = np.sum(each, axis=0)
        return result

    def described(self, label: Any, output: Any) -> dict[str, Any]:
        """Join the `label` and `predicted` cells of all tasks. Prefix others with output names."""
        cells = {
            name: part.described(label[name], output[name]) for name, part in self.parts.items()
        }
        together = {
            column: ", ".join(f"{name} {_text(each[column])}" for name, each in cells.items())
            for column in ("label", "predicted")
        }
        return together | {
            f"{name}_{column}": value
            for name, each in cells.items()
            for column, value in each.items()
            if column not in together
        }

    def details(self, examples: Examples) -> dict[str, Any]:
        """Return the details of all outputs. Prefix metrics, tables and charts with their names."""
        found: dict[str, Any] = {"metrics": {}, "intervals": {}, "tables": [], "charts": []}
        by_output = {}
        for name, part in self.parts.items():
            each = part.details(LazyExamples(examples, partial(_select_output, name=name)))
            for kind in ("metrics", "intervals"):
                found[kind] |= _add_prefix(name, each.pop(kind, {}))
            for kind in ("tables", "charts"):
                found[kind] += _prefix_titles(name, each.pop(kind, []))
            by_output[name] = each
        return {**found, "outputs": by_output}

    def constants(self, examples: Examples) -> list[Constant]:
        """Return all combinations of the outputs' constants, or a subset if there are too many."""
        each = [
            part.constants(LazyExamples(examples, partial(_select_output, name=name)))
            for name, part in self.parts.items()
        ]
        longest = max(map(len, each))
        chosen: Iterable[tuple[Constant, ...]] = zip(
            *(islice(cycle(some), longest) for some in each), strict=True
        )
        if math.prod(map(len, each)) <= _COMBINATIONS:
            chosen = product(*each)
        named = (dict(zip(self.parts, some, strict=True)) for some in chosen)
        return [
            Constant(
                ", ".join(f"{name} {one.answer}" for name, one in some.items()),
                {name: one.outputs for name, one in some.items()},
            )
            for some in named
        ]

    def tally(self) -> Tally:
        """Return an accumulator that combines the accumulators of the tasks."""
        return _OutputTally({name: part.tally() for name, part in self.parts.items()}, self)

    def check_labels(self, labels: Any) -> None:
        """Raise `SplitError` for labels that the task of an output refuses."""
        for name, part in self.parts.items():
            try:
                part.check_labels(labels[name])
            except SplitError as error:
                raise SplitError(f"{error} (output {name!r})") from None

    def check_output(self, output: Any, last: Any) -> None:
        """Require a mapping by target name whose values fit the tasks."""
        names = ", ".join(f"{name}: ..." for name in self.parts)
        if not isinstance(output, Mapping):
            found = f"{len(output)} outputs" if isinstance(output, list | tuple) else "one output"
            raise ConfigError(f"the model must return a mapping {{{names}}}, not {found}")
        if output.keys() != self.parts.keys():
            raise ConfigError(
                f"the model must return a mapping {{{names}}}, but returns {', '.join(output)}"
            )
        for name, part in self.parts.items():
            try:
                part.check_output(output[name], last[name] if isinstance(last, Mapping) else None)
            except ConfigError as error:
                raise ConfigError(f"output {name!r}: {error}") from None


class _OutputTally(Tally):
    def __init__(self, tallies: Mapping[str, Tally], task: MultiOutput) -> None:
        self._tallies, self._task, self._loss = tallies, task, Moments()
        self.inner = (*tallies.values(),)

    def add(self, part: Part) -> None:
        for name, each in self._tallies.items():
            each.add(_select_output(part, name))
        losses = self._task.example_losses(part.labels, part.outputs)
        self._loss.add(losses[np.newaxis], example_weights(part))

    def result(self) -> dict[str, Any]:
        (loss,), (error,) = self._loss.result()
        ends = above_zero(loss, error, self._loss.count)
        found: dict[str, Any] = {"metrics": {"loss": loss}, "intervals": {}, "tables": []}
        found["intervals"] |= {"loss": ends} if ends else {}
        by_name = {}
        for name, each in self._tallies.items():
            own = each.result()
            for kind in ("metrics", "intervals"):
                values = own.pop(kind, {})
                values.pop("loss", None)
                found[kind] |= _add_prefix(name, values)
            found["tables"] += _prefix_titles(name, own.pop("tables", []))
            by_name[name] = own
        return {**found, "outputs": by_name}


def group_by_output(names: Iterable[str], answers: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Group columns by the output name that they start with, and remove this prefix.

    If a column matches the names of two outputs, it belongs to the one with the longer name.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for column, values in answers.items():
        name = max((each for each in found if column.startswith(f"{each}_")), key=len)
        found[name][column.removeprefix(f"{name}_")] = values
    return found


def _add_prefix(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}_{key}": value for key, value in values.items()}


def _prefix_titles(name: str, pictures: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**each, "title": f"{name}: {each['title']}"} for each in pictures]


def _unique(known: Mapping[str, Any], name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found = _add_prefix(name, values)
    if twice := [each for each in found if each in known]:
        raise ConfigError(
            f"data.label: two outputs have the metric {twice[0]!r}, and one of them is {name!r}; "
            f"rename the column {name!r}"
        )
    return found


def _select_output(part: Part, name: str) -> Part:
    return part._replace(labels=part.labels[name], outputs=part.outputs[name])


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

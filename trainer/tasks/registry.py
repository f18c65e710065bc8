"""Make the configured task for the targets of a dataset."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from trainer import user_code
from trainer.config.schema import AUTO, TASKS, Config, OutputConfig, TaskConfig
from trainer.errors import ConfigError, nearest
from trainer.statistics.statistics import Feature
from trainer.tasks.base import Array, Target, Task
from trainer.tasks.multi_output import MultiOutput
from trainer.tasks.objective import Objective
from trainer.tasks.task_loss import class_weights

MULTI_OUTPUT = MultiOutput.name
# The argument of a task that takes `data.group`.
_GROUP = "group"
_log = logging.getLogger(__name__)


class Dataset(Protocol):
    """What a task takes of a dataset, prepared or not yet: see `trainer.data.spec.DatasetSpec`."""

    @property
    def features(self) -> Mapping[str, Feature]:
        """All features."""

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of those that the model takes."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of those to be predicted."""

    @property
    def group(self) -> str:
        """Name of the one that says which examples belong together; empty where none does."""

    @property
    def target_counts(self) -> Mapping[str, Mapping[str, Sequence[int]]]:
        """Examples of each class, by target and split."""

    @property
    def target_moments(self) -> Mapping[str, Mapping[str, float]]:
        """Mean, std, min and max by target."""


def create(config: TaskConfig, dataset: Dataset) -> Task:
    """Return the task of a configuration for a dataset.

    Raises:
        ConfigError: no such task, wrong arguments, or a target that it does not take.
    """
    name, _ = chosen(config, dataset)
    if name == MULTI_OUTPUT:
        return _several(config, dataset)
    if config.outputs:
        raise ConfigError(f"task.outputs: {name} has one output; set task.name to {MULTI_OUTPUT}")
    if len(dataset.targets) > 1:
        raise ConfigError(
            f"task.name: {name} takes one label, and there are {', '.join(dataset.targets)}; "
            f"set task.name to {MULTI_OUTPUT}, or name one of them in data.label"
        )
    return _one(name, dataset, dataset.targets[0], config.args, "task")


def _several(config: TaskConfig, dataset: Dataset) -> Task:
    if config.args:
        raise ConfigError("task.args: each output has its own, in task.outputs")
    for name in config.outputs:
        if name not in dataset.targets:
            hint = nearest(name, dataset.targets) or f" (one of {', '.join(dataset.targets)})"
            raise ConfigError(f"task.outputs: there is no label {name!r}{hint}")
    parts, weights = {}, {}
    for name in dataset.targets:
        said = config.outputs.get(name, OutputConfig())
        if said.name == MULTI_OUTPUT:
            raise ConfigError(f"task.outputs.{name}.name: one output is not several")
        kind = automatic(dataset, name).name if said.name == AUTO else said.name
        parts[name] = _one(kind, dataset, name, said.args, f"task.outputs.{name}")
        weights[name] = said.weight
    return MultiOutput(parts, weights)


def _one(name: str, dataset: Dataset, label: str, args: Mapping[str, Any], key: str) -> Task:
    task = _class(name)
    takes = [each for each in inspect.signature(task).parameters if each not in {"target", _GROUP}]
    _check_arguments(name, takes, args, key)
    group = {_GROUP: dataset.group} if _GROUP in inspect.signature(task).parameters else {}
    try:
        made = task(target_of(dataset, label), **group, **args)
        for column in made.columns:
            if column != dataset.group:
                _require_feature(column, dataset)
        if label in dataset.target_moments:
            # It is prepared.
            made.check()
        return made
    except ConfigError as error:
        raise ConfigError(f"{key} {name}: {error}") from None
    # A task of the user's may fail in any way.
    except Exception as error:
        raise ConfigError(f"{key} {name}: {user_code.line_of(error)}") from error


def _require_feature(name: str, dataset: Dataset) -> None:
    if name not in dataset.features:
        hint = nearest(name, dataset.features) or f" (it has {', '.join(dataset.features)})"
        raise ConfigError(f"there is no feature {name!r}{hint}")


class Choice(NamedTuple):
    """The name of a task, and why it is this one."""

    name: str
    why: str


def chosen(config: TaskConfig, dataset: Dataset) -> Choice:
    """Return the task that a configuration names, or the one that the targets ask for.

    Raises:
        ConfigError: a target is nothing that a task built in takes.
    """
    if config.name != AUTO:
        return Choice(config.name, "task.name says so")
    if len(dataset.targets) > 1:
        names = ", ".join(dataset.targets)
        choice = Choice(MULTI_OUTPUT, f"there are several labels: {names}")
    else:
        choice = automatic(dataset, dataset.targets[0])
    _log.info("task: %s, since %s", *choice)
    return choice


def automatic(dataset: Dataset, label: str) -> Choice:
    """Return the task that a label asks for.

    Two named classes are `classification`, as any number of them; a logit less would make another
    model of every configuration that has been trained as such. A whole number without names is a
    class too: TFDS has labels of this kind, and says of no number that it is a quantity.
    """
    target = target_of(dataset, label)
    kind = "" if target.dtype == "string" else np.dtype(target.dtype).kind
    if kind == "f":
        return Choice("regression", f"the label {target} is a quantity")
    if kind == "b" and not target.shape:
        return Choice("binary_classification", f"the label {target} is true or false")
    if kind in {"i", "u"} and not target.shape:
        return Choice("classification", f"the label {target} names a class")
    # Not those of the target, which are counted where none are named: the choice is the same before
    # the dataset is prepared.
    named = dataset.features[label].num_classes
    if kind in {"i", "u"} and (named or _is_by_place(dataset, target)):
        return Choice("sequence_labelling", f"the label {target} names a class for each place")
    if kind in {"b", "i", "u"} and len(target.shape) == 1:
        why = f"the label {target} says yes or no to each of {target.shape[0]} classes"
        return Choice("multilabel_classification", why)
    raise ConfigError(
        f"task.name: no task built in takes the label {target}; name another feature in data.label"
    )


def _is_by_place(dataset: Dataset, target: Target) -> bool:
    """Say whether an input has as many places as a label: a sequence, or an image."""
    shapes = (dataset.features[name].shape for name in dataset.inputs)
    sizes = [tuple(-1 if size is None else size for size in shape) for shape in shapes]
    places = target.shape[: max(len(target.shape) - 1, 1)]
    return any(shape[: len(places)] == places for shape in sizes)


def objective_of(config: Config, dataset: Dataset) -> Objective:
    """Return what a run minimises and measures on a dataset.

    Raises:
        ConfigError: see `create`; a loss, a metric or a class that does not exist.
    """
    task = create(config.task, dataset)
    champion, main_metric = config.gate.champion, config.task.main_metric
    return Objective(
        task,
        loss=config.task.loss,
        metrics=config.task.metrics,
        outputs=config.task.outputs,
        weights=_class_weights(config, task),
        main_metric=main_metric,
        better=(champion.better or None) if champion.metric in ("", main_metric) else None,
    )


def _class_weights(config: Config, task: Task) -> dict[str, Array]:
    """Return the weights of the classes, by those of the labels whose classes weigh."""
    given = config.training.class_weights
    if given and "" not in task.parts:
        raise ConfigError(
            f"training.class_weights: there are several labels ({', '.join(task.parts)}); give "
            "those with classes theirs in task.outputs, {label: {class_weights: ...}}"
        )
    found = {}
    for name, part in task.parts.items():
        key = "training.class_weights"
        if name:
            key = f"task.outputs.{name}.class_weights"
            given = config.task.outputs.get(name, OutputConfig()).class_weights
        found[name] = class_weights(given, part, key)
    return {name: weights for name, weights in found.items() if weights is not None}


def target_of(dataset: Dataset, name: str) -> Target:
    """Return what a dataset says of one of its targets.

    A whole number whose classes have no names has as many as the examples name.
    """
    feature = dataset.features[name]
    counts = dataset.target_counts.get(name, {})
    classes = feature.num_classes or max(map(len, counts.values()), default=0)
    return Target(
        name=name,
        shape=tuple(-1 if size is None else size for size in feature.shape),
        dtype=feature.dtype,
        num_classes=classes,
        labels=feature.labels,
        counts=counts,
        moments=dataset.target_moments.get(name, {}),
    )


def _class(name: str) -> type[Task]:
    place, _, attribute = TASKS.get(name, name).partition(":")
    module = user_code.import_for(f"task {name}", place)
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, Task)):
        hint = nearest(attribute, vars(module))
        raise ConfigError(f"task {name}: {place} has no Task called {attribute!r}{hint}")
    if lacking := sorted(found.__abstractmethods__):
        raise ConfigError(f"task {name}: it does not define {', '.join(lacking)}")
    return found


def _check_arguments(name: str, takes: Sequence[str], args: Mapping[str, Any], key: str) -> None:
    for argument in args:
        if argument not in takes:
            known = f"it takes {', '.join(takes)}" if takes else "it takes none"
            hint = nearest(argument, takes)
            raise ConfigError(f"{key}.args: {name} has no argument {argument!r} ({known}){hint}")

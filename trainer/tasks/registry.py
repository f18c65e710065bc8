"""Creates the configured task for the targets of a dataset."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flotilla.trainer.config.base import AUTO
from flotilla.trainer.config.schema import BALANCED, TASKS, Config, OutputConfig, TaskConfig
from flotilla.trainer.features.class_names import ClassIndex, normalize_number
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import ConfigError, nearest
from flotilla.trainer.tasks.base import Array, Target, Task
from flotilla.trainer.tasks.classification import TWO, get_class_names
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.objective import Objective

MULTI_OUTPUT = MultiOutput.name
# The task argument that receives the value of `data.group`.
_GROUP = "group"
# Maximum number of class names in a message.
_SOME = 5
_log = logging.getLogger(__name__)


class _Output(NamedTuple):
    """The name of an output's task, its configuration, and the key of that configuration."""

    kind: str
    said: OutputConfig
    key: str


def create(config: TaskConfig, dataset: DatasetSpec) -> Task:
    """Create the configured task for a dataset that `set_positive` returned.

    Raises:
        ConfigError: the task does not exist, its arguments are invalid, or it does not support a
            target.
    """
    parts, weights = {}, {}
    for label, (kind, said, key) in _outputs(config, dataset).items():
        part = _one(kind, dataset, label, said.args, key)
        if key == "task":
            return part
        parts[label], weights[label] = part, said.weight
    return MultiOutput(parts, weights)


def _outputs(config: TaskConfig, dataset: DatasetSpec) -> dict[str, _Output]:
    name = choose_task(config, dataset).name
    if name == MULTI_OUTPUT:
        return _several(config, dataset)
    if config.outputs:
        raise ConfigError(f"task.outputs: {name} has one output; set task.name to {MULTI_OUTPUT}")
    if len(dataset.targets) > 1:
        raise ConfigError(
            f"task.name: {name} needs one label, but there are several: "
            f"{', '.join(dataset.targets)}; set task.name to {MULTI_OUTPUT}, or data.label to one"
        )
    said = OutputConfig(positive=config.positive, args=config.args)
    return {dataset.targets[0]: _Output(name, said, "task")}


def _several(config: TaskConfig, dataset: DatasetSpec) -> dict[str, _Output]:
    for key in ("args", "positive"):
        if getattr(config, key):
            raise ConfigError(
                f"task.{key}: there are several outputs; set {key} for each in task.outputs"
            )
    for name in config.outputs:
        if name not in dataset.targets:
            hint = nearest(name, dataset.targets) or f" (one of {', '.join(dataset.targets)})"
            raise ConfigError(f"task.outputs: there is no label {name!r}{hint}")
    found = {}
    for name in dataset.targets:
        said = config.outputs.get(name, OutputConfig())
        if said.name == MULTI_OUTPUT:
            raise ConfigError(
                f"task.outputs.{name}.name: a single output cannot be {MULTI_OUTPUT}; set the task "
                f"of the label {name!r}"
            )
        kind = infer_task(dataset, name).name if said.name == AUTO else said.name
        found[name] = _Output(kind, said, f"task.outputs.{name}")
    return found


def set_positive(config: TaskConfig, dataset: DatasetSpec) -> DatasetSpec:
    """Return the dataset, with the classes of binary targets ordered so that class 1 is positive.

    Only this function decides which class is positive. All other code treats class 1 as positive.

    Raises:
        ConfigError: a task does not exist, `positive` is set for a task without a positive class,
            or it does not name a class.
    """
    for label, (kind, said, key) in _outputs(config, dataset).items():
        task, target = _class(kind), find_target(dataset, label)
        names = get_class_names(target)
        if said.positive and not task.positive_by:
            raise ConfigError(
                f"{key}.positive: {kind} of {target.name!r} has no positive class; leave the key "
                f"empty{_KEPT}"
            )
        # Skip a target that does not have two classes. The task will refuse it later.
        if task.positive_by and len(names) == TWO:
            second = _positive(task, target, names, said.positive, key)
            ordered = names if second else names[::-1]
            dataset = dataset.with_classes(label, ordered, swap=not second)
    return dataset


# If the key is empty, the first pipeline step sets it to the champion's positive class.
_KEPT = (
    "; if you did not set this key, its value comes from the champion: give a model with other "
    "classes another name"
)


def _positive(task: type[Task], target: Target, names: tuple[str, ...], said: str, key: str) -> int:
    if said:
        if (number := ClassIndex(names).number(said)) < 0:
            hint = nearest(said, names) or f" (the classes are {' and '.join(map(repr, names))})"
            raise ConfigError(f"{key}.positive: {target.name!r} has no class {said!r}{hint}{_KEPT}")
        return number
    counts = target.counts.get("train", ())
    return int(not (task.positive_by == "rarity" and len(counts) == TWO and counts[0] < counts[1]))


def describe_task(config: TaskConfig, dataset: DatasetSpec) -> str:
    """Return a line that names the task and its positive classes, with the reasons.

    The dataset comes from `set_positive`.
    """
    name, why = choose_task(config, dataset)
    said = []
    for label, output in _outputs(config, dataset).items():
        task, target = _class(output.kind), find_target(dataset, label)
        if task.positive_by and len(target.labels) == TWO:
            of = f" of {label!r}" if name == MULTI_OUTPUT else ""
            because = _why_positive(task, target, output.said.positive, output.key)
            said.append(f"the positive class{of} is {target.labels[1]!r}, {because}")
    return "; ".join([f"the task is {name}, because {why}", *said])


def _why_positive(task: type[Task], target: Target, said: str, key: str) -> str:
    if said:
        return f"as set in {key}.positive"
    counts = target.counts.get("train", ())
    if task.positive_by == "order":
        return "the second one"
    if len(counts) != TWO:
        return "or the other class if that is rarer in training"
    if counts[0] == counts[1]:
        return f"the second of two classes with {counts[1]:,} training examples each"
    return f"the rarer one, {counts[1]:,} of {sum(counts):,} training examples"


def _one(name: str, dataset: DatasetSpec, label: str, args: Mapping[str, Any], key: str) -> Task:
    task = _class(name)
    user_code.require_arguments(key, name, task, args, ("target", _GROUP))
    group = {_GROUP: dataset.group} if _GROUP in inspect.signature(task).parameters else {}
    try:
        made = task(find_target(dataset, label), **group, **args)
        for column in made.columns:
            if column != dataset.group and column not in (known := dataset.features):
                hint = nearest(column, known) or f" (one of {', '.join(known)})"
                raise ConfigError(f"there is no feature {column!r}{hint}")
        if label in dataset.target_moments:
            made.check()
        return made
    except ConfigError as error:
        raise ConfigError(f"{key} {name}: {error}") from None
    # A user's task may raise any exception.
    except Exception as error:
        raise ConfigError(f"{key} {name}: {user_code.format_error(error)}") from error


class Choice(NamedTuple):
    """The name of a task, and the reason for choosing it."""

    name: str
    why: str


def choose_task(config: TaskConfig, dataset: DatasetSpec) -> Choice:
    """Return the configured task, or the task that fits the targets."""
    if config.name != AUTO:
        return Choice(config.name, "task.name sets it")
    if len(dataset.targets) > 1:
        return Choice(MULTI_OUTPUT, f"there are several labels: {', '.join(dataset.targets)}")
    return infer_task(dataset, dataset.targets[0])


def infer_task(dataset: DatasetSpec, label: str) -> Choice:
    """Return the task that fits a label.

    An integer is treated as a class number, because TFDS stores classes as integers and does not
    mark quantities. If the dataset declares no number of classes, the task is `classification`,
    even if preparation found only two classes.
    """
    target = find_target(dataset, label)
    kind = "" if target.dtype == "string" else np.dtype(target.dtype).kind
    if kind == "f":
        return Choice("regression", f"the label {target} is a quantity")
    if kind == "b" and not target.shape:
        return Choice("binary_classification", f"the label {target} is true or false")
    # Use the declared number of classes. `find_target` may return a number that was counted.
    named = dataset.features[label].num_classes
    if kind in {"i", "u"} and not target.shape:
        if named == TWO:
            return Choice("binary_classification", f"the label {target} has two classes")
        why = f"the label {target} names a class"
        if target.num_classes == TWO:
            why += (
                ", and the data has two classes; if there are no other classes, set task.name to "
                "binary_classification"
            )
        return Choice("classification", why)
    if kind in {"i", "u"} and (named or _is_per_position(dataset, target)):
        return Choice("sequence_labelling", f"the label {target} names a class for each position")
    if kind in {"b", "i", "u"} and len(target.shape) == 1:
        why = f"the label {target} marks each of {target.shape[0]} classes"
        return Choice("multilabel_classification", why)
    raise ConfigError(
        f"task.name: no built-in task supports the label {target}; set data.label to another "
        "feature"
    )


def _is_per_position(dataset: DatasetSpec, target: Target) -> bool:
    """Return whether an input, such as a sequence or image, has the same positions as the label."""
    shapes = (dataset.features[name].shape for name in dataset.inputs)
    sizes = [tuple(-1 if size is None else size for size in shape) for shape in shapes]
    places = target.shape[: max(len(target.shape) - 1, 1)]
    return any(shape[: len(places)] == places for shape in sizes)


def make_objective(config: Config, dataset: DatasetSpec) -> Objective:
    """Create the objective of a run on a dataset.

    Raises:
        ConfigError: the task is invalid (see `create`), or a loss, a metric or a class does not
            exist.
    """
    task = create(config.task, dataset)
    champion, main_metric = config.gate.champion, config.task.main_metric
    made = Objective(
        task,
        loss=config.task.loss,
        metrics=config.task.metrics,
        outputs=config.task.outputs,
        weights=_class_weights(config, task),
        main_metric=main_metric,
        better=(champion.better or None) if champion.metric in ("", main_metric) else None,
    )
    compared = f"models are compared by {made.main_metric}"
    _log.info("%s; %s", describe_task(config.task, dataset), compared)
    return made


def _class_weights(config: Config, task: Task) -> dict[str, Array]:
    given = config.training.class_weights
    if given and "" not in task.parts:
        raise ConfigError(
            f"training.class_weights: there are several labels ({', '.join(task.parts)}); set "
            "the weights of each label in task.outputs.<label>.class_weights"
        )
    found = {}
    for name, part in task.parts.items():
        key = "training.class_weights"
        if name:
            key = f"task.outputs.{name}.class_weights"
            given = config.task.outputs.get(name, OutputConfig()).class_weights
        found[name] = class_weights(given, part, key)
    return {name: weights for name, weights in found.items() if weights is not None}


def class_weights(given: str | Mapping[str, float], task: Task, key: str) -> Array | None:
    """Return the weight of each class of a label [classes], or None without class weights.

    `balanced` gives each class the weight `examples / (classes * examples of the class)`, counted
    in the training split, so that all classes have the same total weight. Before preparation, the
    counts are unknown and the result is None.

    Raises:
        ConfigError: the task has no classes, a class is unknown, or a class has no examples. The
            message starts with `key`.
    """
    if not given:
        return None
    try:
        names = task.labels
        if not names:
            raise ConfigError(f"{task.name} of {task.target} has no classes to weight")
        if isinstance(given, str):
            return _balance_classes(task, names)
        weights = np.ones(len(names), np.float32)
        for name, weight in given.items():
            weights[_number(name, names)] = weight
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    return weights


def _balance_classes(task: Task, names: Sequence[str]) -> Array | None:
    if not task.target.counts:
        return None
    counts = np.asarray(task.target.counts["train"], np.float64)
    if len(counts) != len(names) or task.target.shape:
        raise ConfigError(
            f"{BALANCED!r} needs one class per example, but {task.name} of {task.target} has "
            "several; set a weight for each class"
        )
    if lacking := [name for name, count in zip(names, counts, strict=True) if not count]:
        raise ConfigError(
            f"{BALANCED!r} needs training examples of each class, but there are none of "
            f"{', '.join(map(repr, lacking[:3]))}; set a weight for each class"
        )
    found: Array = (counts.sum() / (len(counts) * counts)).astype(np.float32)
    return found


def _number(name: str, names: Sequence[str]) -> int:
    if (found := ClassIndex(names).number(name)) >= 0:
        return found
    by_place = name.isascii() and name.isdigit() and not any(map(normalize_number, names))
    if by_place and int(name) < len(names):
        return int(name)
    some = ", ".join(names[:_SOME]) + (", ..." if len(names) > _SOME else "")
    hint = nearest(name, names) or f" (the classes are {some})"
    raise ConfigError(f"there is no class {name!r}{hint}")


def find_target(dataset: DatasetSpec, name: str) -> Target:
    """Return the description of a target.

    If the dataset does not declare the number of classes of an integer label, the number that was
    counted in preparation is used.
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
    found = user_code.find_named(f"task {name}", TASKS.get(name, name), "Task")
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ConfigError(f"task {name} is not a subclass of flotilla.trainer.tasks.base.Task")
    if lacking := sorted(found.__abstractmethods__):
        raise ConfigError(f"task {name} does not define {', '.join(lacking)}")
    return found

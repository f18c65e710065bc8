"""What an exported model takes: names, shapes and types as a client of its signature sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.names import argument_names
from flotilla.trainer.tasks.base import Task

SERVING = "serving_default"
SERIALIZED = "serialized_examples"
# One class a line, in the folder of a model; absent where the task has no classes.
LABELS = "labels.txt"


def describe_inputs(spec: DatasetSpec) -> list[dict[str, Any]]:
    """Return what the manifest of a model says of its inputs: each feature, and its argument."""
    return [
        {
            "feature": feature,
            "name": name,
            "shape": list(spec.features[feature].shape),
            "dtype": spec.features[feature].dtype,
        }
        for feature, name in argument_names(spec.inputs).items()
    ]


def list_labels(task: Task) -> dict[str, list[str]]:
    """Return the names of the classes of each of several outputs.

    Those of a single one are in `LABELS`, but where one of them is no single line of a file.
    """
    return {
        name: list(part.labels)
        for name, part in task.parts.items()
        if name or any(label and label.splitlines() != [label] for label in part.labels)
    }


def find_positive(task: Task) -> Any:
    """Return the name of the positive class; of several outputs those that have one, by output."""
    found = {name: part.labels[1] for name, part in task.parts.items() if part.positive_by}
    return found.get("", found)


def by_output(said: Any) -> Mapping[str, Any]:
    """Return what a manifest says of one output, or of each, by output."""
    return said if isinstance(said, Mapping) else {"": said}


def links_of(task: Task) -> dict[str, Any]:
    """Return what makes an answer of each output, where a model gives it as it was trained.

    That is a function by its name, `first` for the sigmoid of the first number alone, or the mean
    and the deviation that numbers are standardized by. A single output has no name.
    """
    found = dict[str, Any]()
    for name, part in task.parts.items():
        scale = getattr(part, "scale", (0.0, 1.0))
        found[name] = "" if part.from_probabilities else part.link
        if part.name == "recommendation":
            found[name] = "first"
        elif scale != (0.0, 1.0):
            found[name] = [*scale]
    return found


def list_kinds(task: Task) -> dict[str, str]:
    """Return the kind of task of each output, or none; that of a single one has no name."""
    return {name: _kind(type(part)) for name, part in task.parts.items()}


def _kind(task: type[Task]) -> str:
    own = (each for each in task.__mro__ if each.__module__.startswith("flotilla.trainer.tasks."))
    return next((str(vars(each)["name"]) for each in own if "name" in vars(each)), "")

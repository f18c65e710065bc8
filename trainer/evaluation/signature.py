"""The inputs of an exported model: names, shapes and types in its signature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.names import argument_names
from flotilla.trainer.tasks.base import Task

SERVING = "serving_default"
SERIALIZED = "serialized_examples"
# The file in the folder of a model with one class per line; a task without classes has no such
# file.
LABELS = "labels.txt"


def describe_inputs(spec: DatasetSpec) -> list[dict[str, Any]]:
    """Return the inputs for the manifest of a model: each feature and its argument."""
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
    """Return the class names of each output of a model with several outputs.

    A single output uses the file `LABELS`, unless a class name does not fit on one line.
    """
    return {
        name: list(part.labels)
        for name, part in task.parts.items()
        if name or any(label and label.splitlines() != [label] for label in part.labels)
    }


def find_positive(task: Task) -> Any:
    """Return the name of the positive class; for several outputs, a mapping by output."""
    found = {name: part.labels[1] for name, part in task.parts.items() if part.positive_by}
    return found.get("", found)


def map_outputs(said: Any) -> Mapping[str, Any]:
    """Return a manifest's value as a mapping by output; a single output has an empty name."""
    return said if isinstance(said, Mapping) else {"": said}


def list_links(task: Task) -> dict[str, Any]:
    """Return the function that converts each output of the trained model to an answer.

    It is the name of a function, `first` for the sigmoid of the first number alone, or the mean and
    deviation by which numbers are standardized. A single output has no name.
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
    """Return the kind of task of each output, if it is known; a single output has no name."""
    return {name: _kind(type(part)) for name, part in task.parts.items()}


def _kind(task: type[Task]) -> str:
    own = (each for each in task.__mro__ if each.__module__.startswith("flotilla.trainer.tasks."))
    return next((str(vars(each)["name"]) for each in own if "name" in vars(each)), "")

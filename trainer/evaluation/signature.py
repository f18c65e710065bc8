"""The names, shapes and types of an exported model's inputs and outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.names import argument_names
from flotilla.trainer.tasks.base import Task

SERVING = "serving_default"
SERIALIZED = "serialized_examples"
# A file in a model's folder with one class name per line. Tasks without classes have none.
LABELS = "labels.txt"


def describe_inputs(spec: DatasetSpec) -> list[dict[str, Any]]:
    """Return the inputs of a model for its manifest: each feature and the name of its argument."""
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
    """Return the class names of each output, by output name.

    The classes of a single output are stored in the file `LABELS` instead, unless a name does not
    fit on one line.
    """
    return {
        name: list(part.labels)
        for name, part in task.parts.items()
        if name or any(label and label.splitlines() != [label] for label in part.labels)
    }


def find_positive(task: Task) -> Any:
    """Return the name of the positive class or, for several outputs, a mapping by output name."""
    found = {name: part.labels[1] for name, part in task.parts.items() if part.positive_by}
    return found.get("", found)


def map_outputs(said: Any) -> Mapping[str, Any]:
    """Return a manifest's value, keyed by output name. A single output has an empty name."""
    return said if isinstance(said, Mapping) else {"": said}


def list_links(task: Task) -> dict[str, Any]:
    """Return how each output of the trained model is converted to a prediction.

    The value is the name of a function (empty for none), `first` for the sigmoid of the first
    column only, or the mean and standard deviation that outputs were standardized with. A single
    output has an empty name.
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
    """Return the kind of task of each output, keyed by output name. An unknown kind is empty."""
    return {name: _kind(type(part)) for name, part in task.parts.items()}


def _kind(task: type[Task]) -> str:
    own = (each for each in task.__mro__ if each.__module__.startswith("flotilla.trainer.tasks."))
    return next((str(vars(each)["name"]) for each in own if "name" in vars(each)), "")

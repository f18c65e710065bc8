"""Make the configured task for the targets of a dataset."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trainer import user_code
from trainer.config.schema import AUTO, TASKS, TaskConfig
from trainer.errors import ConfigError, nearest
from trainer.tasks.base import Target, Task


class Feature(Protocol):
    """What a dataset says of a feature."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of its axes."""

    @property
    def dtype(self) -> str:
        """Name of its type."""

    @property
    def num_classes(self) -> int:
        """Classes that its values name."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of these classes."""


class Dataset(Protocol):
    """What a task takes of a dataset, prepared or not yet: see `trainer.data.spec.DatasetSpec`."""

    @property
    def features(self) -> Mapping[str, Feature]:
        """All features."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of those to be predicted."""

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
    targets = [target_of(dataset, name) for name in dataset.targets]
    (target,) = targets
    name = automatic(targets) if config.name == AUTO else config.name
    task = _class(name)
    _check_arguments(name, task, config.args)
    try:
        return task(target, **config.args)
    except ConfigError as error:
        raise ConfigError(f"task {name}: {error}") from None
    # A task of the user's may fail in any way.
    except Exception as error:
        raise ConfigError(f"task {name}: {user_code.line_of(error)}") from error


def automatic(targets: Sequence[Target]) -> str:
    """Return the name of the task that the targets of a dataset ask for."""
    del targets
    return "classification"


def target_of(dataset: Dataset, name: str) -> Target:
    """Return what a dataset says of one of its targets.

    A whole number whose classes have no names has as many as the examples name.
    """
    feature = dataset.features[name]
    counts = dataset.target_counts.get(name, {})
    classes = feature.num_classes or max(map(len, counts.values()), default=0)
    return Target(
        name=name,
        shape=tuple(feature.shape),
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


def _check_arguments(name: str, task: type[Task], args: Mapping[str, Any]) -> None:
    allowed = [each for each in inspect.signature(task).parameters if each != "target"]
    for argument in args:
        if argument not in allowed:
            known = f"it takes {', '.join(allowed)}" if allowed else "it takes none"
            hint = nearest(argument, allowed)
            raise ConfigError(f"task.args: {name} has no argument {argument!r} ({known}){hint}")

"""Counts the examples of each class of a target, and checks labels and weights.

The counts are part of the manifest, so that a task can be checked, and its classes balanced,
without reading an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.data.columns import Column
from flotilla.trainer.data.roles import format_names
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import UserError

# An integer at or above this limit is a quantity, not a class.
MOST_CLASSES = 1_000_000
_NAMED = 3


class Target:
    """Counts of the classes of one target, by split."""

    def __init__(self, name: str, spec: FeatureSpec) -> None:
        """Create empty counts."""
        self.name = name
        self._spec = spec
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._of_classes = np.dtype(spec.dtype).kind in "iub"
        self._multi_hot = spec.dtype == "bool" and spec.shape == (spec.num_classes,)

    def refuse(self, dataset: str, split: str, given: Column) -> None:
        """Raise `UserError` if an example lacks a class, or a numeric label is not finite."""
        values = _flatten(given)
        if values.dtype.kind in "fV":  # bfloat16 has the kind V.
            _refuse_infinite("label", self.name, dataset, split, values)
        elif self._spec.num_classes and self._spec.shape == () and values.min(initial=0) < 0:
            raise UserError(
                f"data.dataset: the split {split!r} of {dataset} has examples without a label "
                f"({self.name!r} is {values.min()}); write your own builder "
                "(data.dataset: package.module:Builder) that leaves them out"
            )

    def add(self, split: str, given: Column) -> None:
        """Count the classes in the labels `given` of a split. Numeric labels are not counted."""
        if not self._of_classes:
            return
        values = _flatten(given)
        if self._multi_hot:
            found = values.sum(axis=0, dtype=np.int64)
        else:
            flat = values.ravel()
            if flat.size and flat.max() >= MOST_CLASSES:
                self._of_classes = False
                return
            # Skip negative values, which are the padding of a sequence.
            found = np.bincount(flat[flat >= 0].astype(np.int64))
        self._count(split, found)

    def _count(self, split: str, found: NDArray[np.int64]) -> None:
        before = self._counts.get(split, np.zeros(0, np.int64))
        length = max(len(found), len(before))
        self._counts[split] = _pad(found, length) + _pad(before, length)

    def merge(self, other: Target) -> None:
        """Add the counts of another `Target`."""
        self._of_classes = self._of_classes and other._of_classes
        for split, found in other._counts.items():
            self._count(split, found)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        counts = {split: each.tolist() for split, each in self._counts.items()}
        return {"of_classes": self._of_classes, "counts": counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state()`."""
        self._of_classes = state["of_classes"]
        self._counts = {name: np.array(each, np.int64) for name, each in state["counts"].items()}

    def counts(self) -> dict[str, list[int]]:
        """Return the number of examples of each class by split, or {} if there are no classes.

        Every label of a sequence is counted. A vector of bools is counted element by element.
        """
        if not self._of_classes or not self._counts:
            return {}
        length = max(self._spec.num_classes, *(len(each) for each in self._counts.values()))
        return {split: _pad(each, length).tolist() for split, each in self._counts.items()}

    def notes(self) -> Iterator[str]:
        """Yield notes on classes without training examples, or with a single example."""
        names, train = self._spec.labels, self._counts.get("train")
        if not names or self._spec.shape or train is None:
            return
        counts = self.counts()
        total = dict(zip(names, np.sum([*counts.values()], axis=0), strict=True))
        trained = dict(zip(names, counts["train"], strict=True))
        lacking = [repr(name) for name in names if total[name] and not trained[name]]
        single = [repr(name) for name in names if total[name] == 1 and trained[name]]
        if lacking:
            yield (
                f"the label {self.name!r} has {format_names(lacking, _NAMED)} only in validation "
                "or test, but a model cannot learn a class without training examples; add some, or "
                "remove these rows"
            )
        if single:
            yield (
                f"the label {self.name!r} has only one example of {format_names(single, _NAMED)}; "
                "correct the spelling, merge classes, or add examples"
            )


def refuse_weight(name: str, dataset: str, split: str, values: NDArray[Any]) -> None:
    """Raise `UserError` if a weight is negative or not finite."""
    _refuse_infinite("weight", name, dataset, split, values)
    if values.min(initial=0) < 0:
        raise UserError(
            f"data.weight: the split {split!r} of {dataset} has an example with the weight "
            f"{values.min()} ({name!r}); a weight must be at least 0"
        )


def _refuse_infinite(key: str, name: str, dataset: str, split: str, values: NDArray[Any]) -> None:
    wide = values.astype(np.float64)
    if not (finite := np.isfinite(wide)).all():
        raise UserError(
            f"data.{key}: the split {split!r} of {dataset} has an example whose {name!r} is "
            f"{wide[~finite].flat[0]}; write your own builder (data.dataset: "
            "package.module:Builder) that leaves it out"
        )


def _pad(counts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return np.pad(counts, (0, length - len(counts)))


def _flatten(values: Column) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    return values.flatten().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]

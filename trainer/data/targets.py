"""What the targets of a dataset hold: examples of each class, or the moments of a number.

They stand in the manifest: a task is checked by them, and balances its classes by them, without
reading one example.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.spec import FeatureSpec
from trainer.errors import UserError

# More than any list of classes; beyond it an integer is a quantity.
MOST_CLASSES = 1_000_000


class Target:
    """Sums over the values of one target, by split."""

    def __init__(self, name: str, spec: FeatureSpec) -> None:
        """Begin with no values."""
        self.name = name
        self._spec = spec
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._of_classes = np.dtype(spec.dtype).kind in "iub" if spec.dtype != "string" else False
        self._sums: dict[str, Any] = {"count": 0, "sum": 0.0, "squares": 0.0}
        self._ends = [np.inf, -np.inf]

    def refuse_without_label(self, dataset: str, split: str, values: NDArray[Any]) -> None:
        """Raise `UserError` where an example of a class has none."""
        if self._spec.num_classes and self._spec.shape == () and values.min(initial=0) < 0:
            raise UserError(
                f"data.dataset: the split {split!r} of {dataset} has examples without a label "
                f"({self.name!r} is {values.min()}); write your own builder "
                "(data.dataset: package.module:Builder) that leaves them out"
            )

    def add(self, split: str, values: NDArray[Any]) -> None:
        """Add the values of some examples of a split."""
        if values.dtype.kind not in "iubf":
            return
        if split == "train" and values.size:
            wide = values.astype(np.float64)
            self._sums["count"] += wide.size
            self._sums["sum"] += wide.sum()
            self._sums["squares"] += (wide**2).sum()
            self._ends = [min(self._ends[0], wide.min()), max(self._ends[1], wide.max())]
        if not self._of_classes:
            return
        flat = values.ravel()
        if flat.size and flat.max() >= MOST_CLASSES:
            self._of_classes = False
            return
        # Below zero is padding of a sequence.
        found = np.bincount(flat[flat >= 0].astype(np.int64))
        before = self._counts.get(split, np.zeros(0, np.int64))
        length = max(len(found), len(before))
        self._counts[split] = np.pad(found, (0, length - len(found))) + np.pad(
            before, (0, length - len(before))
        )

    def counts(self) -> dict[str, list[int]]:
        """Return the examples of each class by split; empty for what is no class."""
        if not self._of_classes or not self._counts:
            return {}
        length = max(self._spec.num_classes, *(len(each) for each in self._counts.values()))
        return {
            split: np.pad(each, (0, length - len(each))).tolist()
            for split, each in self._counts.items()
        }

    def moments(self) -> Mapping[str, float]:
        """Return mean, standard deviation, smallest and largest value of the training split.

        Empty for texts, and where a value is not finite.
        """
        count = self._sums["count"]
        if not count or not np.isfinite([self._sums["squares"], *self._ends]).all():
            return {}
        mean = self._sums["sum"] / count
        variance = max(self._sums["squares"] / count - mean**2, 0.0)
        low, high = self._ends
        return {"mean": mean, "std": float(np.sqrt(variance)), "min": low, "max": high}

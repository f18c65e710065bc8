"""What the rules see of a dataset: its features, its classes, and its statistics where it has them.

A profile is made of the manifest and of `statistics.json` of a published dataset. One without
statistics, as older versions wrote it, has features and classes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainer import storage
from trainer.data.spec import DatasetSpec, FeatureSpec

NUMBER, TEXT, CLASS, TENSOR, IMAGE = "number", "text", "class", "tensor", "image"


@dataclass(frozen=True, kw_only=True)
class FeatureProfile:
    """A feature in one split.

    Attributes:
        kind: number, text, class, tensor or image.
        examples: of the split.
        missing: examples without a value.
        mean: of the numbers, or of all elements of a tensor; likewise `std`, `least` and `most`.
        quantiles: numbers at even steps of the distribution, ascending; of a tensor those of the
            means of its examples.
        counts: examples by value; `distinct` is how many values there are in all.
        association: with each label, from 0 to 1.
    """

    kind: str
    examples: int
    missing: int = 0
    mean: float = float("nan")
    std: float = float("nan")
    least: float = float("nan")
    most: float = float("nan")
    quantiles: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    counts: Mapping[str, int] = field(default_factory=dict)
    distinct: int = 0
    association: Mapping[str, float] = field(default_factory=dict)

    @property
    def present(self) -> int:
        """Examples with a value."""
        return self.examples - self.missing

    @property
    def is_counted(self) -> bool:
        """Whether `counts` has every value."""
        return bool(self.counts) and self.distinct <= len(self.counts)


@dataclass(frozen=True, kw_only=True)
class SplitProfile:
    """One split: how many examples, its features, and which examples are equal.

    Attributes:
        examples: their number.
        features: by name; none where the dataset has no statistics.
        hashes: the smallest hashes of the inputs of its examples, ascending.
        copies: how many examples have each of them.
        has_all_hashes: whether no example has a larger one.
        sample: some examples, as a column of numbers by feature.
    """

    examples: int
    features: Mapping[str, FeatureProfile] = field(default_factory=dict)
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    copies: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    has_all_hashes: bool = True
    sample: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DatasetProfile:
    """A dataset: its splits, the types of its features, and their roles.

    `class_counts` are the examples of each class by label and split, in the order of the classes.
    """

    uri: str
    splits: Mapping[str, SplitProfile]
    specs: Mapping[str, FeatureSpec]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    class_counts: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)

    def examples(self, split: str) -> int:
        """Return the number of examples of a split; 0 for one that there is not."""
        return self.splits[split].examples if split in self.splits else 0

    def features(self, split: str) -> Mapping[str, FeatureProfile]:
        """Return the statistics of the features of a split; none where it has none."""
        return self.splits[split].features if split in self.splits else {}

    def class_names(self, target: str) -> tuple[str, ...]:
        """Return the names of the classes of a label; their numbers where they have none."""
        spec = self.specs[target]
        return spec.labels or tuple(map(str, range(spec.num_classes)))

    def by_class(self, target: str, split: str) -> dict[str, int]:
        """Return the examples of each class of a label, by its name."""
        counts = self.class_counts.get(target, {}).get(split, ())
        return dict(zip(self.class_names(target), counts, strict=False))


def profile_of(uri: str) -> DatasetProfile:
    """Return the profile of a published dataset.

    Raises:
        UserError: it is gone, damaged, or no dataset of this version.
    """
    spec = DatasetSpec.from_manifest(storage.read_manifest(uri))
    return DatasetProfile(
        uri=uri,
        splits={split: SplitProfile(examples=spec.examples(split)) for split in spec.shards},
        specs=spec.features,
        inputs=spec.inputs,
        targets=spec.targets,
        class_counts={
            target: {split: tuple(counts) for split, counts in by_split.items()}
            for target, by_split in spec.target_counts.items()
        },
    )

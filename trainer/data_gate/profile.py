"""The profile of a dataset that the rules check: its features, classes and statistics.

A profile is made from the manifest, `statistics.json` and `examples.npz` of a published dataset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer import storage
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.statistics import (
    CLASS,
    NUMBER,
    TEXT,
    ExampleSketch,
    FeatureStatistics,
    SplitStatistics,
)

# Maximum range of row numbers, as a multiple of the number of examples.
_GAPS = 20


@dataclass(frozen=True, kw_only=True)
class FeatureProfile(FeatureStatistics):
    """A feature in one split. Unknown numbers are NaN.

    `numbers` is a sorted sample of the values or, for a tensor, of the means of its examples.
    """

    mean: float = math.nan
    std: float = math.nan
    least: float = math.nan
    most: float = math.nan
    numbers: NDArray[np.float64] = field(default_factory=lambda: np.empty(0))

    @property
    def present(self) -> int:
        """The number of examples with a value."""
        return self.examples - self.missing

    @property
    def is_serial(self) -> bool:
        """Whether the feature numbers the rows: it has distinct integers with few gaps."""
        return (
            self.kind == NUMBER
            and 1 < self.present <= self.distinct
            and self.most - self.least < _GAPS * self.examples
            and not np.any(self.numbers % 1)
        )

    @property
    def is_counted(self) -> bool:
        """Whether `counts` covers every value."""
        return bool(self.counts) and self.distinct <= len(self.counts)


@dataclass(frozen=True, kw_only=True)
class SplitProfile(ExampleSketch):
    """One split: its size, its features, and the hashes of its examples."""

    examples: int
    features: Mapping[str, FeatureProfile] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DatasetProfile:
    """A dataset: its splits, the types of its features, and their roles.

    `class_counts` has the number of examples of each class by label and split, in class order.
    `group` is the feature that groups examples, or empty. `times` are the time columns, `notes` the
    notes of the source, and `spans` the spans of the dataset.
    """

    uri: str
    splits: Mapping[str, SplitProfile]
    specs: Mapping[str, FeatureSpec]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    class_counts: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    group: str = ""
    times: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    spans: tuple[str, ...] = ()

    def grows_by_design(self, name: str) -> bool:
        """Return whether a feature is a timestamp or a row number, which is new in each span."""
        return name in self.times or self.features("train")[name].is_serial

    @property
    def used(self) -> tuple[str, ...]:
        """The names of the inputs and the labels."""
        return tuple(dict.fromkeys([*self.inputs, *self.targets]))

    def examples(self, split: str) -> int:
        """Return the number of examples of a split, or 0 if it does not exist."""
        return self.splits[split].examples if split in self.splits else 0

    def features(self, split: str) -> Mapping[str, FeatureProfile]:
        """Return the features of a split by name, or an empty mapping if it does not exist."""
        return self.splits[split].features if split in self.splits else {}

    def class_names(self, target: str) -> tuple[str, ...]:
        """Return the class names of a label, or its class indices as text if it has no names."""
        spec = self.specs[target]
        return spec.labels or tuple(map(str, range(spec.num_classes)))

    def count_classes(self, target: str, split: str) -> dict[str, int]:
        """Return the number of examples of each class of a label, by class name."""
        counts = self.class_counts.get(target, {}).get(split, ())
        return dict(zip(self.class_names(target), counts, strict=False))


def make_profile(uri: str) -> DatasetProfile:
    """Return the profile of a published dataset from the statistics next to its shards.

    Raises:
        UserError: the dataset is missing, corrupted, or of another version.
    """
    manifest = storage.read_manifest(uri)
    spec = DatasetSpec.from_manifest(manifest)
    found = statistics.from_bytes(storage.read_file(uri, statistics.FILE), uri).splits
    data = storage.read_file(uri, statistics.EXAMPLES)
    sketches = statistics.sketches_from_bytes(data, uri)
    return DatasetProfile(
        uri=uri,
        splits={split: split_profile(found[split], sketches[split]) for split in spec.shards},
        specs=spec.features,
        inputs=spec.inputs,
        targets=spec.targets,
        class_counts={
            target: {split: tuple(counts) for split, counts in by_split.items()}
            for target, by_split in spec.target_counts.items()
        },
        group=spec.group,
        times=frozenset(
            each["name"] for each in manifest.fields.get("columns", ()) if each["type"] == "time"
        ),
        notes=tuple(manifest.fields.get("notes", ())),
        spans=tuple(manifest.fields.get("spans", ())),
    )


def split_profile(found: SplitStatistics, sketch: ExampleSketch) -> SplitProfile:
    """Return the profile of a split from its statistics."""
    features = {
        name: _feature(each, sketch.sample.get(name, np.empty(0)))
        for name, each in found.features.items()
    }
    return SplitProfile(examples=found.examples, features=features, **vars(sketch))


def _feature(found: FeatureStatistics, sample: NDArray[np.float64]) -> FeatureProfile:
    known = {name: value for name, value in vars(found).items() if value is not None}
    if found.kind in (TEXT, CLASS):
        return FeatureProfile(**known)
    return FeatureProfile(**known, numbers=np.sort(sample[np.isfinite(sample)]))

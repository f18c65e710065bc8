"""The content of a prepared dataset, as described in its manifest.

A split is a list of TFRecord shards. A record is a block of rows (`trainer/data/blocks.py`). The
features of a row are described in `feature_spec.py`. This module does not import TensorFlow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.thresholds import split_rule
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.statistics import NOTHING, Learnt
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest
from flotilla.trainer.runtime.json_records import parse_record
from flotilla.trainer.storage import Corrupt, Manifest

KIND = "dataset"
# Version of the stored format, which is part of a dataset's key. Increase it if the format changes.
SCHEMA = 5
# Maximum number of rows in a block.
BLOCK_ROWS = 512
# Maximum number of classes that a message lists.
_SOME = 10
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, kw_only=True)
class DatasetSpec:
    """A prepared dataset, as readers, models and tasks use it.

    `targets` are the features to predict. `weight` and `group` are the names of features, or empty.
    `target_counts` has the number of examples of each class by target and split. It omits targets
    without classes. `target_moments` has the mean, std, min and max of each target over the
    training split. `learnt` has the statistics of the training split, for models.

    Each block of a shard has `block_rows` rows, except for the last one, which has the remainder.

    If a target is in `swapped`, the blocks store its two classes in reverse order.
    """

    features: Mapping[str, FeatureSpec]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    shards: Mapping[str, tuple[int, ...]]
    block_rows: int = BLOCK_ROWS
    weight: str = ""
    group: str = ""
    target_counts: Mapping[str, Mapping[str, Sequence[int]]] = field(default_factory=dict)
    target_moments: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    learnt: Learnt = field(default=NOTHING, repr=False, compare=False)
    swapped: frozenset[str] = frozenset()

    def with_classes(self, target: str, labels: tuple[str, ...], *, swap: bool) -> DatasetSpec:
        """Return the spec with new names for the two classes of a target.

        `labels` are in the order that readers return. If `swap` is set, readers swap both classes.
        """
        named = replace(self.features[target], labels=labels, num_classes=len(labels))
        found = replace(self, features={**self.features, target: named})
        if not swap:
            return found
        counts = {
            split: [*each, *[0] * (len(labels) - len(each))][::-1]
            for split, each in self.target_counts.get(target, {}).items()
        }
        turned = {**self.target_counts, target: counts} if counts else self.target_counts
        return replace(found, swapped=self.swapped ^ {target}, target_counts=turned)

    @property
    def roles(self) -> tuple[str, ...]:
        """The features of a batch: inputs, targets, and the weight."""
        return tuple(dict.fromkeys([*self.inputs, *self.targets, *filter(None, [self.weight])]))

    def examples(self, split: str) -> int:
        """Return the number of examples of a split, or 0 if the split does not exist."""
        return sum(self.shards.get(split, ()))

    def files(self, split: str) -> list[str]:
        """Return the file names of a split's shards, in order.

        Raises:
            UserError: the split does not exist.
        """
        if split not in self.shards:
            hint = nearest(split, self.shards) or f" (it has {', '.join(self.shards)})"
            raise UserError(f"the dataset has no split {split!r}{hint}")
        count = len(self.shards[split])
        return [shard_name(split, index, count) for index in range(count)]

    @classmethod
    def from_manifest(cls, manifest: Manifest, learnt: Learnt = NOTHING) -> DatasetSpec:
        """Return the spec of a published dataset, with the statistics `learnt` for models.

        Raises:
            UserError: the manifest is invalid, describes no dataset, or has another version.
        """
        if manifest.kind != KIND:
            raise UserError(f"the given dataset is a {manifest.kind}, not a {KIND}; check its URI")
        found = manifest.fields.get("dataset_schema")
        if found != SCHEMA:
            raise UserError(
                f"the dataset has schema {found}, but this version reads {SCHEMA}; prepare it again"
            )
        said = parse_record(_Fields, dict(manifest.fields))
        if said is None or said.block_rows < 1:
            raise Corrupt(
                "the manifest of the dataset lacks a field, or a field has the wrong type; prepare "
                "the dataset again"
            )
        more = {each.name: getattr(said, each.name) for each in fields(said)}
        shards = {name: split.shards for name, split in more.pop("splits").items()}
        return cls(shards=shards, learnt=learnt, **more)


@dataclass(frozen=True, kw_only=True)
class _Split:
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Fields:
    features: Mapping[str, FeatureSpec]
    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    weight: str
    group: str
    block_rows: int
    target_counts: Mapping[str, Mapping[str, list[int]]]
    target_moments: Mapping[str, Mapping[str, float]]
    splits: Mapping[str, _Split]


def require_buckets(buckets: Sequence[int], varying: Sequence[str]) -> None:
    """Raise `ConfigError` if `data.buckets` is set but no input or label varies in length."""
    if buckets and not varying:
        raise ConfigError(
            "data.buckets: no input or label varies in length; leave data.buckets out, or set "
            "data.shapes: {FEATURE: [0]} for a variable length"
        )


def shard_name(split: str, index: int, count: int) -> str:
    """Return the file name of a shard."""
    return f"{split}-{index:05d}-of-{count:05d}.tfrecord"


def slice_features(
    features: Mapping[str, FeatureSpec], targets: Sequence[str], wanted: Sequence[str]
) -> list[str]:
    """Return the features by which an evaluation is sliced: labels that are classes, and `wanted`.

    Raises:
        ConfigError: a feature does not exist, or has more than one value per example.
    """
    able = [name for name, feature in features.items() if feature.shape == ()]
    for name in wanted:
        if name not in able:
            what = "has more than one value per example" if name in features else "is not a feature"
            hint = nearest(name, able) or f" (one of {', '.join(able)})"
            raise ConfigError(f"evaluation.slices: {name!r} {what} of the dataset{hint}")
    classes = [name for name in targets if name in able and features[name].num_classes]
    return list(dict.fromkeys([*classes, *wanted]))


def require_slices(
    config: Config, features: Mapping[str, FeatureSpec], targets: Sequence[str]
) -> None:
    """Raise `ConfigError` if the evaluation or the gate needs a slice that does not exist."""
    able = slice_features(features, targets, config.evaluation.slices)
    outputs = [f"{name}_" for name in targets] if len(targets) > 1 else []
    for bound in ("min", "max"):
        for rule in getattr(config.gate, bound):
            _, feature, value = split_rule(rule, outputs, able)
            classes = features[feature].labels if feature in targets else ()
            if classes and value is not None and value not in classes:
                hint = nearest(value, classes) or f" (the classes are {', '.join(classes[:_SOME])})"
                raise ConfigError(f"gate.{bound}.{rule}: {feature!r} has no class {value!r}{hint}")
            if feature and feature not in able:
                raise ConfigError(
                    f"gate.{bound}.{rule}: there is no slice by "
                    f"{feature!r}{nearest(feature, able)} (sliced by: {', '.join(able)}); add it "
                    "to evaluation.slices"
                )

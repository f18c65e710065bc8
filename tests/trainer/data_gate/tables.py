"""Builds dataset profiles from arrays."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from flotilla.trainer.config.data import DataGateConfig
from flotilla.trainer.config.thresholds import GateConfig
from flotilla.trainer.data_gate.findings import Question
from flotilla.trainer.data_gate.profile import DatasetProfile, split_profile
from flotilla.trainer.data_gate.validate import find_all
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics.accumulator import Accumulator

SHARES = (("train", 0.7), ("validation", 0.1), ("test", 0.2))
CLASSES = ("no", "yes")


def question(dataset, champion=None, gate=None, **config):
    return Question(
        dataset=dataset,
        champion=champion,
        limits=DataGateConfig(**config),
        gate=gate or GateConfig(),
    )


def rules_of(dataset, champion=None, **config):
    return {each.rule for each in find_all(question(dataset, champion, **config))}


def split_of(columns):
    """Divide the rows into train, validation and test, in this order."""
    size = len(columns["label"])
    ends = np.cumsum([round(share * size) for _, share in SHARES])[:-1]
    parts = {name: np.split(np.asarray(column), ends) for name, column in columns.items()}
    return {
        split: {name: part[place] for name, part in parts.items()}
        for place, (split, _) in enumerate(SHARES)
    }


def profile(splits, label="label", classes=CLASSES):
    train = splits["train"]
    inputs = tuple(name for name in train if name != label)
    specs = {
        name: _spec(column, classes if name == label else ()) for name, column in train.items()
    }
    is_class = specs[label].num_classes > 0
    return DatasetProfile(
        uri="file:///d",
        splits={name: _split(columns, specs, inputs, label) for name, columns in splits.items()},
        specs=specs,
        inputs=inputs,
        targets=(label,),
        class_counts={
            label: {
                name: tuple(np.bincount(columns[label], minlength=len(classes)).tolist())
                for name, columns in splits.items()
            }
        }
        if is_class
        else {},
    )


def _spec(column, classes):
    column = np.asarray(column)
    if column.dtype.kind in "UO":
        return FeatureSpec(shape=(), dtype="string", stored="bytes")
    if classes and column.dtype.kind in "iu":
        return FeatureSpec(
            shape=(), dtype="int64", stored="int", num_classes=len(classes), labels=tuple(classes)
        )
    return FeatureSpec(shape=column.shape[1:], dtype=str(column.dtype), stored="raw")


def _split(columns, specs, inputs, label):
    found = Accumulator(specs, inputs, (label,), vocabulary=10_000)
    found.add({name: _stored(column) for name, column in columns.items()})
    return split_profile(found.result(), found.sketch())


def _stored(column):
    if column.dtype.kind not in "UO":
        return column
    return pa.array([str(each).encode() for each in column], pa.large_binary())

"""Datasets of arrays, and what statistics keep of them."""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np

from trainer.config.data_gate import DataGateConfig
from trainer.config.thresholds import GateConfig
from trainer.data.spec import FeatureSpec
from trainer.data_gate.findings import Question
from trainer.data_gate.profile import DatasetProfile, FeatureProfile, SplitProfile
from trainer.data_gate.validate import findings_of

SHARES = (("train", 0.7), ("validation", 0.1), ("test", 0.2))
CLASSES = ("no", "yes")
POINTS = 1000


def question(dataset, champion=None, gate=None, **config):
    """Return the question of a dataset, and of the champion's."""
    return Question(
        dataset=dataset,
        champion=champion,
        limits=DataGateConfig(**config),
        gate=gate or GateConfig(),
    )


def rules_of(dataset, champion=None, **config):
    """Return the rules that find something."""
    return {each.rule for each in findings_of(question(dataset, champion, **config))}


def split_of(columns):
    """Part the rows into train, validation and test, in their order."""
    size = len(columns["label"])
    ends = np.cumsum([round(share * size) for _, share in SHARES])[:-1]
    parts = {name: np.split(np.asarray(column), ends) for name, column in columns.items()}
    return {
        split: {name: part[place] for name, part in parts.items()}
        for place, (split, _) in enumerate(SHARES)
    }


def profile(splits, label="label", classes=CLASSES):
    """Return the profile of columns by split."""
    train = splits["train"]
    inputs = tuple(name for name in train if name != label)
    specs = {
        name: _spec(column, classes if name == label else ()) for name, column in train.items()
    }
    is_class = specs[label].num_classes > 0
    return DatasetProfile(
        uri="file:///d",
        splits={name: _split(columns, inputs, label) for name, columns in splits.items()},
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


def _split(columns, inputs, label):
    size = len(columns[label])
    hashes = Counter(
        int.from_bytes(hashlib.blake2b(row, digest_size=8).digest())
        for row in _rows([columns[name] for name in inputs], size)
    )
    kept = sorted(hashes)
    rng = np.random.default_rng(7)
    chosen = rng.choice(size, min(size, POINTS), replace=False) if size else []
    return SplitProfile(
        examples=size,
        features={name: _feature(column, columns[label], name == label)
                  for name, column in columns.items()},
        hashes=np.array(kept, np.uint64),
        copies=np.array([hashes[each] for each in kept], np.int64),
        sample={name: columns[name][chosen].astype(float) for name in inputs
                if columns[name].dtype.kind in "fiu" and columns[name].ndim == 1},
    )  # fmt: skip


def _rows(columns, size):
    texts = [column.astype("U") if column.dtype.kind == "O" else column for column in columns]
    for place in range(size):
        yield b"|".join(np.ascontiguousarray(column[place]).tobytes() for column in texts)


def _feature(column, label, is_label):
    size = len(column)
    if column.ndim > 1:
        means = column.reshape(size, -1).mean(axis=1)
        numbers = _numbers(means, size)
        association = {} if is_label else {"label": _ratio(means, label)}
        return FeatureProfile(kind="tensor", examples=size, association=association, **numbers)
    if column.dtype.kind in "UO":
        there = column[column != ""]
        counts = dict(Counter(there.tolist()).most_common(10_000))
        return FeatureProfile(
            kind="text", examples=size, missing=size - len(there), counts=counts,
            distinct=len(set(there.tolist())), association={"label": _cramer(column, label)},
        )  # fmt: skip
    there = column[~np.isnan(column)] if column.dtype.kind == "f" else column
    kept = (
        column
        if column.dtype.kind != "f"
        else np.nan_to_num(column, nan=np.nanmean(column) if len(there) else 0)
    )
    association = {} if is_label else {"label": _ratio(kept, label)}
    kind = "class" if is_label and column.dtype.kind in "iu" else "number"
    return FeatureProfile(
        kind=kind, missing=size - len(there), examples=size, association=association,
        **_numbers(there, size),
    )  # fmt: skip


def _numbers(values, _size):
    values = np.sort(np.asarray(values, float))
    if not len(values):
        return {}
    steps = (np.arange(min(len(values), POINTS)) + 0.5) / min(len(values), POINTS)
    return {
        "mean": float(values.mean()), "std": float(values.std()), "least": float(values[0]),
        "most": float(values[-1]), "distinct": len(np.unique(values)),
        "quantiles": values[np.minimum((steps * len(values)).astype(int), len(values) - 1)],
    }  # fmt: skip


def _ratio(values, label):
    """Return the correlation ratio with classes, or the correlation with a number."""
    values = np.asarray(values, float)
    if label.dtype.kind == "f":
        flat = values.std() == 0 or label.std() == 0
        return 0.0 if flat else abs(float(np.corrcoef(values, label)[0, 1]))
    whole = np.sum((values - values.mean()) ** 2)
    between = sum(
        np.sum(label == each) * (values[label == each].mean() - values.mean()) ** 2
        for each in np.unique(label)
    )
    return float(np.sqrt(between / whole)) if whole else 0.0


def _cramer(values, label):
    if label.dtype.kind == "f":
        return 0.0
    names, codes = np.unique(values, return_inverse=True)
    kinds, marks = np.unique(label, return_inverse=True)
    if len(names) < 2 or len(kinds) < 2:
        return 0.0
    table = np.zeros((len(names), len(kinds)))
    np.add.at(table, (codes, marks), 1)
    expected = np.outer(table.sum(axis=1), table.sum(axis=0)) / table.sum()
    statistic = np.sum((table - expected) ** 2 / expected)
    return float(np.sqrt(statistic / table.sum() / (min(table.shape) - 1)))

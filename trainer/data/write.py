"""Read a prepared TFDS dataset in batches and write its examples into shards."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tensorflow_datasets as tfds
from numpy.typing import NDArray

from trainer.data.examples import batches
from trainer.data.features import Selection
from trainer.data.records import encode
from trainer.data.shards import ShardWriter
from trainer.data.spec import SPLITS
from trainer.data.splits import Plan
from trainer.errors import UserError

# More than any list of classes; beyond it an integer "label" is a quantity.
MOST_CLASSES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Written:
    """What stands in the shards: examples of each shard, and of each class, by split."""

    examples: Mapping[str, list[int]]
    label_counts: Mapping[str, list[int]]
    num_classes: int
    fingerprint: str


def write(
    name: str,
    source: tfds.core.DatasetBuilder,
    selection: Selection,
    plan: Plan,
    folder: Path,
) -> Written:
    """Write the shards of all splits into `folder`.

    Examples stand in the order of the source, which TFDS has shuffled when it wrote it.

    Raises:
        UserError: an example has no label, or the source cannot be read.
    """
    writers = {split: ShardWriter(folder, split, count) for split, count in plan.shards.items()}
    labels: dict[str, list[NDArray[np.int64]]] = {split: [] for split in writers}
    for origin, targets in plan.targets.items():
        start = 0
        for batch in batches(name, source, selection, origin):
            values = batch[selection.label].astype(np.int64)
            _refuse_without_label(name, origin, selection.label, values)
            chosen = targets[start : start + len(values)]
            start += len(values)
            for target, record in zip(chosen, encode(selection.specs, batch), strict=True):
                writers[SPLITS[target]].add(record)
            for split in writers:
                labels[split].append(values[chosen == SPLITS.index(split)])
    for writer in writers.values():
        writer.flush()
    counts = _label_counts(labels, selection.num_classes)
    return Written(
        examples={split: writer.examples for split, writer in writers.items()},
        label_counts=counts,
        num_classes=len(counts["train"]),
        fingerprint=_fingerprint(writers),
    )


def _refuse_without_label(name: str, split: str, label: str, values: NDArray[np.int64]) -> None:
    if values.min() < 0:
        raise UserError(
            f"data.dataset: the split {split!r} of {name} has examples without a label "
            f"({label!r} is {values.min()}); write your own builder "
            "(data.dataset: package.module:Builder) that leaves them out"
        )
    if values.max() >= MOST_CLASSES:
        raise UserError(
            f"data.dataset: {label!r} of {name} is as large as {values.max()}, which is no class; "
            "write your own builder (data.dataset: package.module:Builder) with a ClassLabel"
        )


def _label_counts(
    labels: Mapping[str, list[NDArray[np.int64]]], num_classes: int
) -> dict[str, list[int]]:
    counts = {split: np.bincount(np.concatenate(values)) for split, values in labels.items()}
    length = max(num_classes, *(len(count) for count in counts.values()))
    return {
        split: np.pad(count, (0, length - len(count))).tolist() for split, count in counts.items()
    }


def _fingerprint(writers: Mapping[str, ShardWriter]) -> str:
    crcs = {split: writer.crcs for split, writer in writers.items()}
    return hashlib.sha256(json.dumps(crcs, sort_keys=True).encode()).hexdigest()

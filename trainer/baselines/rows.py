"""Reads random rows of a split as arrays, with limits on their number and size."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.data import blocks
from flotilla.trainer.data.read import complete_features, read_rows
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.tasks.base import Array, Floats

SPLIT = "train"
#: Maximum length of a text in bytes. Longer texts are truncated.
TEXT_BYTES = 2000
# Maximum sizes of the fetched shards, and of the records drawn from them, in bytes.
_MOST_BYTES, _MOST_READ = 256 << 20, 128 << 20
# Number of records to fetch for each drawn record.
_SLACK = 4
_AT_ONCE, _BYTES_AT_ONCE = 4096, 32 << 20


class NoBaselineError(Exception):
    """A baseline cannot be fitted or used. The message is the reason."""


class Clock:
    """A countdown of the time that is left for the baselines."""

    def __init__(self, seconds: float) -> None:
        """Start a countdown of `seconds`."""
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """The remaining seconds, or a negative number after the end."""
        return self._end - time.monotonic()

    def share(self, of: float) -> Clock:
        """Return a clock that ends after the fraction `of` of the remaining time."""
        return Clock(self.left * of)

    def check(self) -> None:
        """Raise `NoBaselineError` if no time is left."""
        if self.left <= 0:
            raise NoBaselineError("the time limit was reached")


@dataclass(frozen=True)
class Rows:
    """Some examples: features keyed by name, the task's labels, and weights [n]."""

    columns: Mapping[str, Array]
    labels: Any
    weights: Floats

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.weights)

    def select(self, places: Any) -> Rows:
        """Return the rows that a slice or a mask selects."""
        values = dict(self.columns), self.labels, self.weights
        return Rows(*tf.nest.map_structure(lambda each: each[places], values))

    def first(self, most: int) -> Rows:
        """Return the first `most` rows, or all rows if there are fewer."""
        return self if self.count <= most else self.select(slice(most))


@dataclass(frozen=True, kw_only=True)
class Splits:
    """The shards of a dataset, and a local folder to download them to."""

    spec: DatasetSpec
    uri: str
    scratch: Path


def training_rows(splits: Splits, names: Sequence[str], most: int, clock: Clock) -> Rows:
    """Return up to `most` training examples, drawn uniformly. Examples of weight 0 are dropped.

    Only the first shards are read, because they are a random sample of all examples.

    Raises:
        NoBaselineError: the first shard is too large, all weights are 0, or time ran out.
    """
    spec, manifest = splits.spec, storage.read_manifest(splits.uri)
    sizes = {entry.path: entry.bytes for entry in manifest.files}
    files, examples, size = list[str](), 0, 0
    for name, count in zip(spec.files(SPLIT), spec.shards[SPLIT], strict=True):
        if examples >= _SLACK * most or size + sizes[name] > _MOST_BYTES:
            break
        files.append(name)
        examples, size = examples + count, size + sizes[name]
    if not examples:
        raise NoBaselineError(f"the first training shard exceeds {_MOST_BYTES >> 20} MiB")
    folder = splits.scratch / SPLIT
    storage.fetch(splits.uri, folder, only=set(files).__contains__, manifest=manifest)
    most = min(most, _MOST_READ * examples // size)
    drawn = np.zeros(examples, np.bool_)
    chosen = np.random.default_rng(0).choice(examples, min(most, examples), replace=False)
    drawn[chosen] = True
    parts = []
    for rows in batches(spec, [folder / name for name in files], names, drawn):
        clock.check()
        parts.append(rows.select(rows.weights > 0))
    found = _concatenate(parts)
    if not found.count:
        raise NoBaselineError("the weights of all training examples are 0")
    return found


def batches(
    spec: DatasetSpec, files: Sequence[Path], names: Sequence[str], drawn: Array
) -> Iterator[Rows]:
    """Yield batches of the rows that the mask `drawn` selects, with the features in `names`."""
    roles = [*dict.fromkeys(filter(None, [*names, *spec.targets, spec.weight]))]
    marks = tf.constant(drawn)

    def draw(rows: blocks.Rows, before: tf.Tensor) -> blocks.Rows:
        mine = marks[before : before + blocks.count_rows(rows)]
        return blocks.gather_rows(rows, tf.where(mine)[:, 0])

    read = blocks.number_windows(read_rows(spec, files, roles)).map(draw)
    size = sum(path.stat().st_size for path in files) // len(drawn)
    at_once = max(1, min(_AT_ONCE, _BYTES_AT_ONCE // max(size, 1)))

    def complete(rows: blocks.Rows) -> dict[str, tf.Tensor]:
        found = complete_features(spec, roles, rows)
        return {
            name: tf.strings.substr(each, 0, TEXT_BYTES) if each.dtype == tf.string else each
            for name, each in found.items()
        }

    for values in read.rebatch(at_once).map(complete).as_numpy_iterator():
        labels = {name: values[name] for name in spec.targets}
        count = len(next(iter(labels.values())))
        weights = values[spec.weight] if spec.weight else np.ones(count)
        yield Rows(
            columns={name: values[name] for name in names},
            labels=labels if len(labels) > 1 else labels[spec.targets[0]],
            weights=weights.astype(np.float64).reshape(count),
        )


def _concatenate(parts: Sequence[Rows]) -> Rows:
    values = ((dict(part.columns), part.labels, part.weights) for part in parts)
    return Rows(*tf.nest.map_structure(lambda *each: np.concatenate(each), *values))

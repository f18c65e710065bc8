"""Compares reading a table for training in blocks with reading one record per row.

`python -m benchmarks.reading WHICH FOLDER BATCH` reads several epochs in its own process.
Single-row records are read as in TensorFlow's guides: shuffled, batched, and then parsed per batch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.comparisons import Comparison, alternating
from flotilla.trainer.data.preparation.shards import write_shards
from flotilla.trainer.data.read import training_batches
from flotilla.trainer.features.dataset_spec import DatasetSpec, shard_name
from flotilla.trainer.features.feature_spec import FeatureSpec

# With this many rows, the reader does not keep them in memory, because it assumes long texts.
EXAMPLES, SHARDS, EPOCHS, ROUNDS = 400_000, 8, 3, 3
BATCHES = (100, 1000)
BLOCKS, RECORDS = "blocks", "records"
_HELD = 200_000
FEATURES = {
    **{f"x{n}": FeatureSpec(shape=(), dtype="float32", stored="float") for n in range(4)},
    **{f"n{n}": FeatureSpec(shape=(), dtype="int64", stored="int") for n in range(2)},
    "kind": FeatureSpec(shape=(), dtype="string", stored="bytes"),
    "label": FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=2),
}
SPEC = DatasetSpec(
    features=FEATURES,
    inputs=tuple(name for name in FEATURES if name != "label"),
    targets=("label",),
    shards={"train": (EXAMPLES // SHARDS,) * SHARDS},
)


def table_input() -> list[Comparison]:
    """Compare the rows of a table read per CPU second, in the first epoch and in later ones."""
    return [
        Comparison(
            name=f"reading a table in batches of {size}, {when}: rows per CPU second, compared "
            "with one record per row",
            rounds=tuple(own[index] / other[index] for own, other in _rounds(size)),
            at_least=4,
            more={
                "rows_per_processor_second": [
                    [round(own[index]), round(other[index])] for own, other in _rounds(size)
                ]
            },
        )
        for size in BATCHES
        for index, when in enumerate(("first epoch", "later epochs"))
    ]


@cache
def _rounds(size: int) -> list[tuple[list[float], list[float]]]:
    with tempfile.TemporaryDirectory(prefix="flotilla-bench-") as name:
        folder = Path(name)
        _write(folder)

        def measured(which: str) -> list[float]:
            command = [sys.executable, "-m", "benchmarks.reading", which, name, str(size)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found: list[float] = json.loads(done.stdout.splitlines()[-1])
            return found

        return alternating(ROUNDS, lambda: measured(BLOCKS), lambda: measured(RECORDS))


def _write(folder: Path) -> None:
    draw = np.random.default_rng(0)
    kinds = np.array([f"category {number}".encode() for number in range(50)], object)
    columns: dict[str, Any] = {
        **{f"x{n}": draw.random(EXAMPLES, np.float32) for n in range(4)},
        **{f"n{n}": draw.integers(0, 1000, EXAMPLES) for n in range(2)},
        "kind": kinds[draw.integers(0, len(kinds), EXAMPLES)],
        "label": draw.integers(0, 2, EXAMPLES),
    }
    for form in (BLOCKS, RECORDS):
        (folder / form).mkdir()
    write_shards(folder / BLOCKS, "train", FEATURES, columns, count=SHARDS)
    for shard in range(SHARDS):
        path = folder / RECORDS / shard_name("train", shard, SHARDS)
        mine = {name: values[shard::SHARDS].tolist() for name, values in columns.items()}
        with tf.io.TFRecordWriter(str(path)) as writer:
            for row in zip(*mine.values(), strict=True):
                writer.write(_record(dict(zip(mine, row, strict=True))))


def _record(row: dict[str, Any]) -> bytes:
    lists = {
        "float": lambda value: tf.train.Feature(float_list=tf.train.FloatList(value=[value])),
        "int": lambda value: tf.train.Feature(int64_list=tf.train.Int64List(value=[value])),
        "bytes": lambda value: tf.train.Feature(bytes_list=tf.train.BytesList(value=[value])),
    }
    features = {name: lists[FEATURES[name].stored](value) for name, value in row.items()}
    example = tf.train.Example(features=tf.train.Features(feature=features))
    return bytes(example.SerializeToString())


def _records_of_rows(files: list[str], size: int) -> tf.data.Dataset:
    wire = {
        name: tf.io.FixedLenFeature((), tf.as_dtype(each.dtype)) for name, each in FEATURES.items()
    }

    def parse(batch: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        values = tf.io.parse_example(batch, wire)
        return values, values.pop("label")

    names = tf.data.Dataset.from_tensor_slices(files).shuffle(len(files), seed=0)
    rows = names.interleave(tf.data.TFRecordDataset, cycle_length=SHARDS, block_length=16)
    batches = rows.shuffle(_HELD, seed=0).repeat().batch(size, drop_remainder=True)
    return batches.map(parse).prefetch(2)


def measure(batches: tf.data.Dataset, size: int) -> list[float]:
    """Read epochs in a graph, and return rows per CPU second in the first and in later epochs."""

    def taken(iterator: Any, count: tf.Tensor) -> tf.Tensor:
        labels = tf.constant(0, tf.int64)
        for _ in tf.range(count):
            labels += tf.reduce_sum(next(iterator)[1])
        return labels

    iterator, count = iter(batches), tf.constant(EXAMPLES // size)
    epoch = tf.function(taken).get_concrete_function(iterator, count)
    found = []
    for _ in range(EPOCHS):
        began = sum(os.times()[:2])
        epoch(iterator, count)
        found.append(EXAMPLES / (sum(os.times()[:2]) - began))
    return [found[0], median(found[1:])]


def main() -> None:
    """Read one form of the table, and print its speeds as JSON."""
    which, folder, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    files = [str(folder / which / name) for name in SPEC.files("train")]
    if which == BLOCKS:
        batches = training_batches(SPEC, files, batch_size=size, seed=0)
    else:
        batches = _records_of_rows(files, size)
    sys.stdout.write(f"{json.dumps(measure(batches, size))}\n")


if __name__ == "__main__":
    main()

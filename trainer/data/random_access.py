"""Random access to the training split, for `data.partition: dynamic`.

`make_random_access` returns two graphs, which run in a worker process without our Python code:
`held` is the state that a worker keeps between batches, `read` makes a batch from example numbers.
A small split is held parsed in memory. For a larger one the state holds record positions, which
`write_index` finds, and runs of records are read from the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from flotilla.trainer.data.read import fits_in_memory, read_whole_split, to_keras_batch
from flotilla.trainer.data.tfrecords import places
from flotilla.trainer.features.dataset_spec import DatasetSpec

# Consecutive records per read, from a split that is not held in memory.
RUN = 8
INDEX_FILE = "examples.index"
# Fields of a row of the index.
_FILE, _OFFSET = range(2)
_READ_AHEAD = 64 << 10
_AT_ONCE = 4


def write_index(paths: Sequence[Path]) -> None:
    """Write the position of each record next to the shards, which have been verified."""
    rows = []
    for number, path in enumerate(paths):
        with path.open("rb") as file:
            rows.append(np.array([[number, at] for at in places(file)[:-1]]).reshape(-1, 2))
    index = np.concatenate(rows).astype("<i8")
    (paths[0].parent / INDEX_FILE).write_bytes(index.tobytes())


@dataclass(frozen=True, kw_only=True)
class ByNumber:
    """Graphs by which a worker reads examples by number.

    Attributes:
        held: the worker's state: a dataset of one element.
        read: maps that element and a vector of numbers to a batch of these examples.
        run: the number of consecutive examples that is efficient to read together.
    """

    held: Callable[[], tf.data.Dataset]
    read: Callable[[Any, tf.Tensor], Any]
    run: int


def make_random_access(
    spec: DatasetSpec, folder: str, *, in_memory: bool | None = None
) -> ByNumber:
    """Return the graphs for the training split in `folder`, which is resolved on the worker."""
    files = [f"{folder}/{name}" for name in spec.files("train")]
    if fits_in_memory(spec) if in_memory is None else in_memory:
        return ByNumber(held=lambda: read_whole_split(spec, files), read=_gather, run=1)

    def read(index: tf.Tensor, numbers: tf.Tensor) -> Any:
        return to_keras_batch(spec, _records(files, index, numbers))

    return ByNumber(held=lambda: _index(f"{folder}/{INDEX_FILE}"), read=read, run=RUN)


def _gather(examples: Any, numbers: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda values: tf.gather(values, numbers), examples)


def _index(path: str) -> tf.data.Dataset:
    def rows(file: tf.Tensor) -> tf.Tensor:
        return tf.reshape(tf.io.decode_raw(tf.io.read_file(file), tf.int64), (-1, 2))

    return tf.data.Dataset.from_tensors(path).map(rows)


def _records(files: Sequence[str], index: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """Return records by their numbers; consecutive ones of a file are read together."""
    places = tf.gather(index, numbers)
    count = tf.size(numbers, tf.int64)
    in_turn = (numbers[1:] == numbers[:-1] + 1) & (places[1:, _FILE] == places[:-1, _FILE])
    begins = tf.concat([[0], tf.where(~in_turn)[:, 0] + 1], 0)
    lengths = tf.concat([begins[1:], [count]], 0) - begins
    firsts = tf.gather(places, begins)
    names = tf.gather(tf.constant(list(files)), firsts[:, _FILE])

    def run(name: tf.Tensor, offset: tf.Tensor, length: tf.Tensor) -> tf.data.Dataset:
        variant = tf.raw_ops.TFRecordDatasetV2(
            filenames=[name], compression_type="", buffer_size=_READ_AHEAD, byte_offsets=[offset]
        )
        records = tf.data.experimental.from_variant(variant, tf.TensorSpec([], tf.string))
        return records.take(length)

    runs = tf.data.Dataset.from_tensor_slices((names, firsts[:, _OFFSET], lengths))
    records = runs.interleave(
        run, cycle_length=_AT_ONCE, block_length=RUN, num_parallel_calls=_AT_ONCE
    )
    return records.batch(count).get_single_element()

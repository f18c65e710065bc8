"""Random access to the training split, for `data.partition: dynamic`.

`make_random_access` returns two graphs, which run in a worker process without Python code of this
package. `held` makes the state that a worker keeps between batches. `read` makes a batch from
example numbers. A small split is parsed and kept in memory. For a larger split, the state is the
block offsets from `write_index`, and the blocks of a batch are read from the files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import tensorflow as tf

from flotilla.trainer.data.blocks import Rows, gather_rows, parse_blocks
from flotilla.trainer.data.read import fits_in_memory, read_whole_split, to_keras_batch
from flotilla.trainer.data.shards.block_index import INDEX_FILE, OFFSET, decode_index, read_blocks
from flotilla.trainer.features.dataset_spec import DatasetSpec

# Minimum number of consecutive examples per read, if the split is not held in memory.
RUN = 8
# Runs per block. With shorter runs, a batch parses more blocks. With longer runs, rows mix less.
_RUNS = 8
_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class ByNumber:
    """Graphs with which a worker reads examples by number.

    `held` returns a dataset of one element, which is the worker's state. `read` maps this element
    and a vector of example numbers to a batch. Reading is fastest in runs of `run` consecutive
    examples.
    """

    held: Callable[[], tf.data.Dataset]
    read: Callable[[Any, tf.Tensor], Any]
    run: int


def make_random_access(
    spec: DatasetSpec, folder: str, *, in_memory: bool | None = None
) -> ByNumber:
    """Return the graphs for the training split in `folder`, a path on the worker."""
    files = [f"{folder}/{name}" for name in spec.files("train")]
    if fits_in_memory(spec) if in_memory is None else in_memory:
        return ByNumber(held=lambda: read_whole_split(spec, files), read=_gather, run=1)

    def held() -> tf.data.Dataset:
        path = tf.data.Dataset.from_tensors(f"{folder}/{INDEX_FILE}")
        return path.map(lambda path: decode_index(tf.io.read_file(path)))

    def read(index: tf.Tensor, numbers: tf.Tensor) -> Any:
        return to_keras_batch(spec, _read_rows(spec, files, index, numbers))

    run = max(RUN, spec.block_rows // _RUNS)
    return ByNumber(held=held, read=read, run=run)


def _gather(examples: Any, numbers: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda values: tf.gather(values, numbers), examples)


def _read_rows(
    spec: DatasetSpec, files: Sequence[str], index: tf.Tensor, numbers: tf.Tensor
) -> Rows:
    shards, size = spec.shards["train"], spec.block_rows
    ends = tf.constant([*accumulate(shards, initial=0)], tf.int64)
    block_ends = tf.constant(
        [*accumulate((-(-rows // size) for rows in shards), initial=0)], tf.int64
    )
    shard = tf.searchsorted(ends, numbers, side="right") - 1
    within = numbers - tf.gather(ends, shard)
    block, place = tf.unique(tf.gather(block_ends, shard) + within // size, tf.int64)
    of = tf.searchsorted(block_ends, block, side="right") - 1
    before = (block - tf.gather(block_ends, of)) * size
    rows = tf.minimum(tf.gather(tf.constant(shards, tf.int64), of) - before, size)
    read = _read_blocks(tf.gather(tf.constant(list(files)), of), tf.gather(index[:, OFFSET], block))
    found = parse_blocks({name: spec.features[name] for name in spec.roles}, read)
    first = tf.cumsum(rows, exclusive=True)
    return gather_rows(found, tf.gather(first, place) + within % size)


def _read_blocks(names: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    def read(name: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
        return read_blocks(name, offset).take(1).get_single_element()

    found = tf.data.Dataset.from_tensor_slices((names, offsets))
    found = found.map(read, num_parallel_calls=_AT_ONCE)
    return found.batch(tf.size(offsets, tf.int64)).get_single_element()

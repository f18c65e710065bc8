"""How often ids have come that have no row yet, in a sieve of a fixed size.

Four cells count each id, which is as frequent as the smallest one says (Cormode and Muthukrishnan
2005, "An Improved Data Stream Summary: The Count-Min Sketch"). No cell is raised above the count of
its id (Estan and Varghese 2002, "New Directions in Traffic Measurement and Accounting"). When they
hold too many ids, all are halved (Einziger et al. 2017, "TinyLFU"), but not before each id of
lookups like the largest one could come often enough.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.config.model import MOST_COUNTED

# There is a block of cells for each slot of a shard, and at least so many. An id is counted by some
# cells of one block. All are halved when they hold more than so many ids for each block.
CELLS, CELLS_OF_ID, FEWEST_BLOCKS, WINDOW = 32, 4, 256, 4


class Sieve:
    """The cells of a shard, in a graph that has the shard to itself."""

    def __init__(self, seen: tf.Variable, window: tf.Variable, min_count: int) -> None:
        """Count in `seen` [blocks, CELLS].

        Args:
            seen: uint8.
            window: int64 [2], of the ids that were counted since all were halved, and of those of
                the largest lookup.
            min_count: how often an id has to come.
        """
        self._seen, self._window, self._min_count = seen, window, min_count

    def count(
        self, keys: tf.Tensor, counts: tf.Tensor, sieved: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Count ids; return which have come often enough, and by how many the sieve holds more.

        Args:
            keys: int64 [n], each once.
            counts: how often each of them came, [n].
            sieved: how many ids the sieve holds.
        """
        seen, window = self._seen, self._window
        blocks = int(seen.shape[0])
        block, own = hash_keys(keys + 1, blocks), _cells_of(keys)
        least = tf.bitwise.bitwise_or(tf.gather(seen, block), tf.bitwise.invert(own))
        counts = tf.cast(counts, tf.int64)
        times = tf.cast(tf.reduce_min(least, axis=1), tf.int64) + counts
        raised = tf.cast(tf.minimum(times, MOST_COUNTED), tf.uint8)[:, tf.newaxis]
        seen.scatter_max(tf.IndexedSlices(tf.bitwise.bitwise_and(own, raised), block))
        new = tf.math.count_nonzero(tf.equal(times, counts))
        now = tf.reduce_sum(counts)
        counted, largest = tf.unstack(window.read_value())
        counted, largest = counted + now, tf.maximum(largest, now)
        full = (sieved + new > WINDOW * blocks) & (counted > self._min_count * largest)

        def halve() -> tf.Tensor:
            half = tf.bitwise.right_shift(seen.read_value(), np.uint8(1))
            # In one byte for each block: there may be gigabytes of cells.
            held = tf.reduce_sum(tf.minimum(half, np.uint8(1)), axis=1)
            left = tf.reduce_sum(tf.cast(held, tf.int64)) // CELLS_OF_ID
            # A larger lookup may come again, and is forgotten as ids are.
            begun = window.assign(tf.stack([tf.zeros_like(largest), largest // 2]))
            with tf.control_dependencies([seen.assign(half, read_value=True), begun]):
                return left - sieved

        def go_on() -> tf.Tensor:
            with tf.control_dependencies([window.assign(tf.stack([counted, largest]))]):
                return tf.identity(new)

        with tf.control_dependencies([times]):
            change = tf.cond(full, halve, go_on)
        return times >= self._min_count, change


def size_sketch(capacity: int) -> tuple[int, int]:
    """Return how many blocks the sieve of so many slots has, and cells of a block."""
    return max(FEWEST_BLOCKS, capacity), CELLS


def _cells_of(keys: tf.Tensor) -> tf.Tensor:
    """Return which cells of a block count each key [n]: all bits of these are set [n, CELLS].

    One in each of the equal parts of a block, so that no two are the same.
    """
    part = CELLS // CELLS_OF_ID
    bits = part.bit_length() - 1
    drawn = hash_keys(keys + 2**40, CELLS**CELLS_OF_ID)[:, tf.newaxis]
    shifted = tf.bitwise.right_shift(drawn, np.arange(CELLS_OF_ID) * bits)
    places = tf.bitwise.bitwise_and(shifted, np.int64(part - 1))
    chosen = tf.one_hot(places, part, on_value=np.uint8(255), off_value=np.uint8(0))
    return tf.reshape(chosen, [-1, CELLS])


def hash_keys(keys: Any, below: int) -> Any:
    """Return a number from 0 to `below - 1` for each key [n], alike on every machine.

    Neighbours are as far apart as any (the finalizer of Steele et al. 2014, "Fast Splittable
    Pseudorandom Number Generators").
    """
    ops = keras.ops
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # Without its sign; a product that is too large has its last 64 bits.
        shifted = ops.bitwise_and(ops.right_shift(keys, _long(shift)), _long((1 << 64 - shift) - 1))
        keys = ops.bitwise_xor(keys, shifted) * _long(factor)
    shifted = ops.bitwise_and(ops.right_shift(keys, _long(33)), _long(2**31 - 1))
    return ops.mod(shifted, _long(below))


def _long(value: int) -> Any:
    # Of one axis: a file of Keras has a scalar as a number of Python, which these do not take.
    return np.array([value], np.uint64).astype(np.int64)

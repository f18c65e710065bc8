"""Hashes of ids and texts, and a count-min sketch of ids without a row.

The sketch has a fixed size, and counts how often an id without a row has occurred.

Four cells count each id, and the count is the smallest of the four (Cormode and Muthukrishnan 2005,
"An Improved Data Stream Summary: The Count-Min Sketch"). No cell is raised above the count of the
id that is being counted (Estan and Varghese 2002, "New Directions in Traffic Measurement and
Accounting"). If the sketch holds too many ids, all cells are halved (Einziger et al. 2017,
"TinyLFU"), but not before an id that occurs in every lookup could reach the minimum count.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.config.model import MOST_COUNTED

#: Number of different fingerprints. A fingerprint is a FarmHash or SipHash value modulo this
#: number. Both hashes are the same on every machine and in every version.
FINGERPRINTS = 2**63 - 1
# Unicode white space as in Arrow and Python: separators and some control characters.
_SPACE = r"[\t-\r\x1c-\x20\x{85}\pZ]"


def strip_spaces(texts: tf.Tensor) -> tf.Tensor:
    """Strip surrounding white space from each string, as file readers do."""
    return tf.strings.regex_replace(texts, rf"^{_SPACE}+|{_SPACE}+$", "")


# In this order: the cells in a block, the cells that count one id, the minimum number of blocks (a
# larger shard has one per slot), and the ids per block above which all cells may be halved.
CELLS, CELLS_OF_ID, FEWEST_BLOCKS, WINDOW = 32, 4, 256, 4


def count_ids(  # noqa: PLR0913
    keys: tf.Tensor, counts: tf.Tensor, sieved: tf.Tensor, *, seen: Any, window: Any, min_count: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Count ids in the sketch of a shard, to which the caller has exclusive access.

    `keys` are the ids [n], and `counts` says how often each of them occurs [n]. The variables of
    the sketch are the cells `seen`, uint8 [blocks, CELLS], and `window`, int64 [2]: the number of
    ids counted since the last halving, and the largest number counted in one lookup. Halving the
    cells also halves this maximum. `sieved` is the number of ids in the sketch.

    Return which ids have occurred `min_count` times [n], and the change in `sieved`.
    """
    blocks = int(seen.shape[0])
    block, own = hash_keys(keys + 1, blocks), _select_cells(keys)
    least = tf.bitwise.bitwise_or(tf.gather(seen, block), tf.bitwise.invert(own))
    counts = tf.cast(counts, tf.int64)
    times = tf.cast(tf.reduce_min(least, axis=1), tf.int64) + counts
    raised = tf.cast(tf.minimum(times, MOST_COUNTED), tf.uint8)[:, tf.newaxis]
    seen.scatter_max(tf.IndexedSlices(tf.bitwise.bitwise_and(own, raised), block))
    new = tf.math.count_nonzero(tf.equal(times, counts))
    now = tf.reduce_sum(counts)
    counted, largest = tf.unstack(window.read_value())
    counted, largest = counted + now, tf.maximum(largest, now)
    full = (sieved + new > WINDOW * blocks) & (counted > min_count * largest)

    def halve() -> tf.Tensor:
        half = tf.bitwise.right_shift(seen.read_value(), np.uint8(1))
        # Sum in uint8, with one byte per block, because the cells may take gigabytes.
        held = tf.reduce_sum(tf.minimum(half, np.uint8(1)), axis=1)
        left = tf.reduce_sum(tf.cast(held, tf.int64)) // CELLS_OF_ID
        # Lookups of the largest size may occur again, so halve this size, like the counts,
        # instead of resetting it.
        begun = window.assign(tf.stack([tf.zeros_like(largest), largest // 2]))
        with tf.control_dependencies([seen.assign(half, read_value=True), begun]):
            return left - sieved

    def keep() -> tf.Tensor:
        with tf.control_dependencies([window.assign(tf.stack([counted, largest]))]):
            return tf.identity(new)

    with tf.control_dependencies([times]):
        change = tf.cond(full, halve, keep)
    return times >= min_count, change


def _select_cells(keys: tf.Tensor) -> tf.Tensor:
    """Return the cells of a block that count each key [n], as bytes with all bits set [n, CELLS].

    The cells of a key are in different parts of the block, so they are all different.
    """
    part = CELLS // CELLS_OF_ID
    bits = part.bit_length() - 1
    drawn = hash_keys(keys + 2**40, CELLS**CELLS_OF_ID)[:, tf.newaxis]
    shifted = tf.bitwise.right_shift(drawn, np.arange(CELLS_OF_ID) * bits)
    places = tf.bitwise.bitwise_and(shifted, np.int64(part - 1))
    chosen = tf.one_hot(places, part, on_value=np.uint8(255), off_value=np.uint8(0))
    return tf.reshape(chosen, [-1, CELLS])


def hash_keys(keys: Any, below: int) -> Any:
    """Return a number from 0 to `below - 1` for each key [n]. It is the same on every machine.

    Similar keys get unrelated numbers (the finalizer of Steele et al. 2014, "Fast Splittable
    Pseudorandom Number Generators").
    """
    ops = keras.ops
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        # The mask makes this a logical shift. A product that overflows keeps its low 64 bits.
        shifted = ops.bitwise_and(ops.right_shift(keys, _long(shift)), _long((1 << 64 - shift) - 1))
        keys = ops.bitwise_xor(keys, shifted) * _long(factor)
    shifted = ops.bitwise_and(ops.right_shift(keys, _long(33)), _long(2**31 - 1))
    return ops.mod(shifted, _long(below))


def _long(value: int) -> Any:
    # The array has an axis, because Keras turns a scalar into a Python number, which these
    # operations do not accept.
    return np.array([value], np.uint64).astype(np.int64)

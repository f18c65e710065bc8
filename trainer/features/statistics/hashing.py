"""A keyed 64-bit hash of examples that depends only on their content.

The hash does not depend on how a column is stored. A single large value turns a column into
float64, a single missing value turns integers into floats, and a new class shifts the indices of
the others. Digests of columns are computed without the key, so that hashes with different keys can
share them. A repeated text is digested only once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

_EXACT = 2.0**53
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# Number of leading values that are checked for repetition, and the maximum share of distinct values
# among them. A column with 5,000 equally frequent values has about 1,680 of them (82%) among the
# first 2,048.
_HEAD, _DISTINCT = 2048, 0.9


def hashes(columns: Mapping[str, Any], seed: int) -> NDArray[np.uint64]:
    """Return a keyed 64-bit hash of each example. The order of the columns does not matter."""
    return combine({name: digest(values) for name, values in columns.items()}, seed)


def combine(digests: Mapping[str, NDArray[np.uint64]], seed: int) -> NDArray[np.uint64]:
    """Return the hash of each example from the digests of its columns."""
    total: NDArray[np.uint64] | None = None
    for name, found in digests.items():
        mixed = _mix(found ^ _key(name, seed))
        total = mixed if total is None else total + mixed
    assert total is not None
    return _mix(total ^ _key("", seed))


def digest(values: Any) -> NDArray[np.uint64]:
    """Return a 64-bit digest of each value of an array of numbers, or of an Arrow array."""
    if isinstance(values, np.ndarray):
        if values.dtype != np.uint8 or values.ndim == 1:
            return _numbers(values)
        starts = np.arange(len(values) + 1) * values[:1].nbytes
        return _digest_bytes(memoryview(values.tobytes()), starts)
    if pa.types.is_dictionary(values.type):
        places: NDArray[np.intp] = values.indices.to_numpy()
        texts = map(_digest_text, values.dictionary.to_pylist())
        return np.frombuffer(b"".join(texts), "<u8")[places]
    if pa.types.is_large_list(values.type):
        return _digest_lists(values)
    if values_repeat(values):
        return digest(values.dictionary_encode())
    starts = np.frombuffer(values.buffers()[1], np.int64)[values.offset :][: len(values) + 1]
    return _digest_bytes(memoryview(values.buffers()[2] or b""), starts)


def values_repeat(array: pa.Array) -> bool:
    """Return whether values repeat so often that it is faster to encode them as a dictionary."""
    head = array[:_HEAD]
    return len(head) < len(array) and len(head.unique()) <= _DISTINCT * len(head)


def comparable_content(values: Any, labels: Sequence[str] = ()) -> Any:
    """Convert a column so that equal content has equal digests, however it is stored.

    Class indices become their `labels`. Fractions are rounded to float32.
    """
    if not isinstance(values, np.ndarray):
        return values
    if labels and values.dtype.kind in "iu":
        names = pa.array([*(each.encode() for each in labels), b""], pa.large_binary())
        known = np.where((values >= 0) & (values < len(labels)), values, len(labels))
        return pa.DictionaryArray.from_arrays(known.astype(np.int64), names)
    if values.dtype != np.float64:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32).astype(np.float64)
    return np.where((values == np.floor(values)) | np.isinf(narrow), values, narrow)


def _digest_lists(array: pa.Array) -> NDArray[np.uint64]:
    starts = array.offsets.to_numpy() - array.offsets[0].as_py()
    flat = array.flatten()
    if pa.types.is_large_binary(flat.type):
        joined = [b"\0".join(each) for each in array.to_pylist()]
        return digest(pa.array(joined, pa.large_binary()))
    numbers = flat.to_numpy(zero_copy_only=False)
    return _digest_bytes(memoryview(numbers.tobytes()), starts * numbers.itemsize)


def _digest_bytes(data: memoryview, starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Return the digests of the consecutive ranges of a buffer that begin at `starts`."""
    blake, ends = hashlib.blake2b, starts.tolist()
    digests = b"".join(
        blake(data[begin:end], digest_size=8).digest() for begin, end in pairwise(ends)
    )
    return np.frombuffer(digests, "<u8")


@lru_cache(maxsize=1 << 16)
def _digest_text(text: bytes) -> bytes:
    """Return the digest of a text. Digests are cached, because texts are often repeated."""
    return hashlib.blake2b(text, digest_size=8).digest()


def _key(name: str, seed: int) -> np.uint64:
    return np.uint64(int.from_bytes(_digest_text(f"{seed}\0{name}".encode()), "little"))


def _numbers(values: NDArray[Any]) -> NDArray[np.uint64]:
    # Hash integers as floats, because missing values may turn a column of integers into floats.
    given = values.reshape(len(values), -1)
    wide = np.add(given, 0.0, dtype=np.float64)
    wide[np.isnan(wide)] = np.nan
    bits = wide.view(np.uint64)
    if given.dtype in (np.int64, np.uint64):
        # Above this bound, float64 cannot represent all integers.
        bits = np.where(np.abs(wide) < _EXACT, bits, given.view(np.uint64))
    total = np.zeros(len(values), np.uint64)
    for place in range(bits.shape[1]):
        total = _mix(total + bits[:, place] + _GOLDEN)
    return total


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014), which mixes all bits."""
    # Change the array in place to allocate less memory.
    found: NDArray[np.uint64] = values ^ (values >> np.uint64(30))
    found *= np.uint64(0xBF58476D1CE4E5B9)
    found ^= found >> np.uint64(27)
    found *= np.uint64(0x94D049BB133111EB)
    found ^= found >> np.uint64(31)
    return found

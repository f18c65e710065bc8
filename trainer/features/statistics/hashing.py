"""A keyed 64-bit hash of examples, by their content alone.

The hash is independent of the storage type of a column: a large value makes it float64, a missing
value makes whole numbers floats, and a new class shifts the numbers of all others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

_EXACT = 2.0**53
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def hashes(columns: Mapping[str, Any], seed: int) -> NDArray[np.uint64]:
    """Return a keyed 64-bit hash of each example. The order of the columns does not matter."""
    total: NDArray[np.uint64] | None = None
    for name, values in columns.items():
        key = _key(name, seed)
        texts = _encode_texts(values)
        found = _numbers(values) if texts is None else _texts(texts)
        mixed = _mix(found ^ key)
        total = mixed if total is None else total + mixed
    assert total is not None
    return _mix(total ^ _key("", seed))


def comparable_content(values: Any, labels: Sequence[str] = ()) -> Any:
    """Return the comparable content of a column of any type; classes have `labels`.

    Fractions count with the digits of a float32.
    """
    if not isinstance(values, np.ndarray):
        return values
    if labels and values.dtype.kind in "iu":
        names = np.array([*(each.encode() for each in labels), b""], object)
        return names[np.where((values >= 0) & (values < len(labels)), values, len(labels))]
    if values.dtype != np.float64:
        return values
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32).astype(np.float64)
    return np.where((values == np.floor(values)) | np.isinf(narrow), values, narrow)


def _encode_texts(values: Any) -> Iterator[bytes] | None:
    """Return content that is hashed as bytes: texts, encoded images, variable shapes."""
    if not isinstance(values, np.ndarray) or values.dtype == object:
        return (_encode(each) for each in values)
    if values.dtype == np.uint8 and values.ndim > 1:
        return (each.tobytes() for each in values)
    return None


def _encode(value: Any) -> bytes:
    if isinstance(value, bytes):
        return value
    array = np.asarray(value)
    texts = array.dtype.kind in "OSU"
    return b"\0".join(map(bytes, array.ravel())) if texts else array.tobytes()


def _key(name: str, seed: int) -> np.uint64:
    digest = hashlib.blake2b(f"{seed}\0{name}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _texts(values: Iterator[bytes]) -> NDArray[np.uint64]:
    blake = hashlib.blake2b
    digests = b"".join(blake(each, digest_size=8).digest() for each in values)
    return np.frombuffer(digests, "<u8")


def _numbers(values: NDArray[Any]) -> NDArray[np.uint64]:
    # As a float of any type, so that a column keeps its hashes when missing values make it a float.
    given = values.reshape(len(values), -1)
    wide = given.astype(np.float64) + 0.0
    wide[np.isnan(wide)] = np.nan
    bits = wide.view(np.uint64)
    if given.dtype in (np.int64, np.uint64):
        # Above this, floats cannot represent odd numbers.
        bits = np.where(np.abs(wide) < _EXACT, bits, given.view(np.uint64))
    total = np.zeros(len(values), np.uint64)
    for place in range(bits.shape[1]):
        total = _mix(total + bits[:, place] + _GOLDEN)
    return total


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (Steele, Lea, Flood 2014): each bit depends on all."""
    found = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: NDArray[np.uint64] = found ^ (found >> np.uint64(31))
    return mixed

"""The schema of a feature, shared by data, models, tasks and statistics.

`stored` is the format of a feature in a record:

    "raw"       bytes of the tensor, little-endian, in row-major order
    "int"       an int64
    "float"     a float32
    "bytes"     strings
    "image"     an encoded PNG or JPEG of any size; it is resized to `shape` when it is read
    "sequence"  bytes of a tensor, or strings, with a variable first dimension

This module does not import TensorFlow.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """The shape of one example, the NumPy type ("string" for strings), and the stored format.

    A first dimension of None varies between examples: batches are padded to the longest example
    with `padding`, or with empty strings. If the values are classes, `num_classes` is their number.
    `labels` are their names, if known.
    """

    shape: tuple[int | None, ...]
    dtype: str
    stored: str
    num_classes: int = 0
    labels: tuple[str, ...] = ()
    padding: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape, with 1 for a variable dimension."""
        return tuple(1 if size is None else size for size in self.shape)

    @property
    def varies(self) -> bool:
        """Whether the first dimension varies between examples."""
        return None in self.shape

    def to_json(self) -> dict[str, Any]:
        """Return the feature's entry for the manifest."""
        return asdict(self)

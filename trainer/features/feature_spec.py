"""The schema of a feature, shared by data, models, tasks and statistics. Free of TensorFlow.

The form of a feature in a record of `tf.train.Example` is its `stored`: "raw" (the bytes of the
tensor, little-endian, row by row), "int" (an int64), "float" (a float32), "bytes" (texts), "image"
(an encoded PNG or JPEG of any size, whose `shape` is the size in which it is read) or "sequence"
(the bytes of a tensor, or texts, whose first size varies).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FeatureSpec:
    """Shape of one example, NumPy's name of the type ("string" for texts), and the stored form.

    A first size of None varies between examples: batches are padded to the longest with `padding`,
    or with empty texts. If the values are classes, `num_classes` is their number, and `labels` are
    their names if they have names.
    """

    shape: tuple[int | None, ...]
    dtype: str
    stored: str
    num_classes: int = 0
    labels: tuple[str, ...] = ()
    padding: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape, with 1 for a variable size: a lower bound of its memory."""
        return tuple(1 if size is None else size for size in self.shape)

    @property
    def varies(self) -> bool:
        """Return whether its first size varies between examples."""
        return None in self.shape

    def to_json(self) -> dict[str, Any]:
        """Return the entry in the manifest."""
        return asdict(self)

"""One batch on its way: inputs as the model takes them, and what is copied into the rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


@dataclass(frozen=True)
class Batch:
    """Some examples.

    Attributes:
        inputs: arrays by feature.
        copied: columns of the rows besides the answers.
        lengths: of the examples, where an input varies in length and is padded; else None.
    """

    inputs: Mapping[str, NDArray[Any]]
    copied: pa.Table
    lengths: NDArray[np.int64] | None = None


class Examples(ABC):
    """What is predicted, in its order. `skipped` rows could not be read, so far."""

    skipped = 0
    #: How many rows there are; 0 where that is not known before all are read.
    total = 0

    @abstractmethod
    def batches(self, size: int) -> Iterator[Batch]:
        """Yield all examples, `size` at a time or fewer; raises `UserError`."""

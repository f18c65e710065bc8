"""The interface of data sources: TFDS builders and files.

A source is divided into parts. Each part is read by one process, in batches and in a fixed order,
so that reading it again gives the same examples. A source is pickled for worker processes, so it
must not keep files open.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.data.features import Selection


@dataclass(frozen=True, kw_only=True)
class Part:
    """A range of a split of a source. A single process reads it.

    `origin` is the source's split, or empty. `where` is the range, as JSON that the source defines.
    """

    number: int
    origin: str
    where: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The name of the folder to which its examples are written."""
        return f"{self.number:06d}"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Examples of a part: their features, and the split of each as an index into `SPLITS`.

    `columns` have the forms of `columns.Columns`, or forms that `columns.make_columns` accepts.
    """

    columns: Mapping[str, Any]
    splits: NDArray[np.int8]


class Source(ABC):
    """A source of examples. `name` is the configured name, for messages.

    `identity` identifies its content, for example by a version or the digest of a listing. It is
    part of the dataset's key and of its manifest.
    """

    name: str
    identity: Mapping[str, Any]

    @abstractmethod
    def select(self) -> Selection:
        """Return the selected features, with their roles. Raises `ConfigError` or `UserError`.

        With `data.map`, return all features of the source without roles, because roles then refer
        to the result of the function. Unknown features in `data.types` are then allowed.
        """

    def fetch(self) -> None:  # noqa: B027
        """Download the files that must be complete before any part is read. Raises `UserError`."""

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return all parts, numbered from 0. Call this after `fetch`."""

    @property
    def total(self) -> int:
        """The total number of examples, or 0 if it is unknown. Valid after a call of `parts`."""
        return 0

    @abstractmethod
    def read(self, part: Part, selection: Selection) -> Iterator[Batch]:
        """Yield the examples of a part. Raises `UserError` if it has an invalid row."""

    def place(self, part: Part, number: int) -> str:
        """Return the position of a part's example for messages. `number` is counted from 0."""
        return f"example {number} of part {part.number}{f' ({part.origin})' if part.origin else ''}"

    def notes(self) -> Sequence[str]:
        """Return one-line notes on how the source was read. Call this after reading all parts."""
        return ()

    def facts(self) -> Mapping[str, Any]:
        """Return additional fields for the manifest. Call this after all parts have been read."""
        return {}

"""What a dataset is made from. Builders of TFDS and files are read by the same interface.

A source is cut into parts. A part is read by one process, in batches, in an order that is always
the same; a part that is read again gives the same examples. A source is pickled into the processes
that prepare, so that it holds no open file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.data.features import Selection

#: The features of some examples by name: arrays whose first axis is the example. What varies in
#: length is an array of arrays, or a list of them; an image that is stored encoded is bytes.
Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of a source.

    Attributes:
        number: of the part; the order of the examples is that of the numbers.
        origin: split of the source; empty where the source has none.
        where: what the source needs to find it, as JSON has it.
    """

    number: int
    origin: str
    where: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """The name of the folder that it is mapped into."""
        return f"{self.number:06d}"


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Some examples of a part: their features, and the split of each as an index into `SPLITS`."""

    columns: Columns
    splits: NDArray[np.int8]


class Source(ABC):
    """What a dataset is made from.

    Attributes:
        name: for messages, as the configuration has it.
        identity: what tells its content from another, such as the version or the digest of a
            listing. Part of the dataset's key, and written into its manifest.
        is_shuffled: whether its examples come in a random order; of others each shard is shuffled.
    """

    name: str
    identity: Mapping[str, Any]
    is_shuffled: bool = False

    @abstractmethod
    def select(self) -> Selection:
        """Return the features that are kept, with their roles.

        With `data.map` these are all features that there are, without roles and without those of
        `data.types` that it does not have: roles name what the function returns.

        Raises:
            ConfigError: a key of the data section does not suit the source.
            UserError: the source is of no use here.
        """

    @abstractmethod
    def fetch(self) -> None:
        """Make the source ready to be read; raises `UserError`."""

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return all parts, by number from 0; called after `fetch`."""

    @property
    def total(self) -> int:
        """How many examples `read` yields of all parts, where it is known after `parts`, else 0."""
        return 0

    @abstractmethod
    def read(self, part: Part, selection: Selection) -> Iterator[Batch]:
        """Yield the examples of a part; in a process that has TensorFlow or not.

        Raises:
            UserError: it cannot be read, or has a broken row.
        """

    def place(self, part: Part, number: int) -> str:
        """Say where an example of a part is, for messages; the first one is number 0."""
        return f"example {number} of part {part.number}{f' ({part.origin})' if part.origin else ''}"

    def notes(self) -> Sequence[str]:
        """Return what a user should know of how the source was read, after all parts were read.

        Each is one line that names the column or the file, and the key that changes it.
        """
        return ()

    def facts(self) -> Mapping[str, Any]:
        """Return what the manifest says of it besides, after all parts were read."""
        return {}

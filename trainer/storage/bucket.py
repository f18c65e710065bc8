"""What a client of an object store has to offer: single requests on the objects of one bucket."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from trainer.storage.manifest import Checksum

Result = TypeVar("Result")
# What is larger is sent in parts of this size, so that it never stands in memory as a whole.
PART_BYTES = 8 << 20
# Seconds to connect, and seconds until the next bytes come.
TIMEOUTS = (5.0, 60.0)
# The name of the metadata that says who wrote an object of a published directory.
WRITER = "flotilla-writer"


class Trouble(enum.Enum):
    """What an error of a client means."""

    PASSING = "ask again"
    ABSENT = "no such object, or no such bucket"
    NO_BUCKET = "no such bucket"
    EXISTS = "there is an object already"
    DENIED = "no permission"
    NO_CREDENTIALS = "no credentials, or wrong ones"
    OTHER = "anything else that the store says"
    FOREIGN = "nothing that the store says"


@dataclass(frozen=True)
class Stored:
    """One object, as the store describes it.

    Attributes:
        key: its name in the bucket.
        bytes: its size.
        digest: what the store says of its content, in the store's own way; empty when nothing.
        created: when, in seconds since 1970.
        writer: its metadata `WRITER`; None where the store did not say.
    """

    key: str
    bytes: int
    digest: str
    created: float
    writer: str | None = field(default=None, compare=False)


class Sink(Protocol):
    """What an object is written to; `tell` says how much has come."""

    def write(self, data: bytes, /) -> int:
        """Take the next bytes."""

    def tell(self) -> int:
        """Return how many bytes were taken."""

    def flush(self) -> None:
        """Let go of what is held back."""


class Ask(Protocol):
    """Asks a request until it is answered, or the deadline is over."""

    def __call__(self, request: Callable[[], Result], /) -> Result:
        """Return the result of `request`."""


class Bucket(Protocol):
    """One bucket. Requests go through an `Ask`; errors are the client's own, for `judge`."""

    remedies: Mapping[Trouble, str]

    def get(self, key: str) -> bytes:
        """Return the content of an object."""

    def read_into(self, key: str, file: Sink) -> None:
        """Write the content of an object to an empty file, also when connections drop."""

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object."""

    def create(self, key: str, data: bytes, writer: str) -> None:
        """Create an object where there is none, verified; `writer` goes into its metadata."""

    def create_from(self, key: str, path: Path, expected: Checksum, writer: str) -> None:
        """Create an object from a file of any size; raises `ChangedError` if that has changed."""

    def stat(self, key: str) -> Stored:
        """Return what the store says of one object, its writer too."""

    def holds(self, stored: Stored, path: Path, expected: Checksum) -> bool:
        """Say whether an object has the content of a file."""

    def vouched(self, key: str) -> Checksum | None:
        """Return the checksum that the store itself has made of an object, if it makes one."""

    def walk(self, prefix: str) -> list[Stored]:
        """Return all objects whose key begins with `prefix`, by key."""

    def names(self, prefix: str) -> list[str]:
        """Return the names up to the next slash after `prefix`, in order."""

    def remove(self, key: str) -> None:
        """Remove an object."""

    def abort_uploads(self, prefix: str, before: float) -> list[str]:
        """Give up the uploads in parts that began before a time; return their keys."""

    def judge(self, error: BaseException) -> Trouble:
        """Say what an error means."""


class ChangedError(Exception):
    """A file is not what it was when its checksum was taken."""


class MangledError(Exception):
    """What the store has got, or what came from it, is not what was sent."""

"""The interface of a client of an object store: single requests on the objects of one bucket."""

from __future__ import annotations

import enum
import ssl
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar

from trainer.storage.manifest import Checksum

Result = TypeVar("Result")
# A larger object is sent in parts of this size, so that it is never in memory as a whole.
PART_BYTES = 8 << 20
# The most that all stores return at once.
PAGE = 1000
# Seconds to connect, and seconds until the next bytes come.
TIMEOUTS = (5.0, 60.0)
SUCCESS = range(200, 300)
# The metadata key of the process that wrote an object of a published directory.
WRITER = "flotilla-writer"


class Trouble(enum.Enum):
    """The class of a client's error."""

    TRANSIENT = "try again"
    ABSENT = "no such object, or no such bucket"
    NO_BUCKET = "no such bucket"
    EXISTS = "there is an object already"
    DENIED = "no permission"
    NO_CREDENTIALS = "no credentials, or wrong ones"
    EXPIRED = "credentials that have expired"
    NO_TLS = "no TLS connection"
    OTHER = "another error of the store"
    FOREIGN = "no error of the store"


@dataclass(frozen=True)
class Stored:
    """One object, as the store describes it.

    Attributes:
        digest: the store's own checksum of its content; empty without one.
        created: when, in seconds since 1970.
        writer: its metadata `WRITER`; None where the request does not return metadata.
    """

    key: str
    bytes: int
    digest: str
    created: float
    writer: str | None = field(default=None, compare=False)


class Sink(Protocol):
    """What an object is written to; `tell` returns how many bytes have come."""

    def write(self, data: bytes, /) -> int:
        """Write the next bytes."""

    def tell(self) -> int:
        """Return how many bytes were written."""

    def flush(self) -> None:
        """Write what is buffered."""


class Retrying(Protocol):
    """Repeats a request until it succeeds, or the deadline has passed."""

    def __call__(self, request: Callable[[], Result], /) -> Result:
        """Return the result of `request`."""


class Bucket(Protocol):
    """One bucket. Requests go through a `Retrying`; errors are the client's own, see `judge`."""

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
        """Return the description of one object, with its writer."""

    def holds(self, stored: Stored, path: Path, expected: Checksum) -> bool:
        """Say whether an object has the content of a file."""

    def vouched(self, key: str) -> Checksum | None:
        """Return the checksum that the store itself computed for an object, if it computes one."""

    def walk(self, prefix: str) -> Iterator[Stored]:
        """Yield all objects whose key begins with `prefix`, by key, while they are listed."""

    def names(self, prefix: str) -> list[str]:
        """Return the names up to the next slash after `prefix`, in order."""

    def remove(self, key: str) -> None:
        """Remove an object."""

    def abort_uploads(self, prefix: str, before: float) -> list[str]:
        """Abort the multipart uploads that began before a time; return their keys."""

    def judge(self, error: BaseException) -> Trouble:
        """Classify an error."""


class ChangedError(Exception):
    """A file has changed since its checksum was computed."""


class DamagedInTransitError(Exception):
    """Content or an answer was damaged between this process and the store."""


def tls_trouble(error: BaseException) -> Trouble:
    """Return the class of a client's error of TLS, by its causes."""
    cause: BaseException | None = error
    while cause:
        # The endpoint speaks plain HTTP. Other errors come of connections that were cut.
        plain = isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER"
        if plain or isinstance(cause, ssl.SSLCertVerificationError):
            return Trouble.NO_TLS
        cause = cause.__cause__ or cause.__context__
    return Trouble.TRANSIENT

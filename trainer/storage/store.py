"""What the stores of all schemes share: listings, downloads, errors, and retried requests.

Requests are retried with backoff until the deadline of their operation, and several are sent in
parallel.

A mark is a small file with the time when an operation began. The writer may have been killed, or
the writer's clock may be wrong, so a mark is valid only if its time is close to the reader's
current time. An unreadable mark is invalid.
"""

from __future__ import annotations

import enum
import logging
import math
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import BinaryIO, Protocol, TypeVar

import google_crc32c
import tenacity

from flotilla.trainer.runtime.environment import read_variable
from flotilla.trainer.storage.errors import StoreUnavailable, Unavailable
from flotilla.trainer.storage.manifest import Checksum


@dataclass(frozen=True, slots=True)
class ListedFile:
    """One file in a listing. Listing does not read the file.

    Attributes:
        path: path relative to the listed URI, or empty if the URI is the file.
        tag: a value that changes with the content: the store's checksum, or the modification time.
    """

    path: str
    bytes: int
    tag: str


#: A function that is called with the number of bytes copied since its last call.
Count = Callable[[int], None]


def count_nothing(_bytes: int) -> None:
    """Ignore the count."""


Result = TypeVar("Result")
# A larger object is sent in parts of this size in bytes, so that it is never entirely in memory.
PART_BYTES = 8 << 20
# The largest page size, in entries, that all stores support.
PAGE = 1000
# Timeouts for a connection, and for the next bytes of a response, in seconds.
TIMEOUTS = (5.0, 60.0)
SUCCESS = range(200, 300)
# The metadata key that records which process wrote an object of a published directory.
WRITER = "flotilla-writer"
# The suffix of the object `KEY.TOKEN.flotilla-upload`, which marks a multipart upload in progress.
# The object records its writer, because a store does not record which process started an upload.
UPLOAD_MARK = ".flotilla-upload"
_EMPTY_PAGES = 1000


class Trouble(enum.Enum):
    """The kind of an error that a store's client raised."""

    TRANSIENT = "try again"
    ABSENT = "no such object, or no such bucket"
    NO_BUCKET = "no such bucket"
    EXISTS = "the object already exists"
    DENIED = "no permission"
    NO_CREDENTIALS = "missing or wrong credentials"
    EXPIRED = "the credentials have expired"
    NO_TLS = "the TLS connection failed"
    OTHER = "the store reported an error"
    FOREIGN = "not an error of the store"


@dataclass(frozen=True)
class Stored:
    """One object as the store describes it.

    Attributes:
        digest: the store's checksum of the content, or empty if there is none.
        created: Unix time of creation.
        writer: the value of the metadata key `WRITER`, or None if the request omits metadata.
    """

    key: str
    bytes: int
    digest: str
    created: float
    writer: str | None = field(default=None, compare=False)


class Sink:
    """The destination of a download, which counts the bytes and computes their crc32c.

    Without a file, it discards the bytes. It rejects more than `most` bytes (0: no limit).
    """

    def __init__(self, file: BinaryIO | None, count: Count, most: int = 0) -> None:
        """Store the arguments. `count` is called with the size of each block."""
        self._file, self._count, self._most = file, count, most
        self._bytes = self._crc = 0

    @property
    def checksum(self) -> Checksum:
        """The size and crc32c of the bytes so far."""
        return Checksum(self._bytes, f"{self._crc:08x}")

    def write(self, data: bytes, /) -> int:
        """Write the next bytes."""
        if self._most and self._bytes + len(data) > self._most:
            raise TooLargeError(self._most)
        self._count(len(data))
        self._crc = google_crc32c.extend(self._crc, data)
        self._bytes += len(data)
        return self._file.write(data) if self._file else len(data)

    def tell(self) -> int:
        """Return the number of bytes written."""
        return self._bytes

    def flush(self) -> None:
        """Write buffered bytes."""
        if self._file:
            self._file.flush()


class Retrying(Protocol):
    """A function that repeats a request until it succeeds or the deadline has passed."""

    def __call__(self, request: Callable[[], Result], /) -> Result:
        """Return the result of `request`."""


class TooLargeError(ValueError):
    """A file is larger than the limit for reading. The message contains the limit."""

    def __init__(self, most: int) -> None:
        """Build the message with the limit."""
        super().__init__(f"it is larger than the limit of {most >> 20} MiB")


class ChangedError(Exception):
    """A file has changed since its checksum was computed."""


class DamagedInTransitError(Exception):
    """Data was damaged between this process and the store."""


def list_pages(page: Callable[[str | None], tuple[list[Result], str | None]]) -> Iterator[Result]:
    """Yield the entries of a paged listing. `page` returns a page and the token of the next one."""
    seen, empty, token = set[str](), 0, None
    while True:
        found, token = page(token)
        yield from found
        if not token:
            return
        empty = 0 if found else empty + 1
        if token in seen or empty > _EMPTY_PAGES:
            raise DamagedInTransitError(
                "the listing of the store does not end: its pages repeat or are empty"
            )
        seen.add(token)


def tls_trouble(error: BaseException) -> Trouble:
    """Classify a client's TLS error by its causes."""
    cause: BaseException | None = error
    while cause:
        # This reason means that the endpoint uses plain HTTP.
        plain = isinstance(cause, ssl.SSLError) and cause.reason == "WRONG_VERSION_NUMBER"
        if plain or isinstance(cause, ssl.SSLCertVerificationError):
            return Trouble.NO_TLS
        cause = cause.__cause__ or cause.__context__
    # Treat all other TLS errors as dropped connections.
    return Trouble.TRANSIENT


# Environment variable that sets how long the requests of an operation are retried, in seconds.
VARIABLE = "FLOTILLA_STORAGE_DEADLINE"
DEADLINE = 300.0
FIRST_PAUSE = 0.25
MAX_PAUSE = 20.0
# Minimum timeout of a request, in seconds, even if less time remains until the deadline.
LEAST_SECONDS = 5.0
PROGRESS_BYTES = 1 << 20
# At 30 ms per request, 300 small files take 9.7 s one by one, 1.2 s on 8 threads and 0.6 s on 16.
THREADS = 16
_MAX_TEXT = 200
# Time between two messages about what a process waits for, in seconds.
_SAID_SECONDS = 10.0

Item = TypeVar("Item")
_log = logging.getLogger(__name__)
_limit: ContextVar[float] = ContextVar("_limit", default=math.inf)


@contextmanager
def shorter_retry(seconds: float) -> Iterator[None]:
    """Shorten the deadline of operations started in this block, and do not log retries."""
    before = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(before)


class Retry:
    """The deadline of one operation, which all of its requests and threads share.

    The countdown restarts with each request that succeeds, and with every `PROGRESS_BYTES` that a
    request receives, so an operation may continue as long as it makes progress. A request may take
    the remaining time, or `LEAST_SECONDS` if less remains, regardless of the client's timeout.
    """

    def __init__(self) -> None:
        """Read the deadline from the environment. Raises `ConfigError` if it is not a number."""
        self._seconds = min(float(read_variable(VARIABLE) or DEADLINE), _limit.get())
        self._logs = math.isinf(_limit.get())
        self._succeeded_at = time.monotonic()
        self._bytes = 0

    def progress(self, count: int) -> None:
        """Record that `count` more bytes were received."""
        self._bytes += count
        if self._bytes >= PROGRESS_BYTES:
            self._bytes, self._succeeded_at = 0, time.monotonic()

    def call(
        self, where: str, request: Callable[[], Result], transient: Callable[[BaseException], bool]
    ) -> Result:
        """Return the result of `request`. Retry it on `transient` errors until the deadline."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(transient),
            wait=self._pause,
            stop=lambda _: self._seconds_left() <= 0,
            before_sleep=(lambda state: self._log_retry(where, state)) if self._logs else None,
            reraise=True,
        )
        try:
            result = retrying(request)
        except Exception as error:
            if not transient(error):
                raise
            raise StoreUnavailable(
                f"{where} has not been available for {self._seconds:g} s ({describe(error)}); "
                f"check its endpoint, or try again later ({VARIABLE} sets the time limit)"
            ) from error
        self._succeeded_at = time.monotonic()
        return result

    def within_deadline(self, request: Callable[[], Result]) -> Result:
        """Return the result of a request. Raises `TimeoutError` after the deadline.

        The request runs in its own thread, because a client only limits the time between two bytes.
        A thread that is still waiting ends with this process.
        """
        future = Future[Result]()
        send = partial(_send, copy_context(), request)
        threading.Thread(target=send, args=(future,), name="request", daemon=True).start()
        least = time.monotonic() + LEAST_SECONDS
        while not future.done():
            left = max(self._seconds_left(), least - time.monotonic())
            if left <= 0:
                raise TimeoutError("no complete response arrived")
            wait([future], left)
        try:
            return future.result()
        finally:
            # Drop this reference. Otherwise the traceback of an error would keep the response
            # alive, and its sockets open, until the next garbage collection.
            del future

    def _seconds_left(self) -> float:
        return self._succeeded_at + self._seconds - time.monotonic()

    def _pause(self, state: tenacity.RetryCallState) -> float:
        pause: float = tenacity.wait_random_exponential(FIRST_PAUSE, MAX_PAUSE)(state)
        return max(0.0, min(pause, self._seconds_left()))

    def _log_retry(self, where: str, state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        pause = state.next_action.sleep if state.next_action else 0.0
        _log.warning(
            "%s: %s; retrying in %.1f s, for at most %.0f s",
            where,
            describe(error),
            pause,
            self._seconds_left(),
        )


def _send(context: Context, request: Callable[[], Result], future: Future[Result]) -> None:
    try:
        future.set_result(context.run(request))
    except BaseException as error:
        future.set_exception(error)
    finally:
        del future


def retry_until_deadline(where: str, request: Callable[[], Result]) -> Result:
    """Return the result of `request`. Retry it until the deadline while it raises `Unavailable`."""
    try:
        return Retry().call(where, request, lambda error: isinstance(error, Unavailable))
    except StoreUnavailable as error:
        last = error.__cause__
    # Raise outside the handler, because inside it, each error would become the cause of the other.
    assert last is not None
    raise last


def describe(error: BaseException | None) -> str:
    """Return the message of a client's error on one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."


def run_parallel(act: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results of `act` for all items, in order. The first error cancels the rest."""
    if not items:
        return []
    with ThreadPoolExecutor(min(THREADS, len(items)), thread_name_prefix="storage") as pool:
        futures = [pool.submit(act, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def wait_until(
    is_over: Callable[[], bool], what: Callable[[], str], seconds: float, poll: float
) -> bool:
    """Wait at most `seconds` until `is_over` returns true. Return whether it did.

    Every ten seconds, log a warning that names what the process is waiting for.
    """
    began = said = time.monotonic()
    while not is_over():
        now = time.monotonic()
        if now - began >= seconds:
            return False
        if now - said >= _SAID_SECONDS:
            said = now
            _log.warning("waiting up to %.0f s more for %s", seconds - (now - began), what())
        time.sleep(poll)
    return True


def is_recent(at: object, seconds: float) -> bool:
    """Return whether a mark's Unix time is less than `seconds` before or after the current time."""
    return isinstance(at, int | float) and abs(time.time() - at) < seconds

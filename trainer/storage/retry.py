"""Retries of requests to stores with backoff and one deadline, parallel requests, and time marks.

A mark is a small file with the time when an operation began. The writer may have been killed, or
the writer's clock may be wrong, so a mark is valid only if its time is close to the reader's
current time. An unreadable mark is invalid.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from functools import partial
from typing import TypeVar

import tenacity

from flotilla.trainer.runtime.environment import read_variable
from flotilla.trainer.storage.errors import StoreUnavailable, Unavailable

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
Result = TypeVar("Result")
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

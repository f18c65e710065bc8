"""The lock of a checkpoint folder: one job writes there, and no other. Free of TensorFlow.

A lock is a file `.lock/000003.json` below the folder. It is made by a write that replaces nothing,
and the highest number holds, unless it was given back: then the file says so. Who takes over makes
the next number and never touches another's file before that, so that who was taken over always
finds out. The holder writes its own file anew while it lives; one that was not renewed for `LASTS`
seconds has expired. Clocks of different machines may differ by a minute.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import cache

from trainer import events, storage
from trainer.errors import ClusterLostError, UserError
from trainer.lock_holder import HeldError, Holder, clock, holders, place
from trainer.lock_wait import acquired
from trainer.storage.writer import writer

RENEWED_EVERY = 20.0
# Names the job that a task belongs to: a new life of it takes over from the one before at once.
VARIABLE = "FLOTILLA_JOB"
log = logging.getLogger(__name__)


class LostError(UserError):
    """Another job has taken over, or the lock was removed: this one must not write any more."""


class Unlocked:
    """Of a task that writes nothing, or alone by nature."""

    def require(self) -> None:
        """Raise `LostError` where it is known that the lock is lost."""

    def check(self) -> None:
        """Look whether the lock is held still; raise `LostError` where it is not."""


class Lock(Unlocked):
    """The lock of one folder in the hands of this process."""

    def __init__(self, uri: str, run: str, now: Callable[[], float] = time.time) -> None:
        """Describe the lock of the folder `uri`; nothing is taken yet."""
        self._uri = uri
        self._now = now
        self._own = Holder(
            token=secrets.token_hex(8),
            job=os.environ.get(VARIABLE, ""),
            run=run,
            host=socket.gethostname(),
            process=os.getpid(),
            writer=_writer(),
            started=now(),
            renewed=now(),
        )
        self._number = 0
        self._lost = ""
        self._one_at_a_time = threading.Lock()

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            HeldError: another job holds it, and has not expired.
            UserError: the store does not work.
        """
        while not self._number:
            found = holders(self._uri)
            self._refuse_held(found)
            number = max(found, default=0) + 1
            # It may have been waited for; what is written now has to last from now on.
            self._own = replace(self._own, started=self._now(), renewed=self._now())
            storage.create_bytes(place(self._uri, number), self._content())
            # Of two at the same time, and where an answer was lost, the store knows who it was.
            after = holders(self._uri)
            if not self._is_own(after.get(number)):
                continue
            self._refuse_newcomers(number, after)
            if number < max(after):
                # Others came, counted on, and have gone since.
                storage.delete(place(self._uri, number))
                continue
            self._number = number
            for old in found:
                storage.delete(place(self._uri, old))

    def renew(self) -> None:
        """Say that the holder lives; raises `LostError`, or what the store says."""
        with self._one_at_a_time:
            self._look()
            self._own = replace(self._own, renewed=self._now())
            storage.write_bytes(place(self._uri, self._number), self._content())

    def require(self) -> None:
        """Raise `LostError` where it is known that the lock is lost."""
        if self._lost:
            raise LostError(self._lost)

    def check(self) -> None:
        """Look whether the lock is held still; raise `LostError` where it is not."""
        with self._one_at_a_time:
            self._look()

    def release(self) -> None:
        """Let go; a lock that is lost already is left alone.

        Its file stays: the next one counts on from it, so that what this one may still have under
        way can never be taken for the word of another holder.
        """
        with self._one_at_a_time:
            self._look()
            self._lost = f"the lock of {self._uri} was given back"
            self._own = replace(self._own, renewed=self._now(), released=True)
            storage.write_bytes(place(self._uri, self._number), self._content())

    def _look(self) -> None:
        self.require()
        found = holders(self._uri)
        newest = max(found, default=0)
        # A file of ours that cannot be read any more is written anew.
        readable = found.get(self._number)
        if newest == self._number and (readable is None or self._is_own(readable)):
            return
        who = found.get(newest)
        what = f"{self._uri} was taken over by {who}" if who else f"the lock of {self._uri} is gone"
        self._lost = (
            f"{what}; run {self._own.run} stops writing: look which of the two should go on, and "
            "stop the other"
        )
        self.require()

    def _refuse_held(self, found: dict[int, Holder | None]) -> None:
        for holder in found.values():
            if holder is None:
                log.warning("the lock of %s cannot be read; it is taken over", self._uri)
            elif not self._is_free(holder):
                raise HeldError(self._uri, holder)
        newest = found.get(max(found, default=0))
        if newest and not newest.released and not self._is_same_job(newest):
            why = "has ended" if newest.is_gone else f"was silent since {clock(newest.renewed)}"
            log.warning("the lock of %s is taken over from %s, which %s", self._uri, newest, why)
            events.emit("lock_taken_over", uri=self._uri, holder=str(newest), reason=why)

    def _refuse_newcomers(self, number: int, after: dict[int, Holder | None]) -> None:
        """Give way to one that came in between, and counts from another number."""
        for other, holder in after.items():
            if other != number and holder and not self._is_free(holder):
                storage.delete(place(self._uri, number))
                raise HeldError(self._uri, holder)

    def _is_free(self, holder: Holder) -> bool:
        over = holder.released or self._now() >= holder.until or holder.is_gone
        return over or self._is_same_job(holder) or self._is_own(holder)

    def _is_same_job(self, holder: Holder) -> bool:
        return bool(holder.job) and holder.job == self._own.job

    def _is_own(self, holder: Holder | None) -> bool:
        return holder is not None and holder.token == self._own.token

    def _content(self) -> bytes:
        return json.dumps(asdict(self._own)).encode()


@contextmanager
def held(uri: str, run: str) -> Iterator[Lock]:
    """Hold the lock of the folder `uri` in this block, renewed on a thread of its own.

    Where the holder may be dead it is waited for, for as long as a lock lasts; see `lock_wait`. A
    life that ends so that another one begins again (`ClusterLostError`) leaves it to that one.

    Raises:
        HeldError: another job holds it.
        RunInterruptedError: SIGINT or SIGTERM came while it was waited for.
        UserError: the store does not work.
    """
    lock = Lock(uri, run)
    acquired(lock.acquire)
    over = threading.Event()
    threading.Thread(target=_keep, args=(lock, over), name="lock", daemon=True).start()
    try:
        yield lock
    except ClusterLostError:
        over.set()
        raise
    except BaseException:
        over.set()
        _let_go(lock)
        raise
    over.set()
    _let_go(lock)


def environment() -> dict[str, str]:
    """Return the variables by which the tasks that this process starts share a lock."""
    return {VARIABLE: _job()}


def _keep(lock: Lock, over: threading.Event) -> None:
    while not over.wait(RENEWED_EVERY):
        try:
            lock.renew()
        except LostError as error:
            # The thread that trains stops at its next look.
            if not over.is_set():
                log.warning("%s", error)
            return
        # As long as this process trains it has to say so, whatever a client may raise.
        except Exception as error:
            log.warning("the lock is not renewed: %s", error)


def _let_go(lock: Lock) -> None:
    # What has brought the end is what has to be said.
    try:
        lock.release()
    except UserError as error:
        log.warning("%s", error)


def _writer() -> str:
    with suppress(OSError):
        return writer()
    return ""


@cache
def _job() -> str:
    return f"launch {secrets.token_hex(8)}"

"""The lock of a checkpoint folder: one job writes there, and no other. Free of TensorFlow.

A lock is a file `.lock/000003.json` below the folder. It is made by a write that replaces nothing,
and the highest number holds, unless it was given back: then the file says so. Who takes over makes
the next number and never touches another's file before that, so that who was taken over always
finds out. The holder writes its own file anew while it lives; one that was not renewed for `LASTS`
seconds has expired. Clocks of different machines may differ by a minute.

Who holds the lock of a checkpoint folder, as it stands in the store. Free of TensorFlow.

Waiting for a lock whose holder may be dead: until it shows life, or expires. TensorFlow-free.

A task that was killed hard is started again at once, as another process and perhaps on another
machine, and finds the lock that it had itself: a chief that Kubernetes restarts, the retry of a
step. Nobody else can tell then whether the holder lives; its renewals can.
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
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial

from trainer import events, storage
from trainer.cluster.signals import on_interrupt
from trainer.errors import ClusterLostError, RunInterruptedError, UserError
from trainer.storage.local import is_gone, is_living, writer

FOLDER = ".lock"
LEASE_SECONDS = 120.0
# A holder that is cut off from the store, or whose clock is wrong, may still train. An expired
# lock stands in nobody's way, and may wait.
ABANDONED_SECONDS = 24 * 3600.0
_SUFFIX = ".json"


@dataclass(frozen=True, kw_only=True)
class LeaseHolder:
    """Who holds a lock.

    Attributes:
        token: of this holder alone.
        job: the job whose lives share the lock, or empty.
        run: the id of the run.
        host: the machine, for people.
        process: its number there.
        writer: the process, machine and beginning included; empty where the system does not tell.
        started: when the lock was taken, in seconds since 1970.
        renewed: when it was renewed last.
        released: whether it was given back.
    """

    token: str
    job: str
    run: str
    host: str
    process: int
    writer: str
    started: float
    renewed: float
    released: bool = False

    @property
    def until(self) -> float:
        """When the lock expires, unless it is renewed."""
        return self.renewed + LEASE_SECONDS

    @property
    def is_abandoned(self) -> bool:
        """Whether its file may go: what was given back stays as long as what nobody renews.

        Until then its number is in nobody else's hands, who could be taken for its holder.
        """
        if self.is_gone and not self.released:
            return True
        return time.time() >= self.until + ABANDONED_SECONDS

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended: a process of this machine."""
        with suppress(OSError):
            return bool(self.writer) and is_gone(self.writer)
        return False

    @property
    def is_living(self) -> bool:
        """Whether it is known to live: a process of this machine."""
        with suppress(OSError):
            return bool(self.writer) and is_living(self.writer)
        return False

    def __str__(self) -> str:
        """Say who it is."""
        return f"run {self.run} (process {self.process} on {self.host})"


class LeaseHeldError(UserError):
    """Another job writes to the folder `uri`."""

    def __init__(self, uri: str, holder: LeaseHolder) -> None:
        """Say who it is, and until when at least."""
        super().__init__(
            f"{holder} writes to {uri} since {clock_time(holder.started)}, and holds its lease "
            f"until {clock_time(holder.until)} at least: wait for its end, or stop it; if it is "
            "dead already, try again after that time"
        )
        self.uri = uri
        self.holder = holder


def holders(uri: str) -> dict[int, LeaseHolder | None]:
    """Return the holders below the folder `uri` by number; None for one that cannot be read."""
    found = {}
    for name in storage.names(storage.join(uri, FOLDER)):
        if name.removesuffix(_SUFFIX).isdigit():
            with suppress(storage.Missing):
                data = storage.read_bytes(storage.join(uri, FOLDER, name))
                found[int(name.removesuffix(_SUFFIX))] = _parse_holder(data)
    return found


def remove_expired(uri: str) -> list[str]:
    """Remove what dead or unreadable holders left, or is a day old; return the URIs."""
    over = [
        lease_uri(uri, number)
        for number, holder in holders(uri).items()
        if holder is None or holder.is_abandoned
    ]
    for each in over:
        storage.delete(each)
    return over


def lease_uri(uri: str, number: int) -> str:
    """Return the URI of the lock with a number, of the folder `uri`."""
    return storage.join(uri, FOLDER, f"{number:06d}{_SUFFIX}")


def _parse_holder(data: bytes) -> LeaseHolder | None:
    try:
        found = LeaseHolder(**json.loads(data))
        times = float(found.started), float(found.renewed)
        return replace(found, started=times[0], renewed=times[1])
    except (ValueError, TypeError):
        return None


def clock_time(seconds: float) -> str:
    """Return a time, in seconds since 1970, as people read it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


POLL_SECONDS = 2.0
log = logging.getLogger(__name__)


def acquire_waiting(
    acquire: Callable[[], None], pause: Callable[[float], None] = time.sleep
) -> None:
    """Call `acquire`, again and again while who holds the lock may be dead.

    Args:
        acquire: takes the lock, or raises a `HeldError`.
        pause: waits for so many seconds.

    Raises:
        HeldError: the holder lives, another one was faster, or it has not expired after the
            `LASTS` seconds of a lock: its clock is wrong.
        RunInterruptedError: SIGINT or SIGTERM came.
        UserError: the store does not work.
    """
    first: LeaseHolder | None = None
    waited = 0.0
    while refused := _refusal(acquire):
        holder = refused.holder
        if holder.is_living or holder != (first or holder) or waited > LEASE_SECONDS:
            raise refused
        asked: list[None] = []
        # An exception out of a signal would be swallowed by what writes the log.
        with on_interrupt(partial(asked.append, None)):
            if first is None:
                _tell(refused)
            pause(POLL_SECONDS)
        if asked:
            raise RunInterruptedError("interrupted, while another one may still hold the lock")
        first = holder
        waited += POLL_SECONDS


def _refusal(acquire: Callable[[], None]) -> LeaseHeldError | None:
    try:
        acquire()
    except LeaseHeldError as error:
        return error
    return None


def _tell(error: LeaseHeldError) -> None:
    until = clock_time(error.holder.until)
    log.warning("%s holds the lock of %s until %s: it may be dead", error.holder, error.uri, until)
    events.emit("lock_awaited", uri=error.uri, holder=str(error.holder), until=until)


RENEW_SECONDS = 20.0
# Names the job that a task belongs to: a new life of it takes over from the one before at once.
VARIABLE = "FLOTILLA_JOB"


class LeaseLostError(UserError):
    """Another job has taken over, or the lock was removed: this one must not write any more."""


class NoLease:
    """Of a task that writes nothing, or alone by nature."""

    def require(self) -> None:
        """Raise `LostError` where it is known that the lock is lost."""

    def check(self) -> None:
        """Look whether the lock is held still; raise `LostError` where it is not."""


class Lease(NoLease):
    """The lock of one folder in the hands of this process."""

    def __init__(self, uri: str, run: str, now: Callable[[], float] = time.time) -> None:
        """Describe the lock of the folder `uri`; nothing is taken yet."""
        self._uri = uri
        self._now = now
        self._own = LeaseHolder(
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
            storage.create_bytes(lease_uri(self._uri, number), self._content())
            # Of two at the same time, and where an answer was lost, the store knows who it was.
            after = holders(self._uri)
            if not self._is_own(after.get(number)):
                continue
            self._refuse_newcomers(number, after)
            if number < max(after):
                # Others came, counted on, and have gone since.
                storage.delete(lease_uri(self._uri, number))
                continue
            self._number = number
            for old in found:
                storage.delete(lease_uri(self._uri, old))

    def renew(self) -> None:
        """Say that the holder lives; raises `LostError`, or what the store says."""
        with self._one_at_a_time:
            self._look()
            self._own = replace(self._own, renewed=self._now())
            storage.write_bytes(lease_uri(self._uri, self._number), self._content())

    def require(self) -> None:
        """Raise `LostError` where it is known that the lock is lost."""
        if self._lost:
            raise LeaseLostError(self._lost)

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
            storage.write_bytes(lease_uri(self._uri, self._number), self._content())

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

    def _refuse_held(self, found: dict[int, LeaseHolder | None]) -> None:
        for holder in found.values():
            if holder is None:
                log.warning("the lock of %s cannot be read; it is taken over", self._uri)
            elif not self._is_free(holder):
                raise LeaseHeldError(self._uri, holder)
        newest = found.get(max(found, default=0))
        if newest and not newest.released and not self._is_same_job(newest):
            why = (
                "has ended" if newest.is_gone else f"was silent since {clock_time(newest.renewed)}"
            )
            log.warning("the lock of %s is taken over from %s, which %s", self._uri, newest, why)
            events.emit("lock_taken_over", uri=self._uri, holder=str(newest), reason=why)

    def _refuse_newcomers(self, number: int, after: dict[int, LeaseHolder | None]) -> None:
        """Give way to one that came in between, and counts from another number."""
        for other, holder in after.items():
            if other != number and holder and not self._is_free(holder):
                storage.delete(lease_uri(self._uri, number))
                raise LeaseHeldError(self._uri, holder)

    def _is_free(self, holder: LeaseHolder) -> bool:
        over = holder.released or self._now() >= holder.until or holder.is_gone
        return over or self._is_same_job(holder) or self._is_own(holder)

    def _is_same_job(self, holder: LeaseHolder) -> bool:
        return bool(holder.job) and holder.job == self._own.job

    def _is_own(self, holder: LeaseHolder | None) -> bool:
        return holder is not None and holder.token == self._own.token

    def _content(self) -> bytes:
        return json.dumps(asdict(self._own)).encode()


@contextmanager
def held(uri: str, run: str) -> Iterator[Lease]:
    """Hold the lock of the folder `uri` in this block, renewed on a thread of its own.

    Where the holder may be dead it is waited for, for as long as a lock lasts; see `lock_wait`. A
    life that ends so that another one begins again (`ClusterLostError`) leaves it to that one.

    Raises:
        HeldError: another job holds it.
        RunInterruptedError: SIGINT or SIGTERM came while it was waited for.
        UserError: the store does not work.
    """
    lock = Lease(uri, run)
    acquire_waiting(lock.acquire)
    over = threading.Event()
    threading.Thread(target=_keep_renewed, args=(lock, over), name="lock", daemon=True).start()
    try:
        yield lock
    except ClusterLostError:
        over.set()
        raise
    except BaseException:
        over.set()
        _release(lock)
        raise
    over.set()
    _release(lock)


def lease_environment() -> dict[str, str]:
    """Return the variables by which the tasks that this process starts share a lock."""
    return {VARIABLE: _job()}


def _keep_renewed(lock: Lease, over: threading.Event) -> None:
    while not over.wait(RENEW_SECONDS):
        try:
            lock.renew()
        except LeaseLostError as error:
            # The thread that trains stops at its next look.
            if not over.is_set():
                log.warning("%s", error)
            return
        # As long as this process trains it has to say so, whatever a client may raise.
        except Exception as error:
            log.warning("the lock is not renewed: %s", error)


def _release(lock: Lease) -> None:
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

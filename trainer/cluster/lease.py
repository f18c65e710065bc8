"""The lease of a checkpoint folder: only one job at a time writes there.

A lease is a lock that expires unless it is renewed. The lease is a file below the folder, such as
`.lock/000003.json`, created by a write that never replaces a file. The file with the highest number
holds the lease, unless it says `released` or was not renewed for `LEASE_SECONDS`. A new holder
first creates the file with the next number, so that a replaced holder always notices. Because the
clocks of machines may differ by hours, a lease that seems to have expired is watched for as long as
a holder needs to renew it.

When a killed task restarts immediately, perhaps on another machine, it finds its own earlier lease.
Examples are a retried step and a chief that Kubernetes restarts. Only a renewal shows that the
holder is alive, so `acquire_waiting` waits for a renewal or for the expiry.
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
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial

from flotilla.trainer import events, storage
from flotilla.trainer.runtime.errors import ClusterLostError, RunInterruptedError, UserError
from flotilla.trainer.runtime.json_records import make_time, parse_number, read_record
from flotilla.trainer.runtime.loop import Loop
from flotilla.trainer.runtime.signals import handle_interrupts
from flotilla.trainer.storage.local import is_gone, is_living, writer
from flotilla.trainer.storage.store import shorter_retry

FOLDER = ".lock"
LEASE_SECONDS = 120.0
RENEW_SECONDS = 20.0
# Time to watch an expired lease, in seconds. A live holder renews the lease twice in this time.
WATCH_SECONDS = 2 * RENEW_SECONDS
# Maximum time to retry a release at exit, in seconds. After that, the lease has to expire.
_RELEASE_SECONDS = 10.0
POLL_SECONDS = 2.0
# Time after which the file of an expired lease may be deleted, in seconds. It is long, because a
# holder that cannot reach the store, or whose clock is wrong, may still train.
ABANDONED_SECONDS = 24 * 3600.0
_SUFFIX = ".json"
log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LeaseHolder:
    """The holder of a lease according to its file. Times are in seconds since 1970.

    Attributes:
        token: unique to this holder.
        job: the job whose attempts share the lease. A new attempt takes it over immediately.
        writer: see `flotilla.trainer.storage.local.writer`.
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
        """The time at which the lease expires unless it is renewed."""
        return self.renewed + LEASE_SECONDS

    @property
    def is_abandoned(self) -> bool:
        """Whether the file may be deleted: its writer died, or the lease expired a day ago."""
        is_dead = is_gone(self.writer) and not self.released
        return is_dead or time.time() >= self.until + ABANDONED_SECONDS

    def __str__(self) -> str:
        """Return the run, the process and the machine for messages."""
        return f"run {self.run} (process {self.process} on {self.host})"


class LeaseHeldError(UserError):
    """Another job writes to the folder `uri`."""

    def __init__(self, uri: str, holder: LeaseHolder, watch: float = LEASE_SECONDS) -> None:
        """Build the message. `watch` is how long the holder should be watched, in seconds."""
        super().__init__(
            f"{holder} has been writing to {uri} since {clock_time(holder.started)} and holds the "
            f"lease at least until {clock_time(holder.until)}: wait until that run ends, or stop "
            "it; if it is already dead, try again after that time"
        )
        self.uri = uri
        self.holder = holder
        self.watch = watch


class LeaseLostError(UserError):
    """Another job holds the lease, or the lease was removed, so this job must stop writing."""


def holders(uri: str) -> dict[int, LeaseHolder | None]:
    """Return the lease holders below `uri` by number. The value is None for an unreadable file."""
    found: dict[int, LeaseHolder | None] = {}
    for name in storage.names(storage.join(uri, FOLDER)):
        if (number := parse_number(name.removesuffix(_SUFFIX))) is not None:
            try:
                data = storage.read_bytes(storage.join(uri, FOLDER, name))
            except storage.Missing:
                continue
            except storage.Corrupt:
                found[number] = None
            else:
                found[number] = read_record(LeaseHolder, data)
    return found


def remove_expired(uri: str) -> list[str]:
    """Delete the leases of dead holders, and leases that expired a day ago, and return their URIs.

    An unreadable file is kept: it blocks no job, and may belong to another program.
    """
    expired = [
        lease_uri(uri, number)
        for number, holder in holders(uri).items()
        if holder and holder.is_abandoned
    ]
    for each in expired:
        storage.delete(each)
    return expired


def lease_uri(uri: str, number: int) -> str:
    """Return the URI of the lease file with this number below the folder `uri`."""
    return storage.join(uri, FOLDER, f"{number:06d}{_SUFFIX}")


def clock_time(seconds: float) -> str:
    """Format a time given in seconds since 1970."""
    found = make_time(seconds)
    return f"{found:%Y-%m-%d %H:%M:%S} UTC" if found else f"{seconds:g} s after 1970"


class NoLease:
    """The lease of a task that does not publish, or whose folder has no other writer."""

    def require(self) -> None:
        """Raise `LeaseLostError` if the lease is known to be lost. Sends no request."""

    def check(self) -> None:
        """Read the store, and raise `LeaseLostError` if the lease is no longer held."""


class Lease(NoLease):
    """The lease of one folder, for this process."""

    def __init__(self, uri: str, run: str, now: Callable[[], float] = time.time) -> None:
        """Store the arguments. `acquire` acquires the lease."""
        self._uri = uri
        self._now = now
        self._own = LeaseHolder(
            token=secrets.token_hex(8),
            job=os.environ.get(events.JOB, ""),
            run=run,
            host=socket.gethostname(),
            process=os.getpid(),
            writer=writer(),
            started=now(),
            renewed=now(),
        )
        self._number = 0
        self._dead: LeaseHolder | None = None
        self._lost = ""
        self._released = False
        self._mutex = threading.Lock()

    def acquire(self, dead: LeaseHolder | None = None) -> None:
        """Acquire the lease. Raises `LeaseHeldError` (another job holds it) or `UserError`.

        `dead` is a holder that did not renew the lease while it was watched.
        """
        self._dead = dead
        while not self._number:
            found = holders(self._uri)
            self._refuse_held(found)
            number = max(found, default=0) + 1
            # Set the start time only now, because the caller may have waited for the lease.
            self._own = replace(self._own, started=self._now(), renewed=self._now())
            storage.create_bytes(lease_uri(self._uri, number), self._content())
            # Read the files again, because another job may have written at the same time, or
            # the store's response may have been lost.
            after = holders(self._uri)
            if not self._is_own(after.get(number)):
                continue
            self._refuse_newcomers(number, after)
            if number < max(after):
                # Another holder has since used a higher number and released its lease.
                storage.delete(lease_uri(self._uri, number))
                continue
            self._number = number
            for old in found:
                storage.delete(lease_uri(self._uri, old))

    def renew(self) -> None:
        """Renew the lease. Raises `LeaseLostError`, or the store's error."""
        with self._mutex:
            self._read_holder()
            self._own = replace(self._own, renewed=self._now())
            storage.write_bytes(lease_uri(self._uri, self._number), self._content())

    def renew_or_end(self) -> bool:
        """Renew the lease, and return whether to keep renewing it."""
        try:
            self.renew()
        except LeaseLostError as error:
            # The training thread raises the error at its next call of `require`.
            if not self._released:
                log.warning("%s", error)
            return False
        return True

    def require(self) -> None:
        """Raise `LeaseLostError` if the lease is known to be lost. Sends no request."""
        if self._lost:
            raise LeaseLostError(self._lost)

    def check(self) -> None:
        """Read the store, and raise `LeaseLostError` if the lease is no longer held."""
        with self._mutex:
            self._read_holder()

    def release(self) -> None:
        """Release the lease. Raises `LeaseLostError` if it is lost.

        The file is kept, and the next holder uses the next number, so that a late write by this
        holder cannot replace the file of the next holder.
        """
        with self._mutex:
            self._read_holder()
            self._lost = f"the lease of {self._uri} was released"
            self._released = True
            self._own = replace(self._own, renewed=self._now(), released=True)
            storage.write_bytes(lease_uri(self._uri, self._number), self._content())

    def _read_holder(self) -> None:
        self.require()
        found = holders(self._uri)
        newest = max(found, default=0)
        # If the file of this lease is unreadable, the next renewal rewrites it.
        readable = found.get(self._number)
        if newest == self._number and (readable is None or self._is_own(readable)):
            return
        what = f"the lease of {self._uri} was deleted or replaced"
        remedy = "make sure that no other run writes there, and start this run again"
        if who := found.get(newest):
            what = f"{who} took over {self._uri}"
            remedy = "decide which of the two runs should continue, and stop the other"
        self._lost = f"{what}; run {self._own.run} stops writing: {remedy}"
        self.require()

    def _refuse_held(self, found: dict[int, LeaseHolder | None]) -> None:
        for holder in found.values():
            if holder is None:
                log.warning("taking over the lease of %s, because it cannot be read", self._uri)
            elif not self._is_free(holder):
                is_over = self._now() >= holder.until
                watch = WATCH_SECONDS if is_over else LEASE_SECONDS
                raise LeaseHeldError(self._uri, holder, watch)
        newest = found.get(max(found, default=0))
        if newest and not newest.released and not self._is_same_job(newest):
            renewed = f"last renewed it at {clock_time(newest.renewed)}"
            why = "has ended" if is_gone(newest.writer) else renewed
            log.warning("taking over the lease of %s from %s, which %s", self._uri, newest, why)
            events.emit(events.LeaseTakenOver(uri=self._uri, holder=str(newest), reason=why))

    def _refuse_newcomers(self, number: int, after: dict[int, LeaseHolder | None]) -> None:
        for other, holder in after.items():
            if other != number and holder and not self._is_free(holder):
                storage.delete(lease_uri(self._uri, number))
                raise LeaseHeldError(self._uri, holder)

    def _is_free(self, holder: LeaseHolder) -> bool:
        is_old = self._now() >= holder.until + ABANDONED_SECONDS
        over = holder.released or is_old or is_gone(holder.writer)
        return over or holder == self._dead or self._is_same_job(holder) or self._is_own(holder)

    def _is_same_job(self, holder: LeaseHolder) -> bool:
        return bool(holder.job) and holder.job == self._own.job

    def _is_own(self, holder: LeaseHolder | None) -> bool:
        return holder is not None and holder.token == self._own.token

    def _content(self) -> bytes:
        return json.dumps(asdict(self._own)).encode()


def acquire_waiting(
    acquire: Callable[[LeaseHolder | None], None], pause: Callable[[float], None] = time.sleep
) -> None:
    """Retry `acquire` while it raises `LeaseHeldError` and the lease holder may be dead.

    A holder is considered dead if it does not renew the lease while it is watched, regardless of
    its clock. A lease that has expired by this machine's clock is watched for a shorter time.
    Raises `RunInterruptedError`, `UserError`, or `LeaseHeldError` if the holder is alive or another
    job was faster.
    """
    first: LeaseHolder | None = None
    waited, watch = 0.0, LEASE_SECONDS
    while refused := _refusal(partial(acquire, first if waited > watch else None)):
        holder, watch = refused.holder, refused.watch if first is None else watch
        if is_living(holder.writer) or holder != (first or holder):
            raise refused
        interrupts: list[None] = []
        # Only record an interrupt here: logging would swallow an exception of a signal handler.
        with handle_interrupts(partial(interrupts.append, None)):
            if first is None:
                until = clock_time(holder.until)
                log.warning(
                    "waiting for the lease of %s: %s may be dead, but holds it until %s",
                    refused.uri,
                    holder,
                    until,
                )
                events.emit(events.LeaseAwaited(uri=refused.uri, holder=str(holder), until=until))
            pause(POLL_SECONDS)
        if interrupts:
            raise RunInterruptedError(
                f"interrupted; {holder} may still hold the lease of {refused.uri}"
            )
        first = holder
        waited += POLL_SECONDS


def _refusal(acquire: Callable[[], None]) -> LeaseHeldError | None:
    try:
        acquire()
    except LeaseHeldError as error:
        return error
    return None


@contextmanager
def hold_lease(uri: str, run: str) -> Iterator[Lease]:
    """Hold the lease of the folder `uri` in this block, and renew it in a thread.

    For errors, see `acquire_waiting`. An attempt that ends with `ClusterLostError` does not release
    the lease, which the next attempt takes over.
    """
    lease = Lease(uri, run)
    acquire_waiting(lease.acquire)
    # If the store fails, the loop logs the error and tries again after the interval.
    renewal = Loop(
        lease.renew_or_end, RENEW_SECONDS, name="lease", failing="cannot renew the lease"
    ).start()
    is_over = True
    try:
        yield lease
    except ClusterLostError:
        is_over = False
        raise
    finally:
        renewal.stop()
        if is_over:
            _release(lease)


@cache
def lease_environment() -> dict[str, str]:
    """Return the environment variables that let the tasks of this process share a lease."""
    return {events.JOB: f"launch {secrets.token_hex(8)}"}


def _release(lease: Lease) -> None:
    # If the release fails, only log that, so that the error that ended the block is raised.
    try:
        with shorter_retry(_RELEASE_SECONDS):
            lease.release()
    except UserError as error:
        log.warning("%s", error)

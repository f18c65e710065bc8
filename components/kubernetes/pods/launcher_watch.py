"""Watches the launcher through the lease of the job, in the guard of the leading task.

An annotation on the lease asks the guard to end the job. If the lease is not renewed in time, the
guard assumes that the launcher is dead, and ends the job. Time in which the lease cannot be read
does not count. If the lease was never renewed, the guard waits twice as long, because a launcher
that cannot renew its lease ends the job itself. The guard never ends a job without a lease, because
no launcher has created such a job.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.names import Tree
from flotilla.trainer import events
from flotilla.trainer.runtime.background import Loop
from flotilla.trainer.runtime.errors import UserError

log = logging.getLogger(__name__)
# Number of times that the lease is read within the heartbeat limit.
READS_PER_LIMIT = 10
# If the lease was never renewed, the guard waits for this multiple of the limit. A launcher that is
# alive ends such a job itself within one limit.
UNRENEWED_LIMITS = 2


class Ending(Protocol):
    """An object that can end the job: a guard, or the `Reaction` of an agent."""

    def end_job(self, reason: str) -> None:
        """End the task and the job. The termination message includes the reason."""


class HeartbeatAge:
    """Measures for how many seconds the heartbeat has been readable without a change."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Store a monotonic clock."""
        self._clock = clock
        self._heartbeat = ""
        self._read_at: float | None = None
        self._seconds = 0.0

    def read(self, heartbeat: str) -> float:
        """Record the current heartbeat, and return its age in seconds."""
        now = self._clock()
        if heartbeat != self._heartbeat:
            self._heartbeat, self._seconds = heartbeat, 0.0
        elif self._read_at is not None:
            self._seconds += now - self._read_at
        self._read_at = now
        return self._seconds

    def unreadable(self) -> None:
        """Pause the measurement until the heartbeat is readable again."""
        self._read_at = None


def start(guard: Ending, watched: Mapping[str, Any]) -> None:
    """Watch the launcher of this job in a thread. `watched` is the parsed launcher variable."""
    threading.Thread(target=_watch, args=(guard, watched), daemon=True).start()


def delete_job(watched: Mapping[str, Any]) -> None:
    """Try to delete the job. If this fails, the failure of the leading task ends the job."""
    from flotilla.components.kubernetes.api.client import (
        Api,
        RefusedError,
        UnreachableError,
        connect,
    )
    from flotilla.components.kubernetes.names import Resource

    with suppress(UserError, RefusedError, UnreachableError):
        Api(connect(), watched["namespace"]).delete(Resource(*watched["kind"]), watched["job"])


def _watch(guard: Ending, watched: Mapping[str, Any]) -> None:
    # The import is slow, and the task must not wait for it.
    from flotilla.components.kubernetes.api.client import Api, connect

    try:
        api = Api(connect(), watched["namespace"])
    except UserError as error:
        events.emit(events.LauncherUnwatched(reason=str(error)))
        return
    _watch_for_stop(guard, api, watched["job"])
    limit = float(watched["seconds"])
    look = partial(_look, guard, api, watched["job"], limit, HeartbeatAge())
    if look():
        pause = limit / READS_PER_LIMIT
        failing = "cannot read the launcher's heartbeat"
        Loop(look, pause, name="launcher", failing=failing).start()


def _watch_for_stop(guard: Ending, api: Any, job: str) -> None:
    """Start a thread that ends the task as soon as the lease has the stop annotation."""
    from flotilla.components.kubernetes.api.client import Watch
    from flotilla.components.kubernetes.names import LEASES

    def see(lease: Tree, deleted: bool) -> None:
        if not deleted and is_stop_requested(lease):
            watch.stopped.set()
            log.warning(names.STOPPING)
            guard.end_job("")

    def refuse(error: Exception) -> None:
        log.warning(
            "cannot watch for a cancellation; a cancelled job may not save a last checkpoint: %s",
            error,
        )

    watch = Watch(api, LEASES, {"fieldSelector": f"metadata.name={job}"}, see, refuse)
    watch.start()


def is_stop_requested(lease: Tree) -> bool:
    """Return whether the stop request on a lease is meant for the job that owns the lease."""
    metadata = lease["metadata"]
    owners = [owner["uid"] for owner in metadata.get("ownerReferences") or []]
    return (metadata.get("annotations") or {}).get(names.STOP) in owners


def _look(guard: Ending, api: Any, job: str, limit: float, age: HeartbeatAge) -> bool:
    """End the task if the launcher's heartbeat is too old, and return whether to continue."""
    from flotilla.components.kubernetes.api.client import RefusedError, UnreachableError
    from flotilla.components.kubernetes.heartbeat import is_renewed, read_heartbeat
    from flotilla.components.kubernetes.names import LEASES

    try:
        lease = api.get(LEASES, job)
        if is_stop_requested(lease):
            # If the API has refused the watch, only this check detects the stop request.
            guard.end_job("")
            return False
        limits = 1 if is_renewed(lease) else UNRENEWED_LIMITS
        if age.read(read_heartbeat(lease)) >= limits * limit:
            reason = f"no heartbeat from the launcher for {limits * limit:g} s"
            log.warning("%s: training ends", reason)
            guard.end_job(reason)
            return False
    except RefusedError as error:
        if error.code == HTTPStatus.FORBIDDEN:
            events.emit(events.LauncherUnwatched(reason=str(error)))
            return False
        age.unreadable()
    except UnreachableError:
        age.unreadable()
    except Exception:
        # A proxy may have responded with a web page, for example. The loop continues, and the time
        # until the next successful read does not count.
        age.unreadable()
        raise
    return True

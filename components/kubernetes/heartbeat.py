"""The heartbeat of a launcher: a lease that has the job's name and is owned by the job.

An annotation on the job would not work. While the job's controller is down, the job can be read but
not written, and the guard of a healthy run would consider its launcher dead.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from http import HTTPStatus

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.client import (
    Api,
    RefusedError,
    UnreachableError,
    call_with_retry,
    describe_foreign_deletion,
    describe_refusal,
)
from flotilla.components.kubernetes.names import LEASES, JobKind, Tree
from flotilla.trainer.config.cluster import DeadlinesConfig
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.loop import Loop

log = logging.getLogger(__name__)
# Minimum number of heartbeats per lease duration. With this number, a job is not mistaken for an
# orphan if a few heartbeats are lost.
HEARTBEATS = 10
MAX_HEARTBEAT_SECONDS = 20.0
# Maximum number of attempts to take the lease. An attempt fails if another process changes the
# lease, or if the lease is deleted with an earlier job.
_ATTEMPTS = 5
_CHANGED = (HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)


class TakenOverError(UserError):
    """Another launcher has taken over the lease, and with it the job."""


class Heartbeat:
    """Renews the lease of a job until `stop` is called."""

    def __init__(
        self,
        api: Api,
        kind: JobKind,
        limit: float,
        on_refused: Callable[[RefusedError | TakenOverError], None],
    ) -> None:
        """Prepare to renew the lease at least `HEARTBEATS` times in every `limit` seconds.

        After `limit` seconds without renewal, the guard ends the job. `on_refused` is called if the
        API refuses heartbeats for half of that time, or if another launcher has the lease.
        """
        self._api, self._kind, self._limit = api, kind, limit
        interval = min(limit / HEARTBEATS, MAX_HEARTBEAT_SECONDS)
        self._loop = Loop(self._beat, interval, name="heartbeat", failing="cannot send a heartbeat")
        # After this many consecutive refusals, the launcher gives up and reports the refusal.
        self._most_refusals = limit / 2 / interval
        self._refusals = 0
        self._on_refused = on_refused
        self._holder = f"flotilla-launcher-{secrets.token_hex(4)}"
        self._job: Tree = {}
        self.is_taken_over = False

    def hold(self, job: Tree, limits: DeadlinesConfig, wait: Callable[[float], None]) -> None:
        """Take the lease of a job and renew it once. Raises `UserError`."""
        self._job = job
        seconds = min(limits.unreachable or self._limit, self._limit)
        try:
            call_with_retry(self._take, seconds, wait)
            renewed = call_with_retry(self._renew, seconds, wait)
        except RefusedError as error:
            name = job["metadata"]["name"]
            is_gone = error.is_missing and not error.is_unserved
            raise UserError(
                describe_foreign_deletion(name) if is_gone else describe_refusal(error, self._kind)
            ) from None
        if renewed["spec"].get("holderIdentity") != self._holder:
            raise UserError(
                f"the cluster changed the lease {job['metadata']['name']} after the launcher wrote "
                "it: exempt the lease from webhooks that modify objects in this namespace"
            )

    def start(self) -> None:
        """Start sending heartbeats."""
        self._loop.start()

    def stop(self) -> None:
        """Stop sending heartbeats."""
        self._loop.stop()

    def _beat(self) -> bool:
        try:
            self._renew(self._own_version())
            self._refusals = 0
        except TakenOverError as error:
            self.is_taken_over = True
            self._on_refused(error)
            return False
        except UnreachableError as error:
            log.debug("cannot send a heartbeat: %s", error)
        except RefusedError as error:
            if error.is_missing:
                return False
            # On a conflict, another launcher may have the lease. The next heartbeat detects this.
            if error.code != HTTPStatus.CONFLICT:
                return self._was_refused(error)
        return True

    def _was_refused(self, error: RefusedError) -> bool:
        # Retry first, because a refusal may be temporary.
        self._refusals += 1
        if self._refusals >= self._most_refusals:
            self._on_refused(error)
            return False
        if self._refusals == 1:
            log.warning("the API refused a heartbeat; retrying: %s", error)
        return True

    def _own_version(self) -> str:
        """Return the lease's resource version, or "" if it is missing. Raises `TakenOverError`."""
        name, uid = (self._job["metadata"][key] for key in ("name", "uid"))
        lease = self._api.find(LEASES, name)
        if lease is None:
            return ""
        owners = [each["uid"] for each in lease["metadata"].get("ownerReferences") or []]
        holder = (lease.get("spec") or {}).get("holderIdentity")
        if uid in owners and holder and holder != self._holder:
            raise TakenOverError(
                f"another launcher ({holder}) has taken over the job {name}; this launcher stops "
                f"watching it"
            )
        return str(lease["metadata"].get("resourceVersion", ""))

    def _take(self) -> None:
        for left in reversed(range(_ATTEMPTS)):
            try:
                self._try_to_take()
            except RefusedError as error:
                if error.is_unserved or error.code not in _CHANGED or not left:
                    raise
            else:
                return

    def _try_to_take(self) -> None:
        job = self._job["metadata"]
        now = _now()
        spec = {
            "holderIdentity": self._holder,
            "leaseDurationSeconds": round(self._limit),
            "acquireTime": now,
            "renewTime": now,
            "leaseTransitions": 0,
        }
        metadata = {
            "name": job["name"],
            "labels": names.own_labels(self._job),
            "ownerReferences": [self._kind.owner(self._job)],
        }
        tree = {"apiVersion": LEASES.api_version, "kind": "Lease"}
        try:
            self._api.create(LEASES, {**tree, "metadata": metadata, "spec": spec})
            return
        except RefusedError as error:
            if error.code != HTTPStatus.CONFLICT:
                raise
        found = self._api.get(LEASES, job["name"])
        if names.MANAGED not in (found["metadata"].get("labels") or {}):
            raise UserError(
                f"the lease {job['name']} does not belong to Flotilla; delete it, or rename "
                "the model"
            )
        spec["leaseTransitions"] = int((found.get("spec") or {}).get("leaseTransitions") or 0) + 1
        # Remove a stop request that was meant for an earlier job of this name.
        requested = (found["metadata"].get("annotations") or {}).get(names.STOP, job["uid"])
        stop = {names.STOP: None} if requested != job["uid"] else {}
        if found["metadata"].get("ownerReferences") == metadata["ownerReferences"]:
            # Leave out unchanged owners, because in some clusters (OpenShift, with the admission
            # plugin `OwnerReferencesPermissionEnforcement`), only users who may delete an object
            # may set its owners.
            del metadata["ownerReferences"]
        metadata |= {"uid": found["metadata"]["uid"], "annotations": stop}
        self._api.patch(LEASES, job["name"], {"metadata": metadata, "spec": spec})

    def _renew(self, version: str = "") -> Tree:
        """Renew the lease. If a `version` is given, the lease must still have this version."""
        name = self._job["metadata"]["name"]
        patch = {"spec": {"holderIdentity": self._holder, "renewTime": _now()}}
        known = {"metadata": {"resourceVersion": version}} if version else {}
        try:
            return self._api.patch(LEASES, name, {**patch, **known})
        except RefusedError as error:
            if not error.is_missing:
                raise
        # The lease was deleted, perhaps together with the job. If the job does not exist either,
        # the next call raises `RefusedError`.
        self._api.get(self._kind.resource, name)
        self._take()
        return self._api.patch(LEASES, name, patch)


def read_heartbeat(lease: Tree) -> str:
    """Return a value that changes with every renewal of a lease."""
    spec = lease.get("spec", {})
    return f"{spec.get('holderIdentity')} {spec.get('renewTime')}"


def is_renewed(lease: Tree) -> bool:
    """Return whether a lease has been renewed since a launcher took it."""
    spec = lease.get("spec", {})
    return bool(spec.get("renewTime") != spec.get("acquireTime"))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")

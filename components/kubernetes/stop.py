"""Stops a job early, after its chief has saved the variables of the servers.

The DNS names of pods disappear with the job, and then TensorFlow cannot open new channels.
Therefore the job is first asked to stop, and deleted only after its leading task has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.api.client import Api, RefusedError, UnreachableError
from flotilla.components.kubernetes.names import LEASES, PODS, JobKind, Tree
from flotilla.components.kubernetes.pods import pod_state
from flotilla.trainer.config.topology import Task

log = logging.getLogger(__name__)
# Seconds that the guard may take to respond to a stop request, and seconds between two checks.
ANSWER_SECONDS = 8.0
POLL_SECONDS = 0.5
# Kubernetes' default grace period, in seconds.
_GRACE_SECONDS = 30


class Stop:
    """Stops a job through the guard of its leading task. The guard watches the job's lease."""

    def __init__(self, kind: JobKind, job: Tree, leader: Task, template: Tree) -> None:
        """Store the job as returned by the API, its leading task, and the task's pod template."""
        self.kind = kind
        self.name, self.uid = job["metadata"]["name"], job["metadata"]["uid"]
        self._leader = leader
        pod = template.get("spec", {})
        self.grace = float(pod.get("terminationGracePeriodSeconds", _GRACE_SECONDS))

    def leader_runs(self, api: Api) -> bool:
        """Return whether the leading task runs or saves a checkpoint."""
        leader = self._leader_pod(api)
        return leader is not None and pod_state.is_alive(leader)

    def request(self, api: Api) -> None:
        """Ask the guard of the leading task to end training and then the job."""
        # The value is the job's uid, so that a later job of this name ignores the request.
        patch = {"metadata": {"annotations": {names.STOP: self.uid}}}
        api.patch(LEASES, self.name, patch, quick=True)

    def wait(self, api: Api, pause: Callable[[float], object]) -> None:
        """Wait until the leading task has ended, fails to end in time, or `pause` returns true."""
        began, limit = time.monotonic(), self.answer_seconds()
        while not pause(POLL_SECONDS):
            try:
                if self._is_gone(api) or self.has_ended(api):
                    return
                if time.monotonic() - began < limit:
                    continue
                if limit == ANSWER_SECONDS and self._is_answered(api):
                    limit += self.grace
                    continue
            except RefusedError as error:
                if error.is_missing:
                    return
                log.warning("cannot determine whether the leading task has ended: %s", error)
            except UnreachableError:
                if time.monotonic() - began < limit:
                    continue
            log.warning("the leading task of the job %s did not end in time", self.name)
            return

    def answer_seconds(self) -> float:
        """Return the seconds to wait for a sign that the leading task is ending."""
        return ANSWER_SECONDS

    def has_ended(self, api: Api) -> bool:
        """Return whether the leading task has ended."""
        leader = self._leader_pod(api)
        return leader is None or pod_state.has_ended(leader)

    def pods(self, api: Api) -> list[Tree]:
        """Return the pods of the job."""
        return api.list_labelled(PODS, self.kind.selector(self.name))

    def _is_gone(self, api: Api) -> bool:
        metadata = api.get(self.kind.resource, self.name)["metadata"]
        return metadata["uid"] != self.uid or bool(metadata.get("deletionTimestamp"))

    def _leader_pod(self, api: Api) -> Tree | None:
        role = f"{names.APP}component={self._leader.role}"
        pods = api.list_labelled(PODS, f"{self.kind.selector(self.name)},{role}")
        return pod_state.newest(pods).get(self._leader)

    def _is_answered(self, api: Api) -> bool:
        leader = self._leader_pod(api)
        if leader is None:
            return False
        seconds = round(max(self.grace, 2 * ANSWER_SECONDS))
        # A trainer's guard logs in the task's container. A program's agent logs in the sidecar,
        # which is the last container of the list.
        container = pod_state.logging_containers(leader)[-1]
        recent = api.recent_log(leader["metadata"]["name"], seconds, container)
        return any(names.STOPPING in line for line in recent)


class SuspendingStop(Stop):
    """Stops a job by suspending it: its tasks receive SIGTERM, and their DNS names remain.

    The guard is asked to end the job too, in case the launcher is killed or the controller is down.
    """

    def __init__(self, kind: JobKind, job: Tree, leader: Task, template: Tree) -> None:
        """Store the job as returned by the API, its leading task, and the task's pod template."""
        super().__init__(kind, job, leader, template)
        self._is_suspended = bool(job["spec"].get("suspend"))

    def request(self, api: Api) -> None:
        """Suspend the job, and add the stop request to it."""
        metadata = {"uid": self.uid, "annotations": {names.STOP: self.uid}}
        patch = {"metadata": metadata, "spec": {"suspend": True}}
        try:
            api.patch(self.kind.resource, self.name, patch, quick=True)
            self._is_suspended = True
        except UnreachableError:
            # Without the suspension, only the leading task receives a signal, from its guard.
            self._is_suspended = False
            super().request(api)
            return
        with suppress(RefusedError, UnreachableError):
            super().request(api)

    def answer_seconds(self) -> float:
        """Return the seconds to wait. A suspended job also gets the grace period of its tasks."""
        return ANSWER_SECONDS + self.grace if self._is_suspended else ANSWER_SECONDS

    def has_ended(self, api: Api) -> bool:
        """Return whether the leading task or, if the job is suspended, every pod has ended."""
        if not self._is_suspended:
            return super().has_ended(api)
        return all(pod_state.has_ended(pod) for pod in self.pods(api))


def is_requested(api: Api, job: Tree) -> bool:
    """Return whether a stop of the job was requested, on the job itself or on its lease."""
    metadata = job["metadata"]
    if names.STOP in (metadata.get("annotations") or {}):
        return True
    try:
        lease = api.get(LEASES, metadata["name"])["metadata"]
    except RefusedError:
        return False
    return (lease.get("annotations") or {}).get(names.STOP) == metadata["uid"]

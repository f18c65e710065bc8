"""The interface of an engine, which creates, reads and stops one kind of Kubernetes job."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from flotilla.components.image import DEFAULTS, PodDefaults
from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.client import Api, RefusedError, UnreachableError
from flotilla.components.kubernetes.names import LEASES, PODS, JobKind, Tree
from flotilla.components.kubernetes.pods import pod_state, program
from flotilla.components.kubernetes.pods.pod_state import TaskEnd
from flotilla.components.kubernetes.pods.template import Place, labels, launcher_variables
from flotilla.trainer import storage
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.cluster import Launcher
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Task
from flotilla.trainer.tracking import addresses

log = logging.getLogger(__name__)
# Seconds that the guard may take to respond to a stop request, and seconds between two checks.
ANSWER_SECONDS = 8.0
POLL_SECONDS = 0.5
# Kubernetes' default grace period, in seconds.
_GRACE_SECONDS = 30
# Placeholders in a manifest for values that are known only in a run.
_RUN_ID, _DATASET, _ROOT = "RUN-ID", "DATASET", "gs://BUCKET"


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How a job ended. `roles` are the roles with a failed task, according to the controller."""

    is_done: bool
    message: str = ""
    is_past_deadline: bool = False
    roles: frozenset[str] = frozenset()


class Stop:
    """Stops a job through the guard of its leading task. The guard watches the job's lease.

    The DNS names of pods disappear with the job, and then TensorFlow cannot open new channels.
    Therefore the job is first asked to stop, and deleted only after its leading task has ended.
    """

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
        pods = api.list_labelled(PODS, self.kind.selector(self.name))
        return all(map(pod_state.has_ended, pods))


def is_stop_requested(api: Api, job: Tree) -> bool:
    """Return whether a stop of the job was requested, on the job itself or on its lease."""
    metadata = job["metadata"]
    if names.STOP in (metadata.get("annotations") or {}):
        return True
    try:
        lease = api.get(LEASES, metadata["name"])["metadata"]
    except RefusedError:
        return False
    return (lease.get("annotations") or {}).get(names.STOP) == metadata["uid"]


class Engine(ABC):
    """Interface to one kind of Kubernetes job.

    Attributes:
        name: the value of `cluster.launcher` for the engine.
        kind: the kind of job that the engine creates.
        is_strict: whether the API should refuse unknown fields of a job.
        fails_with_a_pod: whether the loss of a pod fails the whole job. If not, the controller
            replaces the pod. A call of `bring_back` makes it do so immediately.
    """

    name: ClassVar[Launcher]
    kind: ClassVar[JobKind]
    is_strict: ClassVar[bool]
    fails_with_a_pod: ClassVar[bool]

    def check(self, config: Config) -> None:
        """Raise a `ConfigError` for a setting that this kind of job does not support."""
        program.check(config)

    def manifest(self, job: Job, place: Place) -> Tree:
        """Return the manifest for training `job`. Equal arguments give equal manifests."""
        config, settings = job.config, job.config.cluster.kubernetes
        queue = {names.KUEUE: settings.job.queue_name} if settings.job.queue_name else {}
        name = names.job_name(config.name, job.checkpoints)
        namespace = settings.namespace or place.namespace
        watched = launcher_variables(config, self.kind, name, namespace)
        own = labels(job, "training", self.name)
        return _add_digest(
            {
                "apiVersion": self.kind.resource.api_version,
                "kind": self.kind.kind,
                "metadata": {
                    "name": name,
                    **({"namespace": namespace} if namespace else {}),
                    "labels": {**settings.job.labels, **queue, **own},
                    "annotations": dict(settings.job.annotations),
                },
                "spec": self.spec(
                    job, name, replace(place, variables={**place.variables, **watched})
                ),
            }
        )

    @abstractmethod
    def spec(self, job: Job, name: str, place: Place) -> Tree:
        """Return the `spec` of the manifest of a job with this name."""

    @abstractmethod
    def templates(self, tree: Tree) -> dict[str, Tree]:
        """Return a job's pod templates, keyed by role."""

    @abstractmethod
    def owns(self, uid: str, pod: Tree) -> bool:
        """Return whether a pod belongs to the job with this uid, and not to an earlier one."""

    @abstractmethod
    def is_taken_up(self, tree: Tree) -> bool:
        """Return whether the controller has reacted to a job."""

    @abstractmethod
    def is_suspended(self, tree: Tree) -> bool:
        """Return whether a job is suspended, for example until Kueue admits it."""

    @abstractmethod
    def end(self, tree: Tree) -> JobEnd | None:
        """Return how the job ended, or None if it has not ended."""

    def is_failing(self, _api: Api, tree: Tree, /) -> bool:
        """Return whether an unfinished job is about to fail and its pods are being deleted."""
        return self.end(tree) is not None

    def failure(self, _api: Api, tree: Tree, /) -> JobEnd:
        """Return the reason for a failure, with all details from the API."""
        return self.end(tree) or JobEnd(is_done=False)

    @abstractmethod
    def is_final(self, config: Config, end: TaskEnd, /) -> bool:
        """Return whether this exit of a task fails the job instead of restarting the task."""

    def stop(self, tree: Tree) -> Stop:
        """Return the operation that stops a job after a last checkpoint."""
        templates = self.templates(tree)
        role = "chief" if "chief" in templates else "worker"
        stop = SuspendingStop if self.may_suspend(tree) else Stop
        return stop(self.kind, tree, Task(role=role, index=0), templates.get(role, {}))

    def may_suspend(self, _tree: Tree, /) -> bool:
        """Return whether a suspension stops the job and lets it save a last checkpoint."""
        return False

    def bring_back(self, _api: Api, _pod: Tree, /) -> set[str]:
        """Make the controller replace a lost pod immediately. Return the uids of deleted Jobs."""
        return set()

    def reporters(self, _api: Api, tree: Tree, /) -> Sequence[str]:
        """Return the uids of the objects whose events explain missing pods."""
        return [tree["metadata"]["uid"]]


def document(engine: Engine, config: Config, defaults: PodDefaults = DEFAULTS) -> Tree:
    """Return the manifest of `config`, with placeholders for values that only a run has."""
    root = config.storage.root or _ROOT
    job = Job(
        config=config,
        dataset=storage.join(root, "datasets", _DATASET),
        checkpoints=storage.join(root, _RUN_ID, "checkpoints"),
        workdir=Path(),
    )
    return engine.manifest(job, Place(namespace="", defaults=defaults))


def _add_digest(tree: Tree) -> Tree:
    """Add the digest of a job as an annotation. A retry adopts a job with the same digest.

    The digest excludes the label of isolated pods and the tracker's variables, which may differ
    between two attempts of the same step.
    """
    digest = hashlib.sha256(json.dumps(_drop_tracker(tree), sort_keys=True).encode()).hexdigest()
    metadata = tree["metadata"]
    annotations = {**metadata["annotations"], names.MANIFEST: digest}
    return {**tree, "metadata": {**metadata, "annotations": annotations}}


def _drop_tracker(value: Any) -> Any:
    if isinstance(value, list):
        return [_drop_tracker(each) for each in value if not _is_of_tracker(each)]
    if isinstance(value, dict):
        return {name: _drop_tracker(each) for name, each in value.items()}
    return value


def _is_of_tracker(value: Any) -> bool:
    return isinstance(value, dict) and value.get("name") in addresses.VARIABLES


def condition(tree: Tree, kind: str) -> Tree | None:
    """Return the job's condition with the type `kind`, such as `Failed`; None if not true."""
    every = tree.get("status", {}).get("conditions") or []
    true = (each for each in every if each["type"] == kind and each["status"] == "True")
    found: Tree | None = next(true, None)
    return found


def condition_message(found: Tree) -> str:
    """Return the message of a condition in one line."""
    return " ".join(str(found.get("message", "")).split())

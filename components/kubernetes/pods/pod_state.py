"""Interprets the status of a pod: pure functions of API objects, for any kind of job."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from flotilla.components.kubernetes.names import AGENT, CONTAINER, INDEX_LABELS, ROLE_LABELS, Tree
from flotilla.trainer.config.topology import Task
from flotilla.trainer.runtime.errors import DONE
from flotilla.trainer.runtime.json_records import parse_number, parse_time

QUEUEING, STARTING, RUNNING = "queueing", "starting", "running"
_SIGNAL_BASE = 128
# Signals that exit codes above 128 stand for, except for Flotilla's own codes 130 and 138.
_SIGNALS = (
    signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL,
)  # fmt: skip
# Reasons that the kubelet sets when it cannot create a container. It retries with back-off.
MALFORMED = "InvalidImageName"
_START_FAILURES = (
    MALFORMED, "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "ImageInspectError",
    "RegistryUnavailable", "CreateContainerConfigError", "CreateContainerError",
    "RunContainerError",
)  # fmt: skip
# The kubelet's reason if a container keeps exiting. It counts as a start failure only for a
# sidecar, because the program does not start before its sidecar runs.
_CRASHES = "CrashLoopBackOff"
# Waiting reasons of a container that is starting normally.
_USUAL = ("ContainerCreating", "PodInitializing")
_ENDED_PHASES = ("Succeeded", "Failed")
# Descriptions of disruptions, by the reason of the condition `DisruptionTarget`.
_DISRUPTIONS = {
    "EvictionByEvictionAPI": "evicted",
    "PreemptionByScheduler": "preempted",
    "DeletionByTaintManager": "deleted because of a taint on its node",
    "DeletionByPodGC": "deleted after the loss of its node",
    "TerminationByKubelet": "evicted",
}


@dataclass(frozen=True, kw_only=True)
class TaskEnd:
    """How a container of a task ended.

    Attributes:
        restart_count: number of earlier restarts of the container in this pod.
        code: exit code; None if the pod was lost without one.
        message: last line of the termination message, or the node's message.
        pod_deleted: whether the deletion of the pod was requested before the container ended.
    """

    task: Task
    pod: str
    uid: str
    restart_count: int
    code: int | None
    reason: str
    message: str
    pod_deleted: bool

    @property
    def is_done(self) -> bool:
        """Whether the task has ended on its own with exit code 0."""
        return self.code == DONE and not self.pod_deleted

    @property
    def cause(self) -> str:
        """A short description of why the task ended."""
        if self.reason == "OOMKilled":
            return f"out of memory (OOMKilled, exit code {self.code})"
        if self.code is None:
            reason = self.reason.lower() or "loss of its pod"
            return f"{reason}: {self.message}" if self.message else reason
        return describe_exit(self.code)


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A deleted, evicted or preempted pod. `explained` is true if Kubernetes gives a reason."""

    task: Task
    pod: str
    uid: str
    how: str
    explained: bool
    requested: datetime | None
    version: int

    @property
    def cause(self) -> str:
        """The cause of the loss, for the report of a restart."""
        return f"loss of its pod: {self.how}"


def describe_exit(code: int) -> str:
    """Describe an exit code. If it stands for a signal, name the signal."""
    number = code - _SIGNAL_BASE
    if number in _SIGNALS:
        return f"exit code {code} (signal {signal.Signals(number).name})"
    return f"exit code {code}"


def loss(pod: Tree, *, is_absent: bool = False) -> Loss | None:
    """Return how a pod was lost, or None if it was not lost. An absent pod no longer exists."""
    status = pod.get("status", {})
    true = [each for each in status.get("conditions") or [] if each["status"] == "True"]
    target: Tree = next((each for each in true if each["type"] == "DisruptionTarget"), {})
    evicted = _phase(pod) == "Failed" and status.get("reason")
    requested = _deletion_requested(pod)
    if not (target or evicted or requested or is_absent):
        return None
    reason = str(target.get("reason") or evicted or "")
    how = _DISRUPTIONS.get(reason, "deleted" if requested or is_absent else "evicted")
    return Loss(
        task=find_task(pod),
        pod=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        how=f"{how} ({reason})" if reason else how,
        explained=bool(reason),
        requested=requested,
        version=_version(pod),
    )


def first_loss(losses: Iterable[Loss]) -> Loss | None:
    """Return the loss that caused the others: the earliest with a reason, or else the earliest."""
    latest = datetime.max.replace(tzinfo=UTC)
    return min(
        losses,
        key=lambda each: (not each.explained, each.requested or latest, each.version),
        default=None,
    )


def find_task(pod: Tree) -> Task:
    """Return the task that a pod runs."""
    labels = pod["metadata"]["labels"]
    role, index = (
        next(labels[name] for name in each if name in labels)
        for each in (ROLE_LABELS, INDEX_LABELS)
    )
    return Task(role=role, index=int(index))


def newest(pods: Iterable[Tree]) -> dict[Task, Tree]:
    """Return the newest pod of each task. Prefer pods that are not being deleted."""
    found: dict[Task, Tree] = {}
    for pod in sorted(pods, key=_age):
        found[find_task(pod)] = pod
    return found


def is_owned_by(pod: Tree, uid: str) -> bool:
    """Return whether a pod belongs to the job with this uid, and not to an earlier one."""
    return uid in [owner["uid"] for owner in pod["metadata"].get("ownerReferences") or []]


def logging_containers(pod: Tree) -> list[str]:
    """Return the containers whose logs are read: the task's, and the sidecar of a program."""
    sidecars = [each["name"] for each in pod["spec"].get("initContainers") or []]
    return [CONTAINER, *([AGENT] if AGENT in sidecars else [])]


def restart_count(pod: Tree, container: str = CONTAINER) -> int:
    """Return how often the kubelet has restarted a container in its pod."""
    return int(_container(pod, container).get("restartCount", 0))


def has_started(pod: Tree, container: str = CONTAINER) -> bool:
    """Return whether a container runs or has run."""
    container_state = _container(pod, container).get("state", {})
    return "running" in container_state or "terminated" in container_state


def has_ended(pod: Tree, container: str = CONTAINER) -> bool:
    """Return whether a container has terminated and has not been restarted."""
    state = _container(pod, container).get("state", {})
    return "terminated" in state or _phase(pod) in _ENDED_PHASES


def is_alive(pod: Tree) -> bool:
    """Return whether the task's container runs, even if its pod is being deleted."""
    return has_started(pod) and not has_ended(pod)


def ends(pod: Tree) -> list[TaskEnd]:
    """Return the last exits of the task's container. A pod's status shows at most two."""
    container = _container(pod)
    current, previous = (container.get(key, {}).get("terminated") for key in ("state", "lastState"))
    count = restart_count(pod)
    found = [_end(pod, previous, count - 1)] if previous and count else []
    if current:
        found.append(_end(pod, current, count))
    elif _phase(pod) == "Failed":
        found.append(_end(pod, {}, count))
    return found


def end_by_deletion(pod: Tree) -> TaskEnd:
    """Return the end of a task whose pod was deleted before its status showed an exit."""
    return replace(
        _end(pod, {}, restart_count(pod)), reason="Deletion of its pod", pod_deleted=True
    )


def stage(pod: Tree) -> str:
    """Return the stage of a pod: queueing, starting or running."""
    if has_started(pod) or _phase(pod) in _ENDED_PHASES:
        return RUNNING
    return STARTING if pod["spec"].get("nodeName") else QUEUEING


def waiting_reason(pod: Tree) -> str:
    """Return Kubernetes' reason why a pod does not run, or an empty string."""
    waiting = _waiting(pod)
    if waiting:
        return ": ".join(filter(None, [waiting.get("reason"), waiting.get("message")]))
    for each in pod.get("status", {}).get("conditions") or []:
        if each["type"] == "PodScheduled" and each["status"] == "False":
            return str(each.get("message") or each.get("reason") or "")
    return ""


def waits_as_usual(pod: Tree) -> bool:
    """Return whether a pod is starting normally: pulling its image or mounting its volumes."""
    return _waiting(pod).get("reason") in _USUAL


def start_failure(pod: Tree) -> str:
    """Return why a pod cannot start, such as `ErrImagePull`, or an empty string."""
    reason = str(_waiting(pod).get("reason", ""))
    never = (*_START_FAILURES, _CRASHES) if _waits_for_agent(pod) else _START_FAILURES
    return reason if reason in never else ""


def is_older(pod: Tree, other: Tree) -> bool:
    """Return whether a pod was created before another one, with a resolution of one second."""
    made, then = (str(each["metadata"].get("creationTimestamp", "")) for each in (pod, other))
    return made < then


def _age(pod: Tree) -> tuple[bool, str, int]:
    metadata = pod["metadata"]
    created = str(metadata.get("creationTimestamp", ""))
    return not metadata.get("deletionTimestamp"), created, _version(pod)


def _phase(pod: Tree) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _waiting(pod: Tree) -> Tree:
    container = AGENT if _waits_for_agent(pod) else CONTAINER
    found: Tree = _container(pod, container).get("state", {}).get("waiting") or {}
    return found


def _waits_for_agent(pod: Tree) -> bool:
    own, agent = (_container(pod, name).get("state", {}) for name in (CONTAINER, AGENT))
    return own.get("waiting", {}).get("reason") in _USUAL and "waiting" in agent


def _container(pod: Tree, name: str = CONTAINER) -> Tree:
    status = pod.get("status", {})
    kinds = ("containerStatuses", "initContainerStatuses")
    every = [each for kind in kinds for each in status.get(kind) or []]
    found: Tree = next((each for each in every if each["name"] == name), {})
    return found


def _end(pod: Tree, terminated: Tree, count: int) -> TaskEnd:
    status = pod.get("status", {})
    # For an evicted pod, ignore the exit code and the message of its container.
    evicted = status.get("reason") or ""
    lines = str(terminated.get("message") or "").strip().splitlines()
    message = status.get("message", "") if evicted else (lines[-1] if lines else "")
    requested, code = _deletion_requested(pod), None if evicted else terminated.get("exitCode")
    finished = parse_time(terminated.get("finishedAt"))
    # Timestamps have a resolution of one second, so a failure in the same second as the deletion
    # request is assumed to have another cause.
    failed_before = finished == requested and code is not None and 0 < code < _SIGNAL_BASE
    by_deletion = requested and (not finished or finished >= requested) and not failed_before
    return TaskEnd(
        task=find_task(pod),
        pod=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        restart_count=count,
        code=code,
        reason=evicted or terminated.get("reason", ""),
        message=" ".join(message.split()),
        pod_deleted=bool(by_deletion),
    )


def _deletion_requested(pod: Tree) -> datetime | None:
    """Return when the deletion of a pod was requested: its deadline minus the grace period."""
    metadata = pod["metadata"]
    end = parse_time(metadata.get("deletionTimestamp"))
    return end and end - timedelta(seconds=int(metadata.get("deletionGracePeriodSeconds") or 0))


def _version(pod: Tree) -> int:
    return parse_number(str(pod["metadata"].get("resourceVersion", ""))) or 0

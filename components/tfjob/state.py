"""What the states of pods and jobs mean: pure functions from what the API says."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from components.tfjob import names
from components.tfjob.client import Tree
from components.tfjob.manifest import CONTAINER
from trainer.topology import Task

QUEUEING, STARTING, RUNNING = "queueing", "starting", "running"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How one start of a task has ended.

    Attributes:
        task: which one.
        pod: name of its pod.
        uid: of the pod.
        start: how often the container had been started in this pod before.
        code: exit code; None where the pod was lost without one.
        reason: Kubernetes' word, such as `OOMKilled` or `Evicted`.
        words: what the task, or the node, said last.
        taken_away: whether the pod was being deleted, by the end of the job or by somebody.
    """

    task: Task
    pod: str
    uid: str
    start: int
    code: int | None
    reason: str
    words: str
    taken_away: bool

    @property
    def cause(self) -> str:
        """Say in a few words what ended it."""
        if self.reason == "OOMKilled":
            return f"out of memory (OOMKilled, exit code {self.code})"
        if self.code is None:
            return f"{self.reason.lower() or 'loss of its pod'}" + (
                f": {self.words}" if self.words else ""
            )
        number = self.code - _BY_SIGNAL
        if number in _SIGNALS:
            return f"exit code {self.code} (signal {signal.Signals(number).name})"
        return f"exit code {self.code}"


_BY_SIGNAL = 128
# An exit code above 128 says a signal only where it is one that kills: 130 and 138 are Flotilla's.
_SIGNALS = (
    signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGILL,
)  # fmt: skip


def task_of(pod: Tree) -> Task:
    """Return which task a pod is."""
    labels = pod["metadata"]["labels"]
    return Task(role=labels[names.REPLICA_TYPE], index=int(labels[names.REPLICA_INDEX]))


def starts(pod: Tree) -> int:
    """Return how often the container of a pod has been started again in it."""
    return int(_container(pod).get("restartCount", 0))


def has_started(pod: Tree) -> bool:
    """Say whether the container runs or has run."""
    state = _container(pod).get("state", {})
    return "running" in state or "terminated" in state


def has_ended(pod: Tree) -> bool:
    """Say whether this start of the container is over."""
    return "terminated" in _container(pod).get("state", {}) or _phase(pod) in _OVER


def endings(pod: Tree) -> list[Ended]:
    """Return the ends that a pod tells of: of the start before this one, and of this one."""
    container = _container(pod)
    now, last = (container.get(key, {}).get("terminated") for key in ("state", "lastState"))
    count = starts(pod)
    found = [_ended(pod, last, count - 1)] if last and count else []
    if now:
        found.append(_ended(pod, now, count))
    elif _phase(pod) == "Failed":
        found.append(_ended(pod, {}, count))
    return found


def lost(pod: Tree) -> Ended:
    """Return the end of a pod that was taken away before it told of one."""
    ended = _ended(pod, {}, starts(pod))
    return replace(ended, reason="Deletion of its pod", taken_away=True)


def stage(pod: Tree) -> str:
    """Return how far a pod has come."""
    if has_started(pod) or _phase(pod) in _OVER:
        return RUNNING
    return STARTING if pod["spec"].get("nodeName") else QUEUEING


def hindrance(pod: Tree) -> str:
    """Return why a pod does not run, as Kubernetes says it, or nothing."""
    waiting = _container(pod).get("state", {}).get("waiting", {})
    if waiting:
        return ": ".join(filter(None, [waiting.get("reason"), waiting.get("message")]))
    for condition in pod.get("status", {}).get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason") or "")
    return ""


def condition(job: Tree, kind: str) -> Tree | None:
    """Return a condition of a job that is true, such as `Failed`."""
    for each in job.get("status", {}).get("conditions") or []:
        if each["type"] == kind and each["status"] == "True":
            found: Tree = each
            return found
    return None


def is_over(job: Tree) -> bool:
    """Say whether a job has succeeded or failed."""
    return bool(condition(job, "Succeeded") or condition(job, "Failed"))


_OVER = ("Succeeded", "Failed")


def _phase(pod: Tree) -> str:
    return str(pod.get("status", {}).get("phase", ""))


def _container(pod: Tree) -> Tree:
    for status in pod.get("status", {}).get("containerStatuses") or []:
        if status["name"] == CONTAINER:
            found: Tree = status
            return found
    return {}


def _ended(pod: Tree, terminated: Tree, start: int) -> Ended:
    status = pod.get("status", {})
    lost = status.get("reason") or ""
    lines = str(terminated.get("message") or "").strip().splitlines()
    # A pod that its node threw out is that, whatever its container made of the signal.
    words = status.get("message", "") if lost else (lines[-1] if lines else "")
    return Ended(
        task=task_of(pod),
        pod=pod["metadata"]["name"],
        uid=pod["metadata"]["uid"],
        start=start,
        code=None if lost else terminated.get("exitCode"),
        reason=lost or terminated.get("reason", ""),
        words=" ".join(words.split()),
        taken_away="deletionTimestamp" in pod["metadata"],
    )

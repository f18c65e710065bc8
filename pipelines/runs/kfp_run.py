"""A run on a KFP instance as the API returns it: states, steps, logs and the events in them.

The API returns the nodes of an Argo workflow. A step `train-model` is a node of this name next to
`train-model-driver`, and its pod is the node `executor` among its children; groups of steps have
drivers too. Nodes that have not begun are absent. Outputs of steps are not returned.

A step that KFP takes from its cache has a driver and a node that succeeded; its node `executor` was
skipped, and has the name of a pod that never existed.

The API server returns a log as a whole and does not follow it. The user interface returns it under
another path, and answers the API's path with its start page. When the pod is gone, both may have
the log from an archive, or not at all.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from pipelines.runs.kfp_client import Client, InstanceError, ask, is_id, pages
from pipelines.runs.upload import NEWEST, equals
from trainer.errors import UserError
from trainer.events import Event, parse

ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
_DRIVER = "-driver"
_GROUP = re.compile(r"root|(exit-handler|condition|condition-branches|for-loop|iteration\S*)-\d+")
_EXECUTOR, _TRY = re.compile(r"executor(\(\d+\))?"), re.compile(r"executor\(\d+\)")
# Argo puts the template of a node into the name of its pod.
_TEMPLATES = ("system-container-impl", "retry-system-container-impl")
_EPOCH = 1970


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a run.

    Attributes:
        state: KFP's own word.
        pods: names that its pod could have, the likeliest first; none where it is cached.
        cached: whether KFP took its outputs from the cache, so that none of its code ran.
    """

    name: str
    state: str
    began: datetime | None
    ended: datetime | None
    pods: tuple[str, ...]
    cached: bool = False

    @property
    def seconds(self) -> float:
        """How long it has taken, until now if it is running."""
        if self.began is None:
            return 0.0
        return max(((self.ended or datetime.now(UTC)) - self.began).total_seconds(), 0.0)


@dataclass(frozen=True, kw_only=True)
class RemoteRun:
    """One run; `error` is one line, empty where the instance gives none."""

    run_id: str
    name: str
    state: str
    created: datetime | None
    finished: datetime | None
    error: str
    steps: tuple[Step, ...]

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self.state in ENDED


def run_of(client: Client, run: str) -> RemoteRun:
    """Return a run by its id, or by its name where that is one run's; raises `UserError`."""
    if is_id(run.lower()):
        return view(ask(client.get_run, run_id=run.lower()))
    listed = pages(client.list_runs, "runs", sort_by=NEWEST, filter=equals("display_name", run))
    found = [each for each in listed if each.display_name == run]
    if not found:
        raise UserError(f"{client.access.endpoint} has no run {run!r}; see `flotilla runs`")
    if len(found) > 1:
        ids = ", ".join(str(each.run_id) for each in found[:3])
        raise UserError(f"{len(found)} runs are named {run!r}: give the id of one, such as {ids}")
    return view(ask(client.get_run, run_id=found[0].run_id))


def view(run: Any) -> RemoteRun:
    """Return a run from the client's model of it."""
    details = run.run_details.task_details if run.run_details else None
    return RemoteRun(
        run_id=str(run.run_id),
        name=str(run.display_name),
        # A run that has just been created has no state yet.
        state=str(run.state or "PENDING"),
        created=_moment(run.created_at),
        finished=_moment(run.finished_at),
        error=" ".join(str(run.error.message or "").split()) if run.error else "",
        steps=steps_of(details or ()),
    )


def steps_of(details: Sequence[Any]) -> tuple[Step, ...]:
    """Return the steps among the nodes of a run, in the order in which they began."""
    by_hash = {_hash(node.pod_name): node for node in details if node.pod_name}
    nodes = {str(node.display_name): node for node in details}
    steps = []
    for name, driver in nodes.items():
        step = name.removesuffix(_DRIVER)
        if step == name or _GROUP.fullmatch(step):
            continue
        if node := nodes.get(step):
            if _is_cached(node, by_hash, details):
                steps.append(_step(step, node, (), cached=True))
            else:
                steps.append(_step(step, node, tuple(_pods(node, by_hash))))
        elif driver.state == "FAILED":
            steps.append(_step(step, driver, (str(driver.pod_name or ""),)))
    return tuple(sorted(steps, key=lambda step: step.began or datetime.max.replace(tzinfo=UTC)))


def _step(name: str, node: Any, pods: tuple[str, ...], *, cached: bool = False) -> Step:
    return Step(
        name=name.replace("-", "_"),
        state=str(node.state or "PENDING"),
        began=_moment(node.start_time),
        ended=_moment(node.end_time),
        pods=pods,
        cached=cached,
    )


def _is_cached(node: Any, by_hash: dict[str, Any], details: Sequence[Any]) -> bool:
    found = [child for _, child in _children(node, by_hash) if child] or _within(node, details)
    executors = [each for each in found if _EXECUTOR.fullmatch(str(each.display_name))]
    # KFP skips the pod of a step that is not skipped itself only for its cache.
    return bool(executors) and all(each.state == "SKIPPED" for each in executors)


def _within(node: Any, details: Sequence[Any]) -> list[Any]:
    """Return the nodes that began while `node` ran, for instances that omit the names of pods."""
    begin, end = _moment(node.start_time), _moment(node.end_time)
    if begin is None or any(each.pod_name for each in details):
        return []
    began = ((each, _moment(each.start_time)) for each in details)
    return [
        each
        for each, moment in began
        if moment is not None and begin <= moment and (end is None or moment <= end)
    ]


def _children(node: Any, by_hash: dict[str, Any]) -> Iterator[tuple[str, Any | None]]:
    """Yield the name of the pod of each child, and its node where the instance has it."""
    for child in node.child_tasks or ():
        name = child.pod_name or ""
        yield name, by_hash.get(_hash(name))


def _pods(node: Any, by_hash: dict[str, Any]) -> Iterator[str]:
    for name, found in _children(node, by_hash):
        workflow, dash, end = name.rpartition("-")
        if found is None and dash:
            yield from (f"{workflow}-{template}-{end}" for template in _TEMPLATES)
            yield name
        elif found is not None and _EXECUTOR.fullmatch(found.display_name):
            tries = [
                each
                for _, each in _children(found, by_hash)
                if each and each is not found and _TRY.fullmatch(each.display_name)
            ]
            # The last retry is the one that counts.
            yield str(tries[-1].pod_name if tries else found.pod_name)


def _hash(name: str) -> str:
    return name.rpartition("-")[2]


def _moment(time: datetime | None) -> datetime | None:
    """Return a time, or None for the epoch and the year one, which mean that there is none."""
    if time is None or time.year <= _EPOCH:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


_DENIED = (401, 403)


def log_of(client: Client, run: RemoteRun, step: Step) -> str:
    """Return the log of a step so far; raises `InstanceError` where there is none."""
    refused: InstanceError | None = None
    for pod in step.pods:
        for path in _paths(client, run, pod):
            try:
                return client.get_text(path)
            except InstanceError as error:
                if error.status in _DENIED:
                    raise
                refused = refused or error
    raise refused or InstanceError(f"{step.name} has no pod yet")


def remedy(client: Client, step: Step) -> str:
    """Return the command that reads a log which the instance does not return."""
    namespace = client.access.namespace or "kubeflow"
    return f"`kubectl logs -n {namespace} {step.pods[0] if step.pods else '-'} -c main`"


def events_in(log: str) -> Iterator[Event]:
    """Yield the events that a step has written into its log."""
    return filter(None, map(parse, log.splitlines()))


def _paths(client: Client, run: RemoteRun, pod: str) -> tuple[str, str]:
    query = urlencode(
        {
            "podname": pod,
            "runid": run.run_id,
            "podnamespace": client.access.namespace or "kubeflow",
            "createdat": f"{run.created:%Y-%m-%d}" if run.created else "",
        }
    )
    return f"/apis/v1alpha1/runs/{run.run_id}/nodes/{pod}/log", f"/k8s/pod/logs?{query}"

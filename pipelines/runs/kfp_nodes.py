"""Reads the nodes, logs and objects of a run, through paths that not every version of KFP has.

A run of KFP 2 is an Argo workflow. `GET /apis/v1beta1/runs/RUN` returns the whole workflow from a
database, even after its pods were deleted. The newer list of nodes (v2beta1) lacks messages and pod
names. KFP 3 removes the v1beta1 path, so runs on KFP 3 have no steps and no logs here.

A task `x` has a node `x`; the node `x(0)` is its first attempt. The name of a node includes the
names of the enclosing tasks, joined by dots. Each step `train-model` has a sibling
`train-model-driver`, which is KFP's own, and a child task `executor`, which is the step's pod.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from flotilla.pipelines.runs.kfp_client import Client, InstanceError, ask, one_line
from flotilla.trainer.runtime.json_records import parse_time

_GONE = (404, 405, 410, 501)
_DENIED = (401, 403)
_STATES = {
    "": "PENDING",
    "Pending": "PENDING",
    "Running": "RUNNING",
    "Succeeded": "SUCCEEDED",
    "Skipped": "SKIPPED",
    "Omitted": "SKIPPED",
    "Failed": "FAILED",
    "Error": "FAILED",
}
_TRY = re.compile(r"\(\d+\)$")
_DRIVER, _OF_STEPS = "-driver", "container-driver"
_EXECUTOR = "executor"
_PATCH, _INPUT = "pod-spec-patch", "--executor_input"
# Maximum length of the prefix of a pod name. Argo truncates the prefix to make room for the hash.
_MOST_PREFIX = 242
# The start of Argo's message for a task between two attempts.
_PAUSE = "Backoff for "
# The start of an error message that KFP returns instead of a log. The HTTP status is 200, because
# KFP sends the status before the error occurs.
_NO_LOG = '{"error_message":'

# The start of the user interface's message for a pod that it cannot read. The HTTP status is 500.
_NO_POD = "Could not get pod "
# Namespace of the pods of a single-user instance.
_NAMESPACE = "kubeflow"
# The user interface's names for object stores, by URI scheme.
_SOURCES = {"minio": "minio", "s3": "s3", "gs": "gcs"}

Tree = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a run. `state` is KFP's state."""

    name: str
    state: str
    began: datetime | None
    ended: datetime | None
    pod: str = ""

    @property
    def seconds(self) -> float:
        """The duration in seconds; for a running step, until now."""
        if self.began is None:
            return 0.0
        return max(((self.ended or datetime.now(UTC)) - self.began).total_seconds(), 0.0)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """A task's last pod. `message` is from Argo; `step` is empty for the driver of a group."""

    name: str
    step: str
    is_driver: bool
    state: str
    message: str
    image: str = ""


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """The nodes of a run on the instance; empty before Argo has started it.

    Attributes:
        root: the URI below which the run publishes, from the arguments of a step; empty if unknown.
        artifact: URI of a step's output, which contains the pipeline root; empty until a step has
            begun.
        message: why the workflow failed as a whole, or empty.
        is_pausing: whether Argo is waiting before it recreates a lost pod.
    """

    steps: tuple[Step, ...] = ()
    pods: tuple[Pod, ...] = ()
    root: str = ""
    artifact: str = ""
    message: str = ""
    is_pausing: bool = False


def read_nodes(client: Client, run_id: str) -> Nodes:
    """Return the nodes of a run. Raises `InstanceError`."""
    try:
        tree = ask(client.get_json, f"/apis/v1beta1/runs/{run_id}")
    except InstanceError as error:
        if error.status in _GONE:
            return Nodes()
        raise
    text = _inner(tree, "pipeline_runtime").get("workflow_manifest") or ""
    try:
        return _nodes(_mapping(json.loads(text))) if text else Nodes()
    except (ValueError, KeyError, TypeError, OSError) as error:
        words = f"{type(error).__name__}: {error}"
        raise InstanceError(f"the workflow of run {run_id} cannot be read: {words}") from None


def _nodes(workflow: Tree) -> Nodes:
    status = _inner(workflow, "status")
    packed = status.get("compressedNodes")
    trees = json.loads(gzip.decompress(base64.b64decode(packed))) if packed else status.get("nodes")
    tasks: dict[tuple[str, ...], list[Tree]] = {}
    for node in sorted(_mapping(trees).values(), key=lambda each: str(each.get("startedAt") or "")):
        path = tuple(_TRY.sub("", part) for part in str(node["name"]).split("."))
        tasks.setdefault(path, []).append(node)
    failed = _STATES.get(str(status.get("phase") or "")) == "FAILED"
    inputs = [_executor_input(each) for tries in tasks.values() for each in tries]
    return Nodes(
        steps=tuple(_steps(workflow, tasks)),
        pods=tuple(_pods(workflow, tasks)),
        root=next(filter(None, map(_root, inputs)), ""),
        artifact=next(filter(None, map(_artifact, inputs)), ""),
        message=one_line(status.get("message")) if failed else "",
        is_pausing=any(_is_pausing(each) for tries in tasks.values() for each in tries),
    )


def _steps(workflow: Tree, tasks: Mapping[tuple[str, ...], Sequence[Tree]]) -> list[Step]:
    steps: dict[str, Step] = {}
    for path, tries in tasks.items():
        if not (path[-1].endswith(_DRIVER) and _OF_STEPS in _template(tries[0])):
            continue
        inner = (*path[:-1], path[-1].removesuffix(_DRIVER))
        whole = _whole(tasks.get(inner) or ())
        if whole is not None and whole.get("phase") not in ("", None, "Omitted"):
            executors = tasks.get((*inner, _EXECUTOR)) or ()
            step = _step(workflow, inner[-1], whole, executors)
        elif _state(driver := tries[-1]) == "FAILED":
            step = _make_step(inner[-1], driver, _state(driver), _pod_name(workflow, driver))
        else:
            continue
        steps[step.name] = step
    return sorted(steps.values(), key=lambda step: step.began or datetime.max.replace(tzinfo=UTC))


def _step(workflow: Tree, name: str, whole: Tree, executors: Sequence[Tree]) -> Step:
    state, pods = _state(whole), [each for each in executors if each.get("type") == "Pod"]
    if pods and state == "RUNNING" and _state(pods[-1]) == "PENDING":
        state = "PENDING"
    pod = _pod_name(workflow, pods[-1]) if pods else ""
    return _make_step(name, whole, state, pod)


def _make_step(name: str, node: Tree, state: str, pod: str) -> Step:
    return Step(
        name=name.replace("-", "_"),
        state=state,
        began=_moment(node.get("startedAt")),
        ended=_moment(node.get("finishedAt")),
        pod=pod,
    )


def _pods(workflow: Tree, tasks: Mapping[tuple[str, ...], Sequence[Tree]]) -> Iterator[Pod]:
    for path, tries in tasks.items():
        # Include refused nodes, for which Argo creates no pod.
        leaves = [each for each in tries if each.get("type") == "Pod" or _is_refused(each)]
        if not leaves:
            continue
        last, own = leaves[-1], path[-1].endswith(_DRIVER)
        name = path[-1].removesuffix(_DRIVER)
        if path[-1] == _EXECUTOR:
            name = path[-2]
        elif own and _OF_STEPS not in _template(last):
            name = ""
        yield Pod(
            name=_pod_name(workflow, last),
            step=name.replace("-", "_"),
            is_driver=own,
            state=_state(last),
            message=one_line(last.get("message")),
            image="" if own else _image(last),
        )


def _is_pausing(node: Tree) -> bool:
    words = str(node.get("message") or "")
    return node.get("type") == "Retry" and _state(node) == "RUNNING" and words.startswith(_PAUSE)


def _is_refused(node: Tree) -> bool:
    return node.get("phase") == "Error" and not node.get("children")


def _whole(tries: Sequence[Tree]) -> Tree | None:
    """Return the node of the task itself. The nodes of its attempts have longer names."""
    return min(tries, key=lambda each: len(str(each["name"])), default=None)


def _state(node: Tree) -> str:
    return _STATES.get(str(node.get("phase") or ""), "PENDING")


def _template(node: Tree) -> str:
    return str(node.get("templateName") or _inner(node, "templateRef").get("template") or "")


def _pod_name(workflow: Tree, node: Tree) -> str:
    """Return the name of a node's pod, which ends with the same hash as the node's id."""
    metadata, node_id = _inner(workflow, "metadata"), str(node["id"])
    name = str(metadata.get("name") or node_id.rpartition("-")[0])
    if node["name"] == name:
        return node_id
    prefix = f"{name}-{_template(node)}".rstrip("-")[:_MOST_PREFIX]
    return f"{prefix}-{node_id.rpartition('-')[2]}"


def _pod_spec(node: Tree) -> Tree:
    """Return the pod spec that KFP's driver made for a step, or {} if there is none yet."""
    for parameter in _inner(node, "inputs").get("parameters") or ():
        if parameter.get("name") == _PATCH and parameter.get("value"):
            return _mapping(json.loads(parameter["value"]))
    return {}


def _container(node: Tree) -> Tree:
    return next((_mapping(each) for each in _pod_spec(node).get("containers") or ()), {})


def _image(node: Tree) -> str:
    return one_line(_container(node).get("image"))


def _executor_input(node: Tree) -> Tree:
    command = list(_container(node).get("command") or ())
    if _INPUT not in command[:-1]:
        return {}
    return _mapping(json.loads(command[command.index(_INPUT) + 1]))


def _root(executor_input: Tree) -> str:
    given = _inner(_inner(executor_input, "inputs"), "parameterValues")
    return str(given.get("root") or given.get("storage_root") or "")


def _artifact(executor_input: Tree) -> str:
    """Return the URI of one output of the step. It contains the pipeline root and the run id."""
    for found in _inner(_inner(executor_input, "outputs"), "artifacts").values():
        for artifact in found.get("artifacts") or ():
            return str(artifact.get("uri") or "")
    return ""


def _mapping(tree: object) -> Tree:
    return tree if isinstance(tree, Mapping) else {}


def _inner(tree: Tree, key: str) -> Tree:
    return _mapping(tree.get(key))


def _moment(text: object) -> datetime | None:
    return parse_time(text) if text else None


def read_log(client: Client, run_id: str, created: datetime | None, pod: str) -> str:
    """Return the log of a pod so far. Raises `InstanceError` if there is none."""
    refused: InstanceError | None = None
    for path in _paths(client, run_id, created, pod):
        try:
            return _text(client, path)
        except InstanceError as error:
            if error.status in _DENIED:
                raise
            refused = refused or error
    raise refused or InstanceError(f"{pod} has no log")


def has_pod(client: Client, pod: str) -> bool | None:
    """Return whether a pod exists, or None if the endpoint does not serve the user interface."""
    query = urlencode({"podname": pod, "podnamespace": client.access.namespace or _NAMESPACE})
    try:
        client.get_json(f"/k8s/pod?{query}")
    except InstanceError as error:
        return False if _NO_POD in str(error) else None
    return True


def read_object(client: Client, uri: str) -> bytes:
    """Read an object through the user interface, which has credentials. Raises `InstanceError`."""
    scheme, _, path = uri.partition("://")
    source = _SOURCES.get(scheme)
    if not source or "?" in path:
        raise InstanceError(f"the user interface cannot read {uri}")
    return client.get_text(f"/artifacts/{source}/{quote(path)}").encode()


def _text(client: Client, path: str) -> str:
    text = client.get_text(path)
    if text.startswith(_NO_LOG):
        try:
            words = one_line(json.loads(text).get("error_message"))
        except ValueError:
            words = one_line(text)
        raise InstanceError(f"{client.access.endpoint} has no log of the step: {words}", _GONE[0])
    return text


def _paths(client: Client, run_id: str, created: datetime | None, pod: str) -> tuple[str, str]:
    query = urlencode(
        {
            "podname": pod,
            "runid": run_id,
            "podnamespace": client.access.namespace or _NAMESPACE,
            "createdat": f"{created:%Y-%m-%d}" if created else "",
        }
    )
    return f"/apis/v1alpha1/runs/{run_id}/nodes/{pod}/log", f"/k8s/pod/logs?{query}"

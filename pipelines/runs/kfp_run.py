"""A run on a KFP instance: its state, nodes, logs and objects, and where it publishes.

Some of the requests use paths that not every version of KFP has. A run of KFP 2 is an Argo
workflow. `GET /apis/v1beta1/runs/RUN` returns the whole workflow from a database, even after its
pods were deleted. The newer list of nodes (v2beta1) lacks messages and pod names. KFP 3 removes the
v1beta1 path, so runs on KFP 3 have no steps and no logs here.

A task `x` has a node `x`; the node `x(0)` is its first attempt. The name of a node includes the
names of the enclosing tasks, joined by dots. Each step `train-model` has a sibling
`train-model-driver`, which is KFP's own, and a child task `executor`, which is the step's pod.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote, urlencode

from flotilla.components.records.run_store import FLOTILLA, find_root
from flotilla.components.records.step_record import StepRecord
from flotilla.pipelines.runs.kfp_client import (
    NEWEST,
    Client,
    InstanceError,
    ask,
    equals,
    is_id,
    one_line,
    pages,
)
from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import parse_time

ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
_EPOCH = 1970
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
# The states of trials that determine the state of their common step, in this order.
_STATE_ORDER = ("RUNNING", "PENDING", "FAILED")
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


@dataclass(frozen=True, kw_only=True)
class RemoteRun:
    """A run on a KFP instance. If it comes from a list of runs, it has no nodes.

    Attributes:
        state: KFP's state; CANCELED also for a canceled run that KFP reports as FAILED.
        at: the URI below which its steps publish; empty if unknown.
        impasse: why the run cannot continue although it has not ended; empty if it can.
        schedule_id: the id of the recurring run that started it, or empty.
        doing: the record of the current stage of each running step, if known, keyed by step.
    """

    run_id: str
    name: str
    state: str
    created: datetime | None
    finished: datetime | None
    error: str
    at: str = ""
    nodes: Nodes = field(default_factory=Nodes)
    impasse: str = ""
    schedule_id: str = ""
    doing: Mapping[str, StepRecord] = field(default_factory=dict)

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps in the order of their start."""
        return self.nodes.steps

    @property
    def has_ended(self) -> bool:
        """Whether the run has ended."""
        return self.state in ENDED


def find_run(client: Client, run: str) -> RemoteRun:
    """Return a run by its id, or by its name if that is unique. Raises `ConfigError`."""
    if is_id(run.lower()):
        return refresh_run(client, run.lower())
    listed = pages(client.list_runs, "runs", sort_by=NEWEST, filter=equals("display_name", run))
    found = [each for each in listed if each.display_name == run]
    if not found:
        raise ConfigError(f"{client.access.endpoint} has no run {run!r}; see `flotilla runs`")
    if len(found) > 1:
        ids = ", ".join(str(each.run_id) for each in found[:3])
        raise ConfigError(f"{len(found)} runs are named {run!r}: use the id of one, such as {ids}")
    return refresh_run(client, str(found[0].run_id))


def refresh_run(client: Client, run_id: str) -> RemoteRun:
    """Return a run with its current nodes. Raises `InstanceError`."""
    run = ask(client.get_run, run_id=run_id)
    return view(run, read_nodes(client, run_id))


def view(run: Any, nodes: Nodes | None = None) -> RemoteRun:
    """Convert the client's model of a run, and add the nodes if they were read."""
    nodes = nodes or Nodes()
    said = " ".join(str(run.error.message or "").split()) if run.error else ""
    return RemoteRun(
        run_id=str(run.run_id),
        name=str(run.display_name),
        state=_find_state(str(run.state or ""), run.state_history or ()),
        created=_known(run.created_at),
        finished=_known(run.finished_at),
        error=said or nodes.message,
        at=_find_uri(run, nodes),
        nodes=nodes,
        schedule_id=str(run.recurring_run_id or ""),
    )


def _find_state(state: str, history: Iterable[Any]) -> str:
    """Return the state, or CANCELED if a failed run was CANCELING just before its end."""
    before = [str(each.state) for each in history if str(each.state) not in ENDED]
    if state == "FAILED" and before[-1:] == ["CANCELING"]:
        return "CANCELED"
    # A run that was just created has no state yet.
    return state or "PENDING"


def _find_uri(run: Any, nodes: Nodes) -> str:
    """Return the URI below which the run publishes, found as in its steps, or "" if unknown."""
    config = run.runtime_config
    given = (config.parameters if config else None) or {}
    # The parameters lack the defaults of the version. The arguments in the nodes include them.
    root = str(given.get("storage_root") or nodes.root)
    pipeline_root = str((config.pipeline_root if config else None) or "")
    with suppress(UserError):
        if not root and nodes.artifact:
            root = find_root("", nodes.artifact, str(run.run_id))
        elif not root and pipeline_root:
            root = storage.join(pipeline_root, FLOTILLA)
        return storage.join(root, str(run.run_id)) if root else ""
    return ""


def _known(time: datetime | None) -> datetime | None:
    if time is None or time.year <= _EPOCH:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


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
    steps: dict[str, list[Step]] = {}
    for step in _steps(workflow, tasks):
        steps.setdefault(step.name, []).append(step)
    return Nodes(
        steps=tuple(sorted(map(_join_trials, steps.values()), key=_began)),
        pods=tuple(_pods(workflow, tasks)),
        root=next(filter(None, map(_root, inputs)), ""),
        artifact=next(filter(None, map(_artifact, inputs)), ""),
        message=one_line(status.get("message")) if failed else "",
        is_pausing=any(_is_pausing(each) for tries in tasks.values() for each in tries),
    )


def _began(step: Step) -> datetime:
    return step.began or datetime.max.replace(tzinfo=UTC)


def _join_trials(same: Sequence[Step]) -> Step:
    """Return one step for those of the parallel trials of a sweep, which have the same name.

    The step is active as long as a trial is active, and has failed if a trial has failed.
    """
    chosen = next(
        (step for state in _STATE_ORDER for step in same if step.state == state), same[-1]
    )
    ends = [step.ended for step in same if step.ended]
    return replace(
        chosen,
        began=min((step.began for step in same if step.began), default=None),
        ended=max(ends) if len(ends) == len(same) else None,
    )


def _steps(workflow: Tree, tasks: Mapping[tuple[str, ...], Sequence[Tree]]) -> Iterator[Step]:
    for path, tries in tasks.items():
        if not (path[-1].endswith(_DRIVER) and _OF_STEPS in _template(tries[0])):
            continue
        inner = (*path[:-1], path[-1].removesuffix(_DRIVER))
        pods = [each for each in tasks.get((*inner, _EXECUTOR), ()) if each.get("type") == "Pod"]
        # Choose the node of the task itself. The nodes of its attempts have longer names.
        node = min(tasks.get(inner, [{}]), key=lambda each: len(str(each.get("name"))))
        if node.get("phase") in ("", None, "Omitted"):
            node, pods = tries[-1], [tries[-1]]
            if _state(node) != "FAILED":
                continue
        state = _state(node)
        if pods and state == "RUNNING" and _state(pods[-1]) == "PENDING":
            state = "PENDING"
        yield Step(
            name=inner[-1].replace("-", "_"),
            state=state,
            began=_moment(node.get("startedAt")),
            ended=_moment(node.get("finishedAt")),
            pod=_pod_name(workflow, pods[-1]) if pods else "",
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


def _container(node: Tree) -> Tree:
    """Return the container that KFP's driver made for a step, or {} if there is none yet."""
    for parameter in _inner(node, "inputs").get("parameters") or ():
        if parameter.get("name") == _PATCH and parameter.get("value"):
            containers = _mapping(json.loads(parameter["value"])).get("containers") or [{}]
            return _mapping(containers[0])
    return {}


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
    query = urlencode(
        {
            "podname": pod,
            "runid": run_id,
            "podnamespace": client.access.namespace or _NAMESPACE,
            "createdat": f"{created:%Y-%m-%d}" if created else "",
        }
    )
    try:
        return _read_log(client, f"/apis/v1alpha1/runs/{run_id}/nodes/{pod}/log")
    except InstanceError as refused:
        if refused.status in _DENIED:
            raise
        try:
            return _read_log(client, f"/k8s/pod/logs?{query}")
        except InstanceError as error:
            raise (error if error.status in _DENIED else refused) from None


def _read_log(client: Client, path: str) -> str:
    text = client.get_text(path)
    if text.startswith(_NO_LOG):
        try:
            words = one_line(json.loads(text).get("error_message"))
        except ValueError:
            words = one_line(text)
        raise InstanceError(f"{client.access.endpoint} has no log of the step: {words}", _GONE[0])
    return text


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

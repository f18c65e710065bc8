"""The API paths of a fake KFP instance, with the client's models of requests and responses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from flotilla.trainer import storage
from tests.kfp_instance.listing import page_of
from tests.kfp_instance.store import RefusedError, Tree, found

if TYPE_CHECKING:
    from tests.kfp_instance.server import Instance

V2 = "/apis/v2beta1"
HEALTH = {"commit_sha": "0123abc", "tag_name": "2.17.0"}
# The UI responds to every unknown path with this page.
UI = b"<!DOCTYPE html><html><head><title>Kubeflow Pipelines</title></head></html>"
Handle = Callable[..., Tree]
# Namespace of the pods of a single-user instance.
NAMESPACE = "kubeflow"


@dataclass(frozen=True, kw_only=True)
class Request:
    query: dict[str, str]
    sent: Any


def plain(instance: Instance, path: str, query: dict[str, str]) -> tuple[int, str, bytes] | None:
    """Return a response outside API version v2beta1, such as a log; None for other paths."""
    if path in (f"{V2}/healthz", "/apis/v1beta1/healthz"):
        body = {**HEALTH, "multi_user": instance.multi_user}
        if path.startswith(V2):
            body["pipeline_store"] = instance.pipeline_store
        return 200, "application/json", json.dumps(body).encode()
    if run := re.fullmatch(r"/apis/v1beta1/runs/([^/]+)", path):
        return _nodes(instance, run[1])
    if log := re.fullmatch(r"/apis/v1alpha1/runs/([^/]+)/nodes/([^/]+)/log", path):
        if instance.has_ui:
            return 200, "text/html", b"<html>the start page</html>"
        return _log(instance, log[1], log[2])
    return _of_page(instance, path, query)


def _of_page(instance: Instance, path: str, query: dict[str, str]) -> tuple[int, str, bytes] | None:
    if stored := re.fullmatch(r"/artifacts/(minio|s3|gcs)/(.+)", path):
        return _object(instance, stored[2])
    if path == "/k8s/pod":
        return _pod_of_page(instance, query)
    if path == "/k8s/pod/logs":
        return _log_of_page(instance, query)
    return None


def _nodes(instance: Instance, run: str) -> tuple[int, str, bytes]:
    """Return a run as API version v1beta1 does, which is also available at the UI's address."""
    if not instance.has_v1beta1:
        raise RefusedError(404, "Not Found")
    with instance.store.lock:
        workflow = instance.store.workflows.get(run)
        if workflow is None:
            raise RefusedError(404, f"Run {run} not found")
        # The workflow manifest is empty until Argo reports it for the first time.
        runtime = {"workflow_manifest": workflow.manifest()} if workflow.nodes else {}
    tree = {"run": {"id": run}, "pipeline_runtime": runtime}
    return 200, "application/json", json.dumps(tree).encode()


def _log(instance: Instance, run: str, pod: str) -> tuple[int, str, bytes]:
    """Return a log, or an error with status 200 if the pod is missing, as the real API does."""
    with instance.store.lock:
        workflow = instance.store.workflows.get(run)
        logs = {**workflow.archive, **workflow.logs} if workflow else {}
        if not instance.has_logs or pod not in logs:
            words = f'Failed to read logs for run {run}: pods "{pod}" not found'
            body = {"error_message": words, "error_details": f"BadRequestError: {words}"}
            return 200, "text/plain; charset=utf-8", json.dumps(body).encode()
        return 200, "text/plain; charset=utf-8", logs[pod].encode()


def _object(instance: Instance, key: str) -> tuple[int, str, bytes]:
    """Return an object from the cluster's object store, as the UI's artifact page does."""
    if not instance.has_ui:
        return 404, "text/plain", b"404 page not found"
    if instance.multi_user:
        return 403, "text/html", b"Artifact does not belong to the requested namespace"
    path = storage.local_path(f"{instance.store.disk}/{key}") if instance.store.disk else None
    if path is None or not path.is_file():
        return 404, "text/html; charset=utf-8", f"No objects found at {key}".encode()
    return 200, "", path.read_bytes()


def _log_of_page(instance: Instance, query: dict[str, str]) -> tuple[int, str, bytes]:
    """Return a pod's log as the UI does; the UI has no logs of deleted pods."""
    if not instance.has_ui:
        return 404, "text/plain", b"404 page not found"
    with instance.store.lock:
        workflow = instance.store.workflows.get(query["runid"])
        right = instance.has_logs and query["podnamespace"] == NAMESPACE
        logs = workflow.logs if workflow and right else {}
        if query["podname"] not in logs:
            words = "Could not get main container logs: Error: Unable to retrieve workflow status"
            return 500, "text/html; charset=utf-8", words.encode()
        return 200, "", logs[query["podname"]].encode()


def _pod_of_page(instance: Instance, query: dict[str, str]) -> tuple[int, str, bytes]:
    """Return a pod as the UI does, which sends JSON as HTML and reports each failure as 500."""
    if not instance.has_ui:
        return 404, "application/json", b'{"error": "Not Found", "message": "Not Found"}'
    name, namespace = query["podname"], query["podnamespace"]
    with instance.store.lock:
        exists = any(name in each.pods() for each in instance.store.workflows.values())
    if namespace != NAMESPACE or not exists:
        words = f"Could not get pod {name} in namespace {namespace}"
        return 500, "text/html; charset=utf-8", words.encode()
    return 200, "text/html; charset=utf-8", json.dumps({"metadata": {"name": name}}).encode()


def _owned(instance: Instance, rows: Iterable[Tree], query: dict[str, str]) -> list[Tree]:
    if experiment := query.get("experiment_id"):
        return [row for row in rows if row.get("experiment_id") == experiment]
    if not instance.multi_user:
        return list(rows)
    place = query.get("namespace")
    if not place:
        raise RefusedError(400, "Invalid input error: namespace cannot be empty in multi-user mode")
    store = instance.store
    return [
        row
        for row in rows
        if row.get("namespace", "")
        or store.experiments.get(row.get("experiment_id", ""), {}).get("namespace") == place
    ]


def _kept(instance: Instance) -> tuple[str, ...]:
    """Return the filter operations that the pipeline store supports; empty means all."""
    return () if instance.pipeline_store == "database" else ("IS_SUBSTRING",)


def _pipelines(instance: Instance, request: Request) -> Tree:
    place = request.query.get("namespace", "")
    rows = [p for p in instance.store.pipelines.values() if p.get("namespace", "") == place]
    return page_of(rows, "pipelines", request.query, operations=_kept(instance))


def _versions(instance: Instance, pipeline: str, request: Request) -> Tree:
    rows = [v for v in instance.store.versions.values() if v["pipeline_id"] == pipeline]
    return page_of(rows, "pipeline_versions", request.query, operations=_kept(instance))


def _upload_version(instance: Instance, request: Request) -> Tree:
    query = request.query
    name, description = query.get("name", ""), query.get("description", "")
    return instance.store.upload_version(query["pipelineid"], name, description, request.sent)


def _upload(instance: Instance, request: Request) -> Tree:
    name = request.query["name"]
    body = {"display_name": name, "namespace": request.query.get("namespace", "")}
    made = instance.store.create_pipeline({key: value for key, value in body.items() if value})
    # The first version of a pipeline has the pipeline's name.
    instance.store.upload_version(made["pipeline_id"], name, "", request.sent)
    return made


def _version(instance: Instance, _pipeline: str, key: str, _request: Request) -> Tree:
    # The server ignores the pipeline ID.
    return found(instance.store.versions, key, "pipeline version")


def _one_of(attribute: str) -> Handle:
    def one(instance: Instance, key: str, _request: Request) -> Tree:
        return found(getattr(instance.store, attribute), key, attribute)

    return one


def _create_experiment(instance: Instance, request: Request) -> Tree:
    if instance.multi_user and not request.sent.get("namespace"):
        raise RefusedError(400, "Invalid input error: Experiment namespace cannot be empty")
    return instance.store.create_experiment(request.sent)


def _delete(instance: Instance, key: str, request: Request) -> Tree:
    return instance.store.delete_recurring(key, request.query.get("propagation_policy", ""))


def _list_of(name: str, attribute: str) -> Handle:
    def listed(instance: Instance, request: Request) -> Tree:
        rows = _owned(instance, getattr(instance.store, attribute).values(), request.query)
        return page_of(rows, name, request.query)

    return listed


def _creates(method: str) -> Handle:
    def create(instance: Instance, request: Request) -> Tree:
        made: Tree = getattr(instance.store, method)(request.sent)
        return made

    return create


def _by_id(method: str, *more: Any) -> Handle:
    def act(instance: Instance, key: str, _request: Request) -> Tree:
        tree: Tree = getattr(instance.store, method)(key, *more)
        return tree

    return act


_RECURRING = f"{V2}/recurringruns"


@dataclass(frozen=True)
class Route:
    """A path and method of the API, with its handler and its request and response models."""

    path: str
    method: str
    handle: Handle
    takes: str
    gives: str


ROUTES = tuple(Route(*each) for each in (
    (f"{V2}/pipelines", "GET", _pipelines, "", "V2beta1ListPipelinesResponse"),
    (f"{V2}/pipelines", "POST", _creates("create_pipeline"), "V2beta1Pipeline", "V2beta1Pipeline"),
    (f"{V2}/pipelines/upload", "POST", _upload, "file", "V2beta1Pipeline"),
    (f"{V2}/pipelines/([^/]+)", "GET", _one_of("pipelines"), "", "V2beta1Pipeline"),
    (f"{V2}/pipelines/([^/]+)/versions/([^/]+)", "GET", _version, "", "V2beta1PipelineVersion"),
    (f"{V2}/experiments/([^/]+)", "GET", _one_of("experiments"), "", "V2beta1Experiment"),
    (f"{V2}/recurringruns/([^/:]+)", "GET", _one_of("recurring"), "", "V2beta1RecurringRun"),
    (f"{V2}/pipelines/upload_version", "POST", _upload_version, "file", "V2beta1PipelineVersion"),
    (f"{V2}/pipelines/([^/]+)/versions", "GET", _versions, "",
     "V2beta1ListPipelineVersionsResponse"),
    (f"{V2}/experiments", "GET", _list_of("experiments", "experiments"), "",
     "V2beta1ListExperimentsResponse"),
    (f"{V2}/experiments", "POST", _create_experiment, "V2beta1Experiment", "V2beta1Experiment"),
    (f"{V2}/runs", "GET", _list_of("runs", "runs"), "", "V2beta1ListRunsResponse"),
    (f"{V2}/runs", "POST", _creates("create_run"), "V2beta1Run", "V2beta1Run"),
    (f"{V2}/runs/([^/:]+)", "GET", _by_id("get_run"), "", "V2beta1Run"),
    (f"{V2}/runs/([^/:]+):terminate", "POST", _by_id("terminate"), "", "object"),
    (_RECURRING, "GET", _list_of("recurringRuns", "recurring"), "",
     "V2beta1ListRecurringRunsResponse"),
    (_RECURRING, "POST", _creates("create_recurring"), "V2beta1RecurringRun",
     "V2beta1RecurringRun"),
    (f"{_RECURRING}/([^/:]+)", "DELETE", _delete, "", "object"),
    (f"{_RECURRING}/([^/:]+):enable", "POST", _by_id("enable", True), "", "object"),
    (f"{_RECURRING}/([^/:]+):disable", "POST", _by_id("enable", False), "", "object"),
))  # fmt: skip

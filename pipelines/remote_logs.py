"""The logs of a run on a KFP instance, and what its steps say in them.

The API server gives a log as a whole and does not follow; the user interface gives it under another
path, and answers the API's path with its start page. After the pod is gone, both may have it from
an archive, or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from pipelines.instance import Client
from pipelines.instance_errors import InstanceError
from pipelines.remote_run import RemoteRun, Step

_DENIED = (401, 403)


def log_of(client: Client, run: RemoteRun, step: Step) -> str:
    """Return the log of a step so far; raises `InstanceError` when it is not to be had."""
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
    """Return how to read a log where the instance does not give it."""
    namespace = client.access.namespace or "kubeflow"
    return f"`kubectl logs -n {namespace} {step.pods[0] if step.pods else '-'} -c main`"


def events_in(log: str) -> Iterator[dict[str, Any]]:
    """Yield what a step has written as events into its log."""
    for line in log.splitlines():
        _, brace, rest = line.partition('{"event": ')
        if not brace:
            continue
        try:
            tree = json.loads(brace + rest)
        except ValueError:
            continue
        yield tree


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

"""Resolves `cluster.launcher: auto` to an engine that the cluster serves, or to `local`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from functools import partial

from flotilla.components.kubernetes import names
from flotilla.components.kubernetes.api.client import Api, RefusedError, connect
from flotilla.components.kubernetes.api.retry import call_with_retry, describe_refusal
from flotilla.components.kubernetes.engine import Engine
from flotilla.components.kubernetes.names import Tree
from flotilla.trainer.config.cluster import Launcher
from flotilla.trainer.runtime.errors import UserError

log = logging.getLogger(__name__)
# How long requests to an unreachable API are retried, in seconds.
RETRY_SECONDS = 60.0


def is_on_a_cluster() -> bool:
    """Return whether this process runs in a pod, or KUBECONFIG is set."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST") or os.environ.get("KUBECONFIG"))


def launcher(engines: Sequence[Engine], namespace: str, run_id: str) -> Launcher:
    """Return the name of the engine that `auto` selects, or `local` outside a cluster."""
    if not is_on_a_cluster():
        log.info(
            "cluster.launcher: 'auto' selects 'local', because this process is not in a pod and "
            "KUBECONFIG is not set"
        )
        return "local"
    connection = connect()
    api = Api(connection, namespace or connection.namespace)
    served: dict[Engine, list[Tree]] = {}
    for each in engines:
        jobs = call_with_retry(partial(_jobs, api, each, run_id), RETRY_SECONDS, time.sleep)
        if jobs is not None:
            served[each] = jobs
    for each, jobs in served.items():
        if jobs:
            log.info(
                "cluster.launcher: 'auto' selects '%s', because a job of this run exists", each.name
            )
            return each.name
    for each in served:
        log.info(
            "cluster.launcher: 'auto' selects '%s', because the cluster serves %ss",
            each.name, each.kind.kind,
        )  # fmt: skip
        return each.name
    kinds = " nor ".join(f"{each.kind.kind}s" for each in engines)
    raise UserError(
        f"cluster.launcher: 'auto' needs an engine, but this cluster serves neither {kinds}; "
        "`flotilla doctor --kubernetes` shows how to install one"
    )


def _jobs(api: Api, engine: Engine, run_id: str) -> list[Tree] | None:
    """Return the jobs of a run, or None if the cluster does not serve the kind."""
    label = f"{names.RUN}={names.label_value(run_id)}"
    try:
        return api.list_labelled(engine.kind.resource, label)
    except RefusedError as error:
        if error.is_unserved:
            return None
        if error.is_forbidden:
            # Raise no error here, because the launcher reports the missing permissions later.
            return [] if api.serves(engine.kind.resource) else None
        raise UserError(describe_refusal(error, engine.kind)) from None

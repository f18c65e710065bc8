"""Chooses and runs the launcher of a training cluster, according to `cluster.launcher`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from flotilla.components.image import DEFAULTS, PodDefaults
from flotilla.trainer import events, storage
from flotilla.trainer.cluster import local
from flotilla.trainer.cluster.launcher import Job, require_end
from flotilla.trainer.config.cluster import Launcher
from flotilla.trainer.config.form import parse_settings
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.streams import relay

if TYPE_CHECKING:
    from flotilla.components.kubernetes.engine import Engine
    from flotilla.components.kubernetes.names import Tree

log = logging.getLogger(__name__)
# This variable is set if a step runs in a debugger. Training then runs in the step's process.
DEBUGGER = "FLOTILLA_DEBUGGER"
# The Kubernetes engines, in the order in which `auto` prefers them.
ENGINES: tuple[Launcher, ...] = ("jobset", "tfjob")
# How long requests to an unreachable API are retried, in seconds.
RETRY_SECONDS = 60.0


def engine(name: str) -> Engine:
    """Return the engine with this name."""
    # Importing the Kubernetes client takes half a second, and a local run does not need it.
    if name == "jobset":
        from flotilla.components.kubernetes.jobset import JobSets

        return JobSets()
    from flotilla.components.kubernetes.tfjob import TFJobs

    return TFJobs()


def render_job(config: Config) -> Tree:
    """Return the job of a configuration, with placeholders for a run. Raises `ConfigError`."""
    from flotilla.components.kubernetes.engine import document

    found = engine(config.cluster.launcher)
    found.check(config)
    return document(found, config)


def require_shared(config: Config, root: str) -> None:
    """Raise a `ConfigError` if `root` is a local folder that not all pods of a job mount."""
    here = storage.local_path(root)
    if not here:
        return
    # Import this only here, because it loads the Kubernetes client, and this takes long.
    from flotilla.components.kubernetes.pods.template import replicas

    place, settings = PurePosixPath(here), config.cluster.kubernetes
    without = [
        role
        for role in replicas(config)
        if not any(place.is_relative_to(each.mount_path) for each in settings.of(role).volumes)
    ]
    if without:
        raise ConfigError(
            f"storage.root: {root} is a folder that the pods of {', '.join(without)} do not share; "
            "use a bucket (storage.root=s3://BUCKET/FOLDER), or mount a shared volume at this "
            "folder or at a parent folder (cluster.kubernetes.pod.volumes)"
        )


def is_on_a_cluster() -> bool:
    """Return whether this process runs in a pod, or KUBECONFIG is set."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST") or os.environ.get("KUBECONFIG"))


def choose(job: Job) -> Launcher:
    """Return the launcher of a job.

    For `auto`, this is an engine that the cluster serves, or `local` outside a cluster. Raises
    `UserError`.
    """
    cluster = job.config.cluster
    if cluster.launcher != "auto":
        return cluster.launcher
    if not is_on_a_cluster():
        log.info(
            "cluster.launcher: 'auto' selects 'local', because this process is not in a pod and "
            "KUBECONFIG is not set"
        )
        return "local"
    served = _list_served(cluster.kubernetes.namespace, job.run_id)
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
    kinds = " nor ".join(f"{engine(name).kind.kind}s" for name in ENGINES)
    raise UserError(
        f"cluster.launcher: 'auto' needs an engine, but this cluster serves neither {kinds}; "
        "`flotilla doctor --kubernetes` shows how to install one"
    )


def _list_served(namespace: str, run_id: str) -> dict[Engine, list[Tree]]:
    from flotilla.components.kubernetes import client, names

    api = client.Api(client.connect(), namespace)
    label = f"{names.RUN}={names.label_value(run_id)}"
    served: dict[Engine, list[Tree]] = {}
    for each in map(engine, ENGINES):
        request = partial(api.list_labelled, each.kind.resource, label)
        try:
            served[each] = client.call_with_retry(request, RETRY_SECONDS, time.sleep)
        except client.RefusedError as error:
            if not (error.is_unserved or error.is_forbidden):
                raise UserError(client.describe_refusal(error, each.kind)) from None
            # The launcher reports missing permissions later.
            look = partial(api.serves, each.kind.resource)
            if error.is_forbidden and client.call_with_retry(look, RETRY_SECONDS, time.sleep):
                served[each] = []
    return served


def launch(job: Job, defaults: PodDefaults = DEFAULTS) -> None:
    """Train `job` with the configured launcher."""
    launcher = choose(job)
    if launcher == "local":
        _launch_here(job)
        return
    from flotilla.components.kubernetes import launcher as kubernetes
    from flotilla.components.kubernetes.pods.template import leading

    kubernetes.launch(engine(launcher), job, defaults)
    # A job may succeed although training is not complete, so require that the leading task recorded
    # the end of training. A program without an agent records nothing.
    if not job.config.program.command or job.config.program.python:
        require_end(job, str(leading(job.config)))


def _launch_here(job: Job) -> None:
    if os.environ.get(DEBUGGER):
        from flotilla.trainer.training import task

        task.train_in_process(job)
        return
    if os.environ.get(events.VARIABLE):
        # Do not relay the logs, because the process that started the run already shows them.
        local.launch(job)
        return
    with local.relay_logs(job.workdir, relay):
        local.launch(job)


def end(settings: Mapping[str, Any], run_id: str) -> None:
    """Delete the jobs that a run with these settings left on a cluster. Raises `UserError`."""
    try:
        cluster = parse_settings(settings).get("cluster") or {}
        named = {key: cluster[key] for key in ("launcher", "kubernetes") if key in cluster}
        config = parse_config({"cluster": named})
    except (ConfigError, TypeError):
        # The first step refused these settings, so the run launched no job.
        return
    launcher = config.cluster.launcher
    if launcher == "local" or (launcher == "auto" and not is_on_a_cluster()):
        return
    from flotilla.components.kubernetes.launcher import delete_jobs

    failed: list[UserError] = []
    for name in ENGINES if launcher == "auto" else (launcher,):
        try:
            delete_jobs(engine(name), config.cluster.kubernetes, run_id)
        except UserError as error:
            # Continue, so that the jobs of the other engine are deleted too.
            failed.append(error)
    if failed:
        raise failed[0]

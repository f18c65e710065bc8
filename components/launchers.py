"""The launchers of training clusters, by `cluster.launcher`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from components.image import DEFAULTS, PodDefaults
from trainer import events
from trainer.cluster import completion, local
from trainer.cluster.launcher import Job
from trainer.config.cluster import Launcher
from trainer.config.form import tree_of
from trainer.config.load import parse_config
from trainer.config.schema import Config
from trainer.errors import ConfigError, UserError
from trainer.output.streams import relay

if TYPE_CHECKING:
    from components.kubernetes.engine import Engine
    from components.kubernetes.names import Tree

# Set for a step in a debugger: it trains in its own process.
DEBUGGER = "FLOTILLA_DEBUGGER"
# The engines on Kubernetes; `auto` takes the first one that the cluster has.
ENGINES: tuple[Launcher, ...] = ("jobset", "tfjob")


def engine(name: str) -> Engine:
    """Return the engine with this name."""
    # Importing the client of Kubernetes takes half a second, which a local run does not need.
    if name == "jobset":
        from components.jobset.engine import JobSets

        return JobSets()
    from components.tfjob.engine import TFJobs

    return TFJobs()


def document_of(config: Config) -> Tree:
    """Return the job of a configuration, with placeholders; raises `ConfigError`."""
    from components.kubernetes.engine import document

    found = engine(config.cluster.launcher)
    found.check(config)
    return document(found, config)


def choose(job: Job) -> Launcher:
    """Return the launcher of a job, for `auto` what there is; raises `UserError`."""
    launcher = job.config.cluster.launcher
    if launcher != "auto":
        return launcher
    from components.kubernetes import choice

    namespace = job.config.cluster.kubernetes.namespace
    return choice.launcher([engine(name) for name in ENGINES], namespace, job.run_id)


def launch(job: Job, defaults: PodDefaults = DEFAULTS) -> None:
    """Train `job` with the launcher that its configuration names."""
    launcher = choose(job)
    if launcher == "local":
        _launch_here(job)
        return
    from components.kubernetes import launcher as kubernetes
    from components.kubernetes.pods.template import leading

    kubernetes.launch(engine(launcher), job, defaults)
    # Whatever the job and its pods say.
    completion.require(job, str(leading(job.config)))


def _launch_here(job: Job) -> None:
    if os.environ.get(DEBUGGER):
        from trainer.training import task

        task.train_here(job)
        return
    if os.environ.get(events.VARIABLE):
        # Who started the run follows the events of its tasks.
        local.launch(job)
        return
    with local.relayed(job.workdir, relay):
        local.launch(job)


def end(settings: Mapping[str, Any], run_id: str) -> None:
    """Delete what a run of these settings has left on a cluster; raises `UserError`."""
    try:
        cluster = tree_of(settings).get("cluster") or {}
        named = {key: cluster[key] for key in ("launcher", "kubernetes") if key in cluster}
        config = parse_config({"cluster": named})
    except (ConfigError, TypeError):
        # The first step refused it, so that nothing was launched.
        return
    launcher = config.cluster.launcher
    if launcher == "local":
        return
    if launcher == "auto":
        from components.kubernetes import choice

        if not choice.is_on_a_cluster():
            return
    from components.kubernetes.launcher import delete_jobs

    failed: list[UserError] = []
    for name in ENGINES if launcher == "auto" else (launcher,):
        try:
            delete_jobs(engine(name), config.cluster.kubernetes, run_id)
        except UserError as error:
            # The jobs of the other engine end all the same.
            failed.append(error)
    if failed:
        raise failed[0]

"""One task of a training cluster: which one this process is, and what its role does.

A parameter server and a worker serve, a chief leads; where there is no chief, worker 0 leads, or
all workers do. The evaluator watches the checkpoints.
"""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from trainer import chiefless, cluster, config_file, heartbeat, lock
from trainer.cluster import Cluster, Task
from trainer.config import Config
from trainer.errors import ConfigError
from trainer.launcher import Job, task_command
from trainer.topology import leader, topology_of

_HOSTS = ("ps", "worker", "chief")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what a task has to be told on its command line."""
    parser.add_argument("--dataset", required=True, metavar="URI")
    parser.add_argument("--checkpoints", required=True, metavar="URI")
    flags = parser.add_argument_group("the cluster and this task, where TF_CONFIG does not say it")
    for role in _HOSTS:
        flags.add_argument(f"--{role}_hosts", default="", metavar="HOST:PORT,...")
    flags.add_argument("--job_name", default="", metavar="ROLE")
    flags.add_argument("--task_index", default=0, type=int, metavar="N")


def run(options: argparse.Namespace) -> None:
    """Be the task that the flags, or else TF_CONFIG, name; a server never returns.

    Raises:
        UserError: the command line, the configuration or TF_CONFIG is wrong, or the role's work
            fails.
    """
    config = config_file.load(options.config)
    tasks, this = _cluster(options)
    _require_roles(config, tasks)
    job = Job(
        config=config,
        dataset=options.dataset,
        checkpoints=options.checkpoints,
        workdir=options.workdir,
    )
    if this.role == "evaluator":
        _evaluate(job)
        return
    cluster.check_port(tasks, this)
    used = topology_of(config.training.strategy)
    if used.chief and not tasks.count("chief") and this == chiefless.FIRST_WORKER:
        tasks, this = chiefless.with_chief(tasks), chiefless.CHIEF
        command = task_command(job, options.config, job.workdir)
        chiefless.serve_beside(tasks, command, config.cluster.max_restarts)
    # For whatever of TensorFlow reads it: without the evaluator, and with the chief.
    os.environ["TF_CONFIG"] = tasks.tf_config(this)
    # Graphs that run in this process find its shards by paths that are relative to its folder.
    _enter(job.workdir)
    if used.leads(this):
        from trainer.lead import lead

        heartbeat.begin()
        with _lock(job, tasks, this) as held:
            lead(job, tasks, this, held)
    else:
        from trainer.serve import serve

        heartbeat.begin()
        serve(job, tasks, this)


def _lock(job: Job, tasks: Cluster, this: Task) -> AbstractContextManager[lock.Unlocked]:
    """Hold the lock of the checkpoints, where this task is the one that publishes."""
    if this != leader(tasks):
        return nullcontext(lock.Unlocked())
    return lock.held(job.checkpoints, job.run_id)


def _evaluate(job: Job) -> None:
    from trainer.watch import watch

    # It is in no cluster of TensorFlow's.
    os.environ.pop("TF_CONFIG", None)
    _enter(job.workdir)
    heartbeat.begin()
    watch(job)


def _cluster(options: argparse.Namespace) -> tuple[Cluster, Task]:
    hosts = {role: getattr(options, f"{role}_hosts") for role in _HOSTS}
    if options.job_name or any(hosts.values()):
        return cluster.from_flags(hosts, options.job_name, options.task_index)
    return cluster.from_tf_config(os.environ.get("TF_CONFIG", ""))


def _require_roles(config: Config, tasks: Cluster) -> None:
    strategy = config.training.strategy
    used = topology_of(strategy)
    needed = {"ps": used.servers, "worker": used.workers}
    for role, is_needed in needed.items():
        if is_needed and not tasks.count(role):
            raise ConfigError(f"training.strategy: {strategy} needs a {role}; the cluster has none")
    if tasks.count("chief") and not used.chief:
        raise ConfigError(
            f"training.strategy: {strategy} is led by worker 0; leave the chief out of the cluster"
        )


def _enter(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(f"--workdir: cannot work in {folder}: {error.strerror}") from None

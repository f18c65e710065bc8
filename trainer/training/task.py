"""One task of a training cluster: this process finds its role and runs it.

In a strategy without a chief, every worker leads. A cluster may also have only parameter servers
and workers, as in published examples. In this case, worker 0 becomes the chief. A coordinator and a
server cannot share a process, so worker 0 starts a child process that serves as worker 0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import threading
from pathlib import Path

from flotilla.trainer import code as bundle
from flotilla.trainer.cluster import lease, liveness
from flotilla.trainer.cluster.launcher import Job, task_command
from flotilla.trainer.cluster.local import HOST, free_port
from flotilla.trainer.cluster.process import CONFIG
from flotilla.trainer.config import topology
from flotilla.trainer.config.load import load_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task, find_topology, leader
from flotilla.trainer.features import length
from flotilla.trainer.runtime import signals, user_code
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.storage.errors import report_errors
from flotilla.trainer.tracking.tracker import following_training

CHIEF = Task(role="chief", index=0)
FIRST_WORKER = Task(role="worker", index=0)
_HOSTS = ("ps", "worker", "chief")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a task."""
    parser.add_argument("--dataset", required=True, metavar="URI")
    parser.add_argument("--checkpoints", required=True, metavar="URI")
    flags = parser.add_argument_group("the cluster and this task, if TF_CONFIG is not set")
    for role in _HOSTS:
        flags.add_argument(f"--{role}_hosts", default="", metavar="HOST:PORT,...")
    flags.add_argument("--job_name", default="", metavar="ROLE")
    flags.add_argument("--task_index", default=0, type=int, metavar="N")


def run(options: argparse.Namespace) -> None:
    """Run the task named by flags or TF_CONFIG. A server never returns. Raises `UserError`."""
    config = length.resolve_for_dataset(load_config(options.config), options.dataset)
    bundle.enter(config.code)
    tasks, this = _cluster(options)
    if not config.program.command:
        _require_roles(config, tasks)
    job = Job(
        config=config,
        dataset=options.dataset,
        checkpoints=options.checkpoints,
        workdir=options.workdir,
    )
    if config.program.command:
        _run_program(job, tasks, this)
        return
    if this.role == "evaluator":
        _evaluate(job)
        return
    topology.check_port(tasks, this)
    used = find_topology(config.training.strategy)
    if used.chief and not tasks.count("chief") and this == FIRST_WORKER:
        tasks, this = add_chief(tasks), CHIEF
        command = task_command(job, options.config, job.workdir)
        start_first_worker(tasks, command, config.cluster.max_restarts)
    # Parts of TensorFlow read TF_CONFIG, which must list the chief, but not the evaluator.
    os.environ["TF_CONFIG"] = tasks.tf_config(this)
    liveness.configure_connections(tasks)
    # Graphs in this process find shards by paths relative to this folder.
    _enter(job.workdir)
    if used.leads(this):
        from flotilla.trainer.training.chief import lead

        liveness.begin()
        # The task that publishes holds the lease.
        publishes = this == leader(tasks)
        if not publishes:
            lead(job, tasks, this, lease.NoLease())
            return
        with (
            following_training(job, leads=True),
            lease.hold_lease(job.checkpoints, job.run_id) as held,
        ):
            lead(job, tasks, this, held)
    else:
        from flotilla.trainer.training.server import serve

        liveness.begin()
        serve(job, tasks, this)


def train_in_process(job: Job) -> None:
    """Train in this process, without graphs, for a debugger. Raises `UserError`.

    An error in the user's code keeps its stack frames, which would be lost in a graph.
    """
    import keras
    import tensorflow as tf

    keras.config.disable_traceback_filtering()
    tf.debugging.disable_traceback_filtering()
    tf.config.run_functions_eagerly(True)
    with report_errors(f"write to {job.workdir}"):
        job.workdir.mkdir(parents=True, exist_ok=True)
        config = job.workdir / CONFIG
        config.write_text(job.config.model_dump_json(), encoding="utf-8")
    own = {"dataset": job.dataset, "checkpoints": job.checkpoints, "workdir": job.workdir}
    address = f"{HOST}:{free_port()}"
    hosts = {"chief_hosts": address, "ps_hosts": "", "worker_hosts": ""}
    run(argparse.Namespace(config=config, job_name="chief", task_index=0, **own, **hosts))


def add_chief(cluster: Cluster) -> Cluster:
    """Return the cluster with a chief on a free port of worker 0's host."""
    host, _, _ = cluster.address(FIRST_WORKER).rpartition(":")
    return Cluster(addresses={"chief": (f"{host}:{free_port()}",), **cluster.addresses})


def start_first_worker(cluster: Cluster, command: list[str], restarts: int) -> None:
    """Serve as worker 0 in a child process, and restart it up to `restarts` times."""
    # Drop the variable for heartbeats, because only this process sends them to its parent.
    inherited = {name: value for name, value in os.environ.items() if name != liveness.VARIABLE}
    settings = {
        **inherited,
        **signals.parent_environment(),
        **user_code.environment(),
        "TF_CONFIG": cluster.tf_config(FIRST_WORKER),
        "TF_USE_LEGACY_KERAS": "1",
    }

    # Get the working directory before it changes: the command line may have relative paths.
    here = os.getcwd()

    def supervise() -> None:
        for _ in range(restarts + 1):
            subprocess.run(command, cwd=here, env=settings, stdin=subprocess.DEVNULL, check=False)

    threading.Thread(target=supervise, name="worker-0", daemon=True).start()


def _run_program(job: Job, tasks: Cluster, this: Task) -> None:
    from flotilla.trainer.program.agent import Agent

    if this.role != "evaluator":
        topology.check_port(tasks, this)
    _enter(job.workdir)
    liveness.begin()
    Agent(job, tasks, this, is_local=True).train()


def _evaluate(job: Job) -> None:
    from flotilla.trainer.training.evaluator import watch

    os.environ.pop("TF_CONFIG", None)
    _enter(job.workdir)
    liveness.begin()
    with following_training(job, leads=False):
        watch(job)


def _cluster(options: argparse.Namespace) -> tuple[Cluster, Task]:
    hosts = {role: getattr(options, f"{role}_hosts") for role in _HOSTS}
    if options.job_name or any(hosts.values()):
        return topology.from_flags(hosts, options.job_name, options.task_index)
    return topology.from_tf_config(os.environ.get("TF_CONFIG", ""))


def _require_roles(config: Config, tasks: Cluster) -> None:
    strategy = config.training.strategy
    used = find_topology(strategy)
    needed = {"ps": used.servers, "worker": used.workers}
    for role, is_needed in needed.items():
        if is_needed and not tasks.count(role):
            raise ConfigError(
                f"training.strategy: {strategy} needs a {role}, but the cluster has none"
            )
    if tasks.count("chief") and not used.chief:
        raise ConfigError(
            f"training.strategy: {strategy} has no chief (worker 0 leads); remove the chief"
        )


def _enter(folder: Path) -> None:
    # Keep the user's modules importable: they are in the working directory, which changes now.
    os.environ.update(user_code.environment())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        os.chdir(folder)
    except OSError as error:
        raise ConfigError(f"--workdir: cannot use {folder}: {error.strerror}") from None

"""The local launcher: a real cluster on loopback, one process a task, watched until it ends.

A worker or parameter server that dies is started again where it was; a chief that dies, or asks to
begin again, begins a new life from the newest checkpoint. When the chief is done, fails, or an end
is asked for, every process is stopped; when this process is killed, the kernel ends the tasks.

Free ports on loopback, held for as long as a cluster lives.

Two clusters that start at once must not choose the same port, and a restarted task needs its old
one again. A socket that is bound but does not listen does both: with SO_REUSEADDR on each side the
task may bind and listen beside it, while the kernel gives the port to nobody who asks for any.
"""

from __future__ import annotations

import os
import queue
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from trainer.cluster.launcher import Job
from trainer.cluster.process import TaskProcess
from trainer.cluster.signals import on_interrupt
from trainer.cluster.supervisor import EVALUATOR, EvaluatorCare, Supervisor, TaskEvents
from trainer.config.schema import Config
from trainer.errors import ConfigError
from trainer.topology import Cluster, Task, from_tf_config, leader, topology_of

HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port that nobody holds at this moment."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def held_cluster(tasks: dict[str, int]) -> Iterator[Cluster]:
    """Yield a cluster of `tasks` (role to count) on ports that stay reserved in the block."""
    with ExitStack() as sockets:
        addresses = {
            role: tuple(f"{HOST}:{_hold(sockets)}" for _ in range(count))
            for role, count in tasks.items()
        }
        yield Cluster(addresses=addresses)


def _hold(sockets: ExitStack) -> int:
    holder = sockets.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((HOST, 0))
    return int(holder.getsockname()[1])


def launch(job: Job) -> None:
    """Train `job` on this machine; see `trainer.cluster.launcher.Launcher`.

    SIGINT and SIGTERM to this process end training with a last checkpoint; a second one ends at
    once.
    """
    happenings: TaskEvents = queue.SimpleQueue()
    with _cluster(job.config) as (cluster, own), on_interrupt(lambda: happenings.put(None)):
        processes = {
            task: TaskProcess(job, cluster, task)
            for role, count in own.items()
            for task in (Task(role=role, index=index) for index in range(count))
        }
        leading = leader(cluster)
        others = [process for task, process in processes.items() if task != leading]
        if job.config.cluster.evaluator:
            processes[EVALUATOR] = TaskProcess(job, cluster, EVALUATOR)
        care = EvaluatorCare(processes.get(EVALUATOR))
        try:
            Supervisor(job, processes[leading], others, care, happenings).run()
        finally:
            for process in processes.values():
                process.kill()


@contextmanager
def _cluster(config: Config) -> Iterator[tuple[Cluster, dict[str, int]]]:
    """Yield the cluster, and how many tasks of each role are to be started."""
    if config.cluster.existing_servers:
        cluster, this = from_tf_config(os.environ.get("TF_CONFIG", ""))
        if this.role != "chief":
            raise ConfigError(
                f"cluster.existing_servers: TF_CONFIG names the task {this}, and only a chief can "
                "be started for servers that run already"
            )
        yield cluster, {"chief": 1}
        return
    topology = topology_of(config.training.strategy)
    tasks = topology.tasks(servers=config.cluster.parameter_servers, workers=config.cluster.workers)
    with held_cluster(tasks) as cluster:
        yield cluster, {"chief": 1} if config.cluster.in_process and topology.servers else tasks

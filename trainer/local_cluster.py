"""The local launcher: a real cluster on loopback, one process a task, watched until it ends.

A worker or parameter server that dies is started again where it was; a chief that dies, or asks to
begin again, begins a new life from the newest checkpoint. When the chief is done, fails, or an end
is asked for, every process is stopped; when this process is killed, the kernel ends the tasks.
"""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.cluster import Cluster, Task, from_tf_config
from trainer.config import Config
from trainer.errors import ConfigError
from trainer.evaluator_care import EVALUATOR, EvaluatorCare
from trainer.interrupts import on_interrupt
from trainer.launcher import Job
from trainer.local_ports import held_cluster
from trainer.supervisor import Happenings, Supervisor
from trainer.task_process import TaskProcess
from trainer.topology import leader, topology_of


def launch(job: Job) -> None:
    """Train `job` on this machine; see `trainer.launcher.Launcher`.

    SIGINT and SIGTERM to this process end training with a last checkpoint; a second one ends at
    once.
    """
    happenings: Happenings = queue.SimpleQueue()
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

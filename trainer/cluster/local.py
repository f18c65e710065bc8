"""The local launcher: a cluster on loopback with one supervised process per task.

A socket that is bound but does not listen reserves each port while the cluster exists. With
SO_REUSEADDR on both sockets, the task can listen on the same port, and the kernel never offers the
port as a free one.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from flotilla.trainer import events
from flotilla.trainer.cluster import lease, loopback
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.process import LOG, TaskProcess, require_gpus
from flotilla.trainer.cluster.supervisor import EVALUATOR, EvaluatorSupervision, Supervisor
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task, from_tf_config, leader
from flotilla.trainer.events.progress import LogLines
from flotilla.trainer.runtime.background import Loop
from flotilla.trainer.runtime.errors import ConfigError, UserError

HOST = "127.0.0.1"


def free_port() -> int:
    """Return a port that is currently free."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


@contextmanager
def reserve_cluster(tasks: dict[str, int]) -> Iterator[Cluster]:
    """Yield a cluster on reserved ports. `tasks` maps each role to its number of tasks."""
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
    """Train `job` on this machine until the final checkpoint is published and no task is running.

    A signal ends training after a last checkpoint is saved. Raises a `UserError` that names the
    task and its error, or `RunInterruptedError` after a request to stop.
    """
    require_gpus(job.config)
    with _cluster(job.config) as (cluster, own):
        _report_open_ports(cluster, own)
        processes = {
            task: TaskProcess(job, cluster, task)
            for role, count in own.items()
            for task in (Task(role=role, index=index) for index in range(count))
        }
        leading = leader(cluster)
        others = [process for task, process in processes.items() if task != leading]
        wanted = job.config.has_evaluator
        evaluator = EvaluatorSupervision(TaskProcess(job, cluster, EVALUATOR) if wanted else None)
        Supervisor(job, processes[leading], others, evaluator).run()


def _report_open_ports(cluster: Cluster, own: dict[str, int]) -> None:
    tasks = [Task(role=role, index=0) for role in own if cluster.count(role)]
    closes = any(loopback.is_loopback(cluster.address(task)) for task in tasks)
    if sum(map(len, cluster.addresses.values())) > 1 and closes and not loopback.can_close():
        events.emit(events.OpenPorts(warning=loopback.WARNING))


@contextmanager
def _cluster(config: Config) -> Iterator[tuple[Cluster, dict[str, int]]]:
    if config.cluster.existing_servers:
        cluster, this = from_tf_config(os.environ.get("TF_CONFIG", ""))
        if this.role != "chief":
            raise ConfigError(
                f"cluster.existing_servers: TF_CONFIG describes the task {this}, but only a chief "
                "can join running servers; set task in TF_CONFIG to the chief"
            )
        yield cluster, {"chief": 1}
        return
    topology = config.topology
    tasks = topology.tasks(servers=config.cluster.parameter_servers, workers=config.cluster.workers)
    with reserve_cluster(tasks) as cluster:
        yield cluster, {"chief": 1} if config.cluster.in_process and topology.servers else tasks


log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
LineSink = Callable[[str, str], None]


class TaskLogs:
    """A reader of the logs below a folder, which reads each line once.

    `traceback` is the traceback of the user's code, or empty.
    """

    def __init__(self, workdir: Path, sink: LineSink) -> None:
        """Skip the lines that earlier attempts have written."""
        self.traceback = ""
        self._sink = sink
        self._workdir = workdir
        self._lines = LogLines()
        self._positions = {path: path.stat().st_size for path in self._logs()}

    def take(self) -> None:
        """Read new lines. Log events as text, and pass other lines to the sink."""
        for path in self._logs():
            # Ignore errors, because another process may remove the folder.
            with suppress(OSError):
                for line in self._new(path):
                    self._relay(path.parent.name, line)

    def _logs(self) -> list[Path]:
        return sorted(self._workdir.glob(f"*/{LOG}"))

    def _new(self, path: Path) -> Iterator[str]:
        with path.open("rb") as file:
            file.seek(self._positions.get(path, 0))
            for line in file:
                # Leave an incomplete line for the next call.
                if line.endswith(b"\n"):
                    self._positions[path] = file.tell()
                    yield line.decode("utf-8", errors="replace").rstrip("\n")

    def _relay(self, task: str, line: str) -> None:
        event = events.parse(line, job=lease.lease_environment()[events.JOB])
        if isinstance(event, events.UserCodeFailed):
            self.traceback = event.traceback
        if not event:
            self._sink(task, line)
        elif words := self._lines.take(event):
            log.info("%s", words)


@contextmanager
def relay_logs(workdir: Path, sink: LineSink) -> Iterator[None]:
    """Relay the logs of the tasks below `workdir` in this block, up to their last line."""
    logs = TaskLogs(workdir, sink)
    follower = Loop(
        logs.take, _LOOK_SECONDS, name="task logs", failing="cannot follow the logs of the tasks"
    ).start()
    try:
        try:
            yield
        finally:
            follower.stop()
            follower.join()
            logs.take()
    except UserError as error:
        error.traceback = error.traceback or logs.traceback
        raise

"""The local launcher: a cluster on loopback with one supervised process per task.

A socket that is bound but does not listen reserves each port while the cluster exists. With
SO_REUSEADDR on both sockets, the task can listen on the same port, and the kernel never offers the
port as a free one.

Every event is a `TaskEvent` in one queue: the end of a task, or a request to stop (see
`flotilla.trainer.runtime.signals`). `Supervisor.run` processes them one by one:

- The leader ended, and its record says that training is over
  (`flotilla.trainer.cluster.launcher`): the evaluator may finish the last checkpoint, and the run
  ends. Exit code 0 without this record fails the run.
- A task died: it is restarted, up to `cluster.max_restarts` incidents in total. Exit codes of a
  permanent failure (`End.is_final`) end the run.
- A stop was requested: the leader gets SIGTERM, and has `GRACE_SECONDS` for a last checkpoint.
- The evaluator failed: `EvaluatorSupervision` restarts it. Its failure never ends a run.

TensorFlow's servers outlive a chief and keep the resources of its graphs for ten minutes: tens of
megabytes per attempt on a parameter server, and a hundred or more on a worker. When a chief
restarts, `ServerMemory` also restarts each server that would otherwise grow, during the next
attempt, to more than twice its size at the end of the first one.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from flotilla.trainer import events
from flotilla.trainer.cluster import lease, liveness, loopback
from flotilla.trainer.cluster.launcher import Job, require_end
from flotilla.trainer.cluster.process import (
    LOG,
    OVER,
    End,
    TaskProcess,
    report_failure,
    require_gpus,
)
from flotilla.trainer.config.schema import Config
from flotilla.trainer.config.topology import Cluster, Task, from_tf_config, leader
from flotilla.trainer.events.progress import LogLines
from flotilla.trainer.runtime.errors import (
    BEGIN_AGAIN,
    DONE,
    FAILED,
    INTERRUPTED,
    TRY_AGAIN,
    USAGE,
    ConfigError,
    RunInterruptedError,
    UserError,
    error_for_exit,
)
from flotilla.trainer.runtime.loop import Loop
from flotilla.trainer.runtime.signals import handle_interrupts

HOST = "127.0.0.1"
GRACE_SECONDS = 60.0
# Time to wait for the evaluator after training (per checkpoint on Kubernetes), in seconds.
EVALUATION_SECONDS = 600.0
# Maximum growth of a server's memory, relative to the end of the first attempt. A lower limit would
# cause more restarts, each of which loses a parameter server's values, and TensorFlow frees a dead
# chief's memory after ten minutes anyway.
MAX_GROWTH = 1.0
EVALUATOR = Task(role="evaluator", index=0)
# Maximum number of restarts of a failing evaluator. They do not count toward
# `cluster.max_restarts`.
MAX_EVALUATOR_RESTARTS = 20
_SERVERS = ("ps", "worker")

TaskEvent = tuple[TaskProcess, End] | None  # A task and how it ended, or None for a stop request.
log = logging.getLogger(__name__)
_LOOK_SECONDS = 0.5
LineSink = Callable[[str, str], None]


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


class ServerMemory:
    """The resident memory of servers at the end of each attempt of a chief."""

    def __init__(self) -> None:
        """Start without measurements."""
        self._first: dict[Task, int] = {}
        self._last: dict[Task, int] = {}

    def restart_grown(self, chief: TaskProcess, servers: list[TaskProcess]) -> None:
        """Kill servers that would exceed the limit after another attempt of the ended `chief`."""
        for server in servers:
            now = server.resident_bytes()
            restarted = server.task in self._first and server.task not in self._last
            # Skip a server that missed part of the attempt, unless it was restarted for growth.
            if not now or (server.started_at > chief.started_at and not restarted):
                continue
            first = self._first.setdefault(server.task, now)
            growth = max(0, now - self._last.get(server.task, now))
            self._last[server.task] = now
            if now + growth > (1 + MAX_GROWTH) * first:
                del self._last[server.task]
                server.kill_grown(first, now)


class EvaluatorSupervision:
    """The supervision of the evaluator, if there is one. Its failures never end a run."""

    def __init__(self, process: TaskProcess | None) -> None:
        """Supervise `process`."""
        self._process = process
        self._restarts = 0
        self.running = False

    def begin(self) -> TaskProcess | None:
        """Return the process to start, or None if there is no evaluator."""
        if self._process:
            # Ignore errors here, because the start of the process reports them.
            with suppress(OSError):
                (self._process.folder / OVER).unlink()
            self.running = True
        return self._process

    def kill(self) -> None:
        """Kill the process, if any."""
        if self._process:
            self._process.kill()

    def handle_end(self, end: End) -> TaskProcess | None:
        """Return the process to restart after `end`, or None. Report failures and restarts."""
        process = self._process
        if process is None or end.code == DONE:
            self.running = False
            return None
        if end.is_final or self._restarts >= MAX_EVALUATOR_RESTARTS:
            self.running = False
            report_failure(process, end)
            return None
        self._restarts += 1
        events.emit(
            events.Restart(task=str(process.task), cause=end.cause, restarts=self._restarts)
        )
        return process

    def give_up(self, reason: str) -> None:
        """Continue without the evaluator."""
        self.running = False
        events.emit(events.EvaluatorLeft(reason=reason))

    def signal_end(self) -> None:
        """Notify the evaluator that no checkpoint will follow."""
        # If the disk is full, the file cannot be written, and the wait for the evaluator times out.
        if self._process:
            with suppress(OSError):
                (self._process.folder / OVER).touch()

    def log_bytes(self) -> int:
        """Return the size of the evaluator's log, which grows with each evaluation."""
        with suppress(OSError):
            return self._process.log.stat().st_size if self._process else 0
        return 0


class Supervisor:
    """A supervisor that runs the tasks of one job until the leader ends."""

    def __init__(
        self,
        job: Job,
        leader: TaskProcess,
        others: list[TaskProcess],
        evaluator: EvaluatorSupervision,
    ) -> None:
        """Supervise `leader` and the `others`."""
        self._job = job
        self._limit = job.config.cluster.max_restarts
        self._is_program = bool(job.config.program.command)
        self._stall_timeout = job.config.training.stall_timeout
        self._leader = leader
        self._others = others
        self._evaluator = evaluator
        self._events = queue.SimpleQueue[TaskEvent]()
        self._memory = ServerMemory()
        self._restarts = 0
        # For each task, the number of restarts of all tasks before it was last started.
        self._restarts_at_start = dict.fromkeys((p.task for p in (leader, *others)), 0)

    def run(self) -> None:
        """Start all tasks, and return when the leader is done and no task runs.

        Raises `UserError` if a task failed permanently, and `RunInterruptedError` after a signal.
        """
        with handle_interrupts(lambda: self._events.put(None)):
            try:
                self._supervise()
            finally:
                for process in (self._leader, *self._others):
                    process.kill()
                self._evaluator.kill()

    def _supervise(self) -> None:
        for process in (*self._others, self._leader):
            self._start(process)
        self._start_evaluator(self._evaluator.begin())
        is_over = False
        while True:
            event = self._events.get()
            if event is None:
                self._stop()
            process, end = event
            if process.task == EVALUATOR:
                self._start_evaluator(self._evaluator.handle_end(end))
                continue
            if end.code == DONE and process is not self._leader and self._is_program:
                # Require no record: for a program, only the leader's exit shows that training is
                # over.
                continue
            if end.code == DONE:
                # If all workers run the outer loop, any of them may end shortly before the leader.
                require_end(self._job, f"{process.task} (log {process.log})")
                is_over = True
            if process is self._leader and is_over:
                # Do not restart the leader, even if it failed: its workers may have ended.
                self._await_evaluator()
                return
            if end.code not in (DONE, INTERRUPTED) or process is self._leader:
                self._restart(process, end)

    def _restart(self, process: TaskProcess, end: End) -> None:
        if end.code == INTERRUPTED:
            raise RunInterruptedError(process.termination_message())
        if end.is_final:
            report_failure(process, end)
            message = process.termination_message() or (
                f"{end.cause}; the last line of its log: {process.last_line()}"
            )
            raise error_for_exit(end.code)(f"{message} ({process.task}, log {process.log})")
        if not end.planned:
            self._count_incident(process, end)
        self._restarts_at_start[process.task] = self._restarts
        events.emit(
            events.Restart(task=str(process.task), cause=end.cause, restarts=self._restarts)
        )
        servers = [each for each in self._others if each.task.role in _SERVERS]
        if process is self._leader and process.task.role == "chief":
            self._memory.restart_grown(process, servers)
        self._start(process)

    def _count_incident(self, process: TaskProcess, end: End) -> None:
        # A task that restarts because another one was lost belongs to the same incident. So does a
        # stalled task if the tasks that waited for it have already restarted.
        follows = end.code == BEGIN_AGAIN or end.stalled
        if follows and self._restarts_at_start[process.task] < self._restarts:
            return
        if self._restarts >= self._limit:
            report_failure(process, end)
            raise UserError(
                f"{process.task} ended with {end.cause}, and no restarts are left "
                f"(cluster.max_restarts is {self._limit}); the last line of {process.log}: "
                f"{process.last_line()}"
            )
        self._restarts += 1

    def _start_evaluator(self, process: TaskProcess | None) -> None:
        if process is None:
            return
        try:
            self._start(process)
        except UserError as error:
            self._evaluator.give_up(str(error))

    def _await_evaluator(self) -> None:
        self._evaluator.signal_end()
        logged = self._evaluator.log_bytes()
        while self._evaluator.running:
            try:
                event = self._events.get(timeout=EVALUATION_SECONDS)
            except queue.Empty:
                before, logged = logged, self._evaluator.log_bytes()
                if logged == before:
                    self._evaluator.give_up(
                        f"no checkpoint was evaluated for {EVALUATION_SECONDS:g} s"
                    )
                    return
                continue
            if event is None:
                raise RunInterruptedError(
                    "interrupted after training ended, before its last checkpoint was evaluated"
                )
            if event[0].task == EVALUATOR:
                self._start_evaluator(self._evaluator.handle_end(event[1]))

    def _stop(self) -> NoReturn:
        code = self._stop_leader()
        message = self._leader.termination_message()
        if code in (FAILED, TRY_AGAIN, USAGE) and message:
            raise UserError(message)
        raise RunInterruptedError(message or "interrupted before training began")

    def _stop_leader(self) -> int:
        """Send SIGTERM to the leader, which publishes a last checkpoint. Return its exit code."""
        self._leader.terminate()
        while True:
            try:
                event = self._events.get(timeout=GRACE_SECONDS)
            except queue.Empty:
                raise RunInterruptedError(
                    f"interrupted; the last checkpoint was not complete after {GRACE_SECONDS:g} s; "
                    "the previous checkpoint is complete"
                ) from None
            if event is None:
                raise RunInterruptedError("interrupted twice; the previous checkpoint is complete")
            if event[0] is self._leader:
                return event[1].code

    def _start(self, process: TaskProcess) -> None:
        popen = process.start()
        heartbeat = process.heartbeat
        # A chief whose call to a stopped server hangs may hold the interpreter lock, and send no
        # heartbeat until that server has been killed.
        timeout = self._stall_timeout * (2 if process.task.role == "chief" else 1)

        def wait_for_end() -> None:
            popen.wait()
            self._events.put((process, process.end()))

        def wait_for_silence() -> None:
            stalled = liveness.wait_until_silent(heartbeat, timeout)
            os.close(heartbeat)
            if stalled and popen.poll() is None:
                process.kill_stalled(timeout)

        for work in (wait_for_end, wait_for_silence):
            name = f"{work.__name__} {process.task}"
            threading.Thread(target=work, name=name, daemon=True).start()


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

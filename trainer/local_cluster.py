"""The local launcher: a real cluster on loopback, one process a task, watched until it ends.

A worker or parameter server that dies is started again where it was; a chief that dies, or asks to
begin again, begins a new life from the newest checkpoint. When the chief is done, fails, or an end
is asked for, every process is stopped; when this process is killed, the kernel ends the tasks.
"""

from __future__ import annotations

import queue
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from trainer import events
from trainer.cluster import Task
from trainer.errors import (
    BEGIN_AGAIN,
    DONE,
    FAILED,
    INTERRUPTED,
    USAGE,
    RunInterruptedError,
    UserError,
)
from trainer.launcher import Job
from trainer.local_ports import held_cluster
from trainer.task_process import TaskProcess
from trainer.topology import leader, topology_of

# A chief that was asked to end has this long to publish its last checkpoint.
GRACE_SECONDS = 60.0

_Happening = tuple[TaskProcess, int] | None  # a task with its exit code, or None: end
_Happenings = queue.SimpleQueue[_Happening]


def launch(job: Job) -> None:
    """Train `job` on this machine; see `trainer.launcher.Launcher`.

    SIGINT and SIGTERM to this process end training with a last checkpoint; a second one ends at
    once.
    """
    topology = topology_of(job.config.training.strategy)
    tasks = topology.tasks(
        servers=job.config.cluster.parameter_servers, workers=job.config.cluster.workers
    )
    in_process = job.config.cluster.in_process and topology.servers
    happenings: _Happenings = queue.SimpleQueue()
    with held_cluster(tasks) as cluster, _signals(happenings):
        processes = [
            TaskProcess(job, cluster, Task(role=role, index=index))
            for role, count in (tasks if not in_process else {"chief": 1}).items()
            for index in range(count)
        ]
        try:
            for process in processes:
                _start(process, happenings)
            _Supervisor(job, leader(cluster), processes, happenings).run()
        finally:
            for process in processes:
                process.kill()


class _Supervisor:
    def __init__(
        self, job: Job, leading: Task, processes: list[TaskProcess], happenings: _Happenings
    ) -> None:
        self._limit = job.config.cluster.max_restarts
        self._leader = next(p for p in processes if p.task == leading)
        self._happenings = happenings
        self._restarts = 0
        # How many restarts there had been when a task was last started.
        self._born = dict.fromkeys((p.task for p in processes), 0)

    def run(self) -> None:
        while True:
            happening = self._happenings.get()
            if happening is None:
                code = self._end_leader()
                words = self._leader.words()
                if code in (FAILED, USAGE) and words:
                    raise UserError(words)
                raise RunInterruptedError(words or "interrupted before training began")
            process, code = happening
            if process is self._leader and code == DONE:
                return
            # Where all workers run the outer loop, the others may end a little before the leader.
            if code not in (DONE, INTERRUPTED) or process is self._leader:
                self._react(process, code)

    def _react(self, process: TaskProcess, code: int) -> None:
        """Start a task again that died, or raise when that would be of no use."""
        if code == INTERRUPTED:
            raise RunInterruptedError(process.words())
        if code in (FAILED, USAGE):
            words = process.words() or process.last_line()
            raise UserError(f"{words} ({process.task}, log {process.log})")
        self._count(process, code)
        self._born[process.task] = self._restarts
        events.emit("restart", task=str(process.task), cause=_cause(code), restarts=self._restarts)
        _start(process, self._happenings)

    def _count(self, process: TaskProcess, code: int) -> None:
        # A task that begins again because another one was lost is the same incident.
        if code == BEGIN_AGAIN and self._born[process.task] < self._restarts:
            return
        if self._restarts >= self._limit:
            raise UserError(
                f"{process.task} ended with {_cause(code)} and cluster.max_restarts "
                f"({self._limit}) are used up; its last words in {process.log}: "
                f"{process.last_line()}"
            )
        self._restarts += 1

    def _end_leader(self) -> int:
        self._leader.terminate()
        while True:
            try:
                happening = self._happenings.get(timeout=GRACE_SECONDS)
            except queue.Empty:
                raise RunInterruptedError(
                    f"interrupted; the last checkpoint was not done after {GRACE_SECONDS:g} s, "
                    "the one before it is whole"
                ) from None
            if happening is None:
                raise RunInterruptedError("interrupted twice; the checkpoint before it is whole")
            if happening[0] is self._leader:
                return happening[1]


def _start(process: TaskProcess, happenings: _Happenings) -> None:
    popen = process.start()

    def wait() -> None:
        code = popen.wait()
        happenings.put((process, code))

    threading.Thread(target=wait, name=f"wait {process.task}", daemon=True).start()


@contextmanager
def _signals(happenings: _Happenings) -> Iterator[None]:
    def ask(_signal: int, _frame: FrameType | None) -> None:
        happenings.put(None)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cause(code: int) -> str:
    if code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"

"""Watches the tasks of a local cluster: who ended, who is stalled, and who is started again.

What lives of a chief leave behind in the servers, and when a server has to begin anew for it.

TensorFlow's servers outlive a chief and keep what its graphs needed: a parameter server tens of
megabytes a life, a worker a hundred and more. A server that would grow by more than `MOST_GROWTH`
is renewed when a chief begins again, which costs no step: the chief reads its variables from a
checkpoint then, and loads TensorFlow as long as the server does.

The evaluator of a local cluster: started again when it dies, and never a reason to end a run.
"""

from __future__ import annotations

import os
import queue
import threading
from contextlib import suppress
from typing import NoReturn

from trainer import events
from trainer.cluster import liveness
from trainer.cluster.launcher import Job
from trainer.cluster.process import OVER, End, TaskProcess, report_failure
from trainer.errors import (
    BEGIN_AGAIN,
    DONE,
    FAILED,
    INTERRUPTED,
    USAGE,
    RunInterruptedError,
    UserError,
)
from trainer.topology import Task

# Share by which a server's memory may grow over what it was at the end of its first chief's life.
MOST_GROWTH = 0.25


class ServerMemory:
    """The resident memory of servers at each end of a chief's life."""

    def __init__(self) -> None:
        """Begin with the first life."""
        self._first: dict[Task, int] = {}
        self._last: dict[Task, int] = {}

    def renew_grown(self, chief: TaskProcess, servers: list[TaskProcess]) -> None:
        """End those servers of which another life of a chief would make too much.

        Args:
            chief: whose life has ended, and which is not yet started again.
            servers: those that may have served it.
        """
        for server in servers:
            now = server.resident_bytes()
            renewed = server.task in self._first and server.task not in self._last
            # One that was started meanwhile, for another reason, has not served for a whole life.
            if not now or (server.started_at > chief.started_at and not renewed):
                continue
            first = self._first.setdefault(server.task, now)
            growth = max(0, now - self._last.get(server.task, now))
            self._last[server.task] = now
            if now + growth > (1 + MOST_GROWTH) * first:
                del self._last[server.task]
                server.kill_grown(first, now)


EVALUATOR = Task(role="evaluator", index=0)
# One that cannot live is given up; its restarts are none of `cluster.max_restarts`.
MOST_RESTARTS = 20


class EvaluatorCare:
    """What becomes of the evaluator, if there is one."""

    def __init__(self, process: TaskProcess | None) -> None:
        """Take care of `process`."""
        self._process = process
        self._restarts = 0
        self.running = False

    def begin(self) -> TaskProcess | None:
        """Return what is to be started at first."""
        if self._process:
            # What cannot be removed there cannot be started there either, which says so.
            with suppress(OSError):
                (self._process.folder / OVER).unlink()
            self.running = True
        return self._process

    def ended(self, end: End) -> TaskProcess | None:
        """Take its end in; return what is to be started again."""
        process = self._process
        if process is None or end.code == DONE:
            self.running = False
            return None
        if end.is_final or self._restarts >= MOST_RESTARTS:
            self.running = False
            report_failure(process, end)
            return None
        self._restarts += 1
        events.emit("restart", task=str(process.task), cause=end.cause, restarts=self._restarts)
        return process

    def give_up(self, reason: str) -> None:
        """Go on without it."""
        self.running = False
        events.emit("evaluator_left", reason=reason)

    def training_is_over(self) -> None:
        """Tell it that no checkpoint will follow."""
        # On a full disk it is not told; the wait for it has an end.
        if self._process:
            with suppress(OSError):
                (self._process.folder / OVER).touch()


# A chief that was asked to end has this long to publish its last checkpoint.
GRACE_SECONDS = 60.0
# After training the evaluator has this long for one checkpoint, the last one among them.
EVALUATION_SECONDS = 600.0
_SERVERS = ("ps", "worker")

TaskEvent = tuple[TaskProcess, End] | None  # a task with its end, or None: an end is asked for
TaskEvents = queue.SimpleQueue[TaskEvent]


class Supervisor:
    """Runs the tasks of one job to the end of the one that leads."""

    def __init__(
        self,
        job: Job,
        leader: TaskProcess,
        others: list[TaskProcess],
        care: EvaluatorCare,
        happenings: TaskEvents,
    ) -> None:
        """Watch `leader` and the `others`; `happenings` brings a request to end as well."""
        self._limit = job.config.cluster.max_restarts
        self._stall_seconds = job.config.training.stall_timeout
        self._leader = leader
        self._others = others
        self._care = care
        self._happenings = happenings
        self._memory = ServerMemory()
        self._restarts = 0
        # How many restarts there had been when a task was last started.
        self._born = dict.fromkeys((p.task for p in (leader, *others)), 0)

    def run(self) -> None:
        """Start all tasks, and return when the leader is done.

        Raises:
            UserError: a task failed for good, or once too often.
            RunInterruptedError: an end was asked for.
        """
        for process in (*self._others, self._leader):
            self._start(process)
        self._start_evaluator(self._care.begin())
        while True:
            happening = self._happenings.get()
            if happening is None:
                self._end_early()
            process, end = happening
            if process.task == EVALUATOR:
                self._start_evaluator(self._care.ended(end))
                continue
            if process is self._leader and end.code == DONE:
                self._await_evaluator()
                return
            # Where all workers run the outer loop, the others may end a little before the leader.
            if end.code not in (DONE, INTERRUPTED) or process is self._leader:
                self._react(process, end)

    def _react(self, process: TaskProcess, end: End) -> None:
        """Start a task again that died, or raise when that would be of no use."""
        if end.code == INTERRUPTED:
            raise RunInterruptedError(process.words())
        if end.is_final:
            report_failure(process, end)
            words = process.words() or f"{end.cause}; its last words: {process.last_line()}"
            raise UserError(f"{words} ({process.task}, log {process.log})")
        if not end.planned:
            self._count(process, end)
        self._born[process.task] = self._restarts
        events.emit("restart", task=str(process.task), cause=end.cause, restarts=self._restarts)
        if process is self._leader and process.task.role == "chief":
            self._memory.renew_grown(process, [p for p in self._others if p.task.role in _SERVERS])
        self._start(process)

    def _count(self, process: TaskProcess, end: End) -> None:
        # A task that begins again because another one was lost is the same incident; so is one
        # that is found stalled after those who waited for it have begun again.
        follows = end.code == BEGIN_AGAIN or end.stalled
        if follows and self._born[process.task] < self._restarts:
            return
        if self._restarts >= self._limit:
            report_failure(process, end)
            raise UserError(
                f"{process.task} ended with {end.cause} and cluster.max_restarts "
                f"({self._limit}) are used up; its last words in {process.log}: "
                f"{process.last_line()}"
            )
        self._restarts += 1

    def _start_evaluator(self, process: TaskProcess | None) -> None:
        if process is None:
            return
        try:
            self._start(process)
        except UserError as error:
            self._care.give_up(str(error))

    def _await_evaluator(self) -> None:
        """Let the evaluator come to the last checkpoint."""
        self._care.training_is_over()
        while self._care.running:
            try:
                happening = self._happenings.get(timeout=EVALUATION_SECONDS)
            except queue.Empty:
                self._care.give_up(f"no evaluation for {EVALUATION_SECONDS:g} s")
                return
            if happening is None:
                raise RunInterruptedError(
                    "interrupted when training was done and its last checkpoint not yet evaluated"
                )
            if happening[0].task == EVALUATOR:
                self._start_evaluator(self._care.ended(happening[1]))

    def _end_early(self) -> NoReturn:
        code = self._end_leader()
        words = self._leader.words()
        if code in (FAILED, USAGE) and words:
            raise UserError(words)
        raise RunInterruptedError(words or "interrupted before training began")

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
                return happening[1].code

    def _start(self, process: TaskProcess) -> None:
        popen = process.start()
        heart = process.heart
        # A chief that asks a stopped server may hold the interpreter, and gives no sign of life
        # itself, until that server has been found and killed.
        seconds = self._stall_seconds * (2 if process.task.role == "chief" else 1)

        def wait() -> None:
            popen.wait()
            self._happenings.put((process, process.end()))

        def listen() -> None:
            stalled = liveness.wait_until_silent(heart, seconds)
            os.close(heart)
            if stalled and popen.poll() is None:
                process.kill_stalled(seconds)

        for work in (wait, listen):
            name = f"{work.__name__} {process.task}"
            threading.Thread(target=work, name=name, daemon=True).start()

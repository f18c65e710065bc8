"""The agent of a program: runs one attempt of one task, without importing TensorFlow.

In a local run, the agent is the process of the task, and the guard is its child:

    Agent(job, cluster, task, is_local=True).train()     # raises the same errors as a chief

In a pod the agent is a sidecar, and the guard is the command of the user's container:

    agent = Agent(job, cluster, task, on_signal=..., grace=...)
    code = agent.run()          # runs the program, then stops the guard; raises no `UserError`
    agent.stop("why", code=1)   # from any thread: stop the program with SIGTERM
    agent.begin_no_more()       # from any thread: do not start a program that does not run yet
    agent.lose_guard(seconds)   # from any thread: the program's container has exited

`job.workdir` is the folder of the task (see `task_folders`), and the socket is in its `exchange`
folder. The leading task holds the lease of the checkpoints, publishes them, emits the training
events and records the end of training. While the program runs, only background threads access the
object store, so that a slow store delays neither progress, nor a stop, nor the end of the program.

The exit code of the program decides what follows (see `judge_end`). 0 means done. Codes from 2 to
127 are final; 2, 126 and 127 are configuration errors. If there are several tasks, 1 causes a
retry, because a worker also exits with 1 when another task is lost. With one task, 1 is final.
Codes from 128 up and signals cause a retry.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from flotilla.trainer import events, storage
from flotilla.trainer.checkpoints.history import History
from flotilla.trainer.cluster import lease
from flotilla.trainer.cluster.launcher import Job, is_over, record_end
from flotilla.trainer.cluster.process import OVER
from flotilla.trainer.config.program import EVALUATE
from flotilla.trainer.config.topology import Cluster, Task, leader
from flotilla.trainer.program import guard, layouts
from flotilla.trainer.program.link import Attempts, Link, Message
from flotilla.trainer.program.metrics import Metrics, MetricsFile
from flotilla.trainer.program.task_folders import (
    Publisher,
    TaskFolders,
    clear,
    fill,
    find_published,
    guard_environment,
    make_start,
    stage_dataset,
)
from flotilla.trainer.runtime import signals, user_code
from flotilla.trainer.runtime.errors import (
    DONE,
    FAILED,
    RETRYABLE,
    TRY_AGAIN,
    USAGE,
    ClusterLostError,
    ConfigError,
    RunInterruptedError,
    TransientError,
    UserError,
)
from flotilla.trainer.runtime.loop import Loop
from flotilla.trainer.telemetry.metrics import export_metrics
from flotilla.trainer.tracking.tracker import following_training

#: Time from SIGTERM to SIGKILL for a program, in seconds. The supervisor waits twice as long.
GRACE_SECONDS = 30.0
# Interval at which the agent checks for new files of the program, in seconds.
LOOK_SECONDS = 1.0
# Maximum time to wait until the guard exits, in seconds.
_EXIT_SECONDS = 10.0
# Maximum time to publish the last checkpoint after a stop, as a share of the grace period.
_PUBLISH_SHARE = 0.8
# Seconds without output after which an evaluator is stopped, once training has ended.
_EVALUATOR_SECONDS = 15.0
_BEGIN_AGAIN_CODE = 1
_FINAL = (USAGE, guard.NOT_EXECUTABLE, guard.NOT_FOUND)
log = logging.getLogger(__name__)


def judge_end(code: int, last: list[str], *, several: bool) -> UserError:
    """Return the error of a task whose program exited with `code`, or was killed by signal -`code`.

    `last` are the last output lines of the program. `several` means that there are several tasks.
    """
    said = f"; its last line: {last[-1]}" if last else "; it printed nothing"
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else str(-code)
        memory = " (possibly out of memory)" if -code == signal.SIGKILL else ""
        return ClusterLostError(f"the program was killed by {name}{memory}{said}")
    text = f"the program ended with exit code {code}{said}"
    if code >= RETRYABLE or (code == _BEGIN_AGAIN_CODE and several):
        return ClusterLostError(text)
    return (ConfigError if code in _FINAL else UserError)(text)


class Agent:
    """Runs one attempt of one task of a program."""

    def __init__(  # noqa: PLR0913
        self,
        job: Job,
        cluster: Cluster,
        task: Task,
        *,
        on_signal: Callable[[int], None] | None = None,
        grace: float = GRACE_SECONDS,
        is_local: bool = False,
    ) -> None:
        """Store the run and the task. `on_signal` replaces `stop` as the signal handler."""
        self._job, self._cluster, self._task = job, cluster, task
        self._program = job.config.program
        self._folders = TaskFolders(folder=job.workdir.absolute())
        self._on_signal = on_signal or (lambda _number: self.stop())
        self._grace, self._is_local = grace, is_local
        self._leads = task.role != "evaluator" and task == leader(cluster)
        self._link: Link | None = None
        self._stopping = threading.Event()
        self._reason = ""
        self._code: int | None = None
        self._refuses = self._is_ready = self._is_gone = False
        self._pid = 0
        #: The reason why the agent killed the program, and the reason why its attempt is over. Each
        #: is empty if it does not apply.
        self._why = self._lost = ""
        self._publisher: Publisher | None = None
        self._metrics: Metrics | None = None
        self._file = MetricsFile(self._folders.metrics)
        self._attempts: Attempts | None = None
        self._filled = ""
        self._over_at = 0.0
        self._output_at = self._looked_at = 0.0

    def stop(self, reason: str = "", *, code: int | None = None) -> None:
        """Stop the program within its grace period, and publish a last checkpoint.

        If `code` is given, the guard exits with it instead of the code of an interruption.
        """
        self._reason, self._code = self._reason or reason, code
        self._stopping.set()
        if self._link:
            self._link.wake()

    def begin_no_more(self) -> None:
        """Do not start the program if it is not running yet."""
        self._refuses = True
        if self._link:
            self._link.wake()

    def lose_guard(self, seconds: float) -> bool:
        """Make `run` return as if the program had been killed, unless the guard is still connected.

        Wait up to `seconds` for the guard to disconnect. Return false if the guard is still
        connected or the program was not started.
        """
        has_begun = self._pid or self._stopping.is_set()
        if not self._link or not has_begun or not self._link.wait_gone(seconds):
            return False
        self._is_gone = True
        self._link.put({"is": "ended", "code": -signal.SIGKILL, "last": []})
        return True

    def run(self) -> int:
        """Run the program with a guard in another container. Return the exit code for the guard."""
        code, message = DONE, ""
        try:
            self._link = Link(self._folders.exchange)
        except UserError as error:
            log.error("%s", error)
            return FAILED
        try:
            self._train(self._link)
        except UserError as error:
            message = str(error)
            code = TRY_AGAIN if isinstance(error, TransientError) else error.exit_code
            if isinstance(error, RunInterruptedError) and self._code is not None:
                code = self._code
        except Exception:
            log.exception("unexpected error, caused by a bug in Flotilla")
            code, message = FAILED, "the agent failed, because of a bug in Flotilla; see its log"
        if message:
            log.error("%s", message)
        self._dismiss(self._link, code, message)
        self._link.close()
        return code

    def train(self) -> None:
        """Run the program on this machine until it exits.

        Raises:
            UserError: training failed, and a retry would not help.
            RunInterruptedError: SIGINT or SIGTERM was received. Complete checkpoints are published.
            ClusterLostError: a new attempt may succeed.
        """
        guard.adopt_orphans()
        with signals.handle_interrupts(self.stop):
            self._link = Link(self._folders.exchange)
            path = os.path.dirname(sys.executable)
            child = self._link.start_guard(guard_environment(path), user_code.folder())
            try:
                self._train(self._link)
            finally:
                self._dismiss(self._link, DONE, "")
                self._link.close()
                child.wait()
                # If the guard was killed, this process has adopted the processes that it left.
                guard.kill_all(self._pid or child.pid)

    def _train(self, link: Link) -> None:
        self._folders.make()
        with ExitStack() as opened:
            held = lease.NoLease()
            if self._leads:
                opened.enter_context(following_training(self._job, leads=True))
                opened.enter_context(export_metrics(self._job, self._cluster, self._task))
                held = opened.enter_context(
                    lease.hold_lease(self._job.checkpoints, self._job.run_id)
                )
                if is_over(self._job):
                    return
                self._publisher = Publisher(self._job, self._folders, held)
            if self._program.data == "files":
                where = self._folders.dataset
                stage_dataset(self._job.config, self._cluster, self._task, self._job.dataset, where)
            end = self._begin(link)
            if not end:
                opened.callback(self._begin_asking().stop)
                end = self._follow(link)
            self._finish(end, held)

    def _begin(self, link: Link) -> Message | None:
        ready = self._await_guard(link)
        if ready.get("ended") or ready.get("running"):
            # An earlier agent of this task started this program.
            if self._publisher:
                self._publisher.resume()
                self._make_metrics(self._publisher).restore(self._folders.exchange)
            self._pid = int(ready["pid"])
            return dict(ready["ended"]) if ready.get("ended") else None
        attempt = self._prepare(link)
        if self._refuses:
            raise RunInterruptedError("interrupted before the program started")
        where = self._program.working_dir
        folder = os.path.join(user_code.folder(), where) if self._is_local else where
        self._output_at = time.monotonic()
        start = make_start(self._job, self._cluster, self._task, attempt)
        link.send(do="start", cwd=folder, **start)
        return None

    def _await_guard(self, link: Link) -> Message:
        while (message := self._wait(link, None))["is"] != "ready":
            pass
        self._is_ready = True
        return message

    def _wait(self, link: Link, seconds: float | None) -> Message:
        message = link.receive(seconds) or {"is": ""}
        if message["is"] == "signal":
            self._on_signal(int(message["number"]))
        if self._stopping.is_set() or self._refuses:
            raise RunInterruptedError(f"{self._begun_by()}interrupted before training began")
        if message["is"] == "gone" and self._is_local:
            raise ClusterLostError("the guard process exited before it started the program")
        return message

    def _prepare(self, link: Link) -> int:
        """Restore the checkpoint for this attempt, and return the number of the attempt."""
        clear(self._folders.model)
        topology = self._job.config.topology
        workers = [Task(role="worker", index=n) for n in range(self._cluster.count("worker"))]
        others = [each for each in workers if topology.leads(each) and each != workers[0]]
        together = self._task in workers and bool(others)
        wait = partial(self._wait, link)
        if self._publisher or (together and self._task in others):
            self._attempts = Attempts(self._job, self._task, others if together else [])
        if self._publisher and self._attempts:
            uri = self._publisher.begin(self._steps_of_last_attempt())
            step, steps = self._publisher.step, self._make_metrics(self._publisher).steps
            events.emit(events.AttemptBegin(global_step=step, steps=steps, resumed=step > 0))
            return self._attempts.lead(uri, wait).number
        if self._attempts:
            found = self._attempts.join(wait)
            fill(self._folders, found.checkpoint)
            return found.number
        if self._task.role != "ps":
            self._filled, _ = find_published(self._job.checkpoints)
            fill(self._folders, self._filled)
        return 1

    def _steps_of_last_attempt(self) -> Metrics:
        found = Metrics(History(self._job.checkpoints, start=0), 0, 0)
        found.restore(self._folders.exchange)
        return found

    def _make_metrics(self, publisher: Publisher) -> Metrics:
        start = publisher.step
        history = History(self._job.checkpoints, start=start, file=publisher.history)
        asked = any("{steps}" in word for word in self._program.command)
        self._metrics = Metrics(history, self._job.config.training.steps if asked else 0, start)
        self._file.skip()
        return self._metrics

    def _follow(self, link: Link) -> Message:
        is_asked = False
        while True:
            message = link.receive(LOOK_SECONDS)
            if message and (end := self._handle(message)):
                return end
            if self._stopping.is_set() and not is_asked:
                is_asked = True
                waits = self._leads or self._task.role == "evaluator"
                link.send(do="stop", grace=self._grace if waits else 0)
            if time.monotonic() - self._looked_at >= LOOK_SECONDS:
                self._looked_at = time.monotonic()
                if not self._why and not is_asked:
                    self._watch(link)
                self._look()

    def _handle(self, message: Message) -> Message | None:
        kind = message["is"]
        if kind == "started":
            self._pid = int(message["pid"])
        elif kind == "line" and self._metrics:
            self._metrics.take(str(message["text"]), float(message["time"]))
        elif kind == "signal":
            self._on_signal(int(message["number"]))
        elif kind == "gone" and self._is_local:
            raise ClusterLostError("the guard process was killed, and the program with it")
        if kind in ("line", "active"):
            self._output_at = time.monotonic()
        return self._read_end(message)

    def _read_end(self, message: Message) -> Message | None:
        if message["is"] in ("ended", "failed"):
            return message
        if message["is"] != "ready":
            return None
        self._is_ready = True
        if message.get("ended"):
            return dict(message["ended"])
        # No program runs: the container was restarted, for example because it ran out of memory.
        lost = {"is": "ended", "code": -signal.SIGKILL, "last": []}
        return None if message.get("running") else lost

    def _watch(self, link: Link) -> None:
        if self._task.role == "evaluator":
            self._end_evaluator()
            return
        timeout = self._program.stall_timeout
        counts = self._metrics is not None and self._metrics.said_steps
        moved = self._metrics.stepped_at if self._metrics and counts else self._output_at
        if self._leads and timeout and time.monotonic() - moved > timeout:
            what = "step" if counts else "output"
            self._why = (
                f"the program wrote no {what} for {timeout:g} s; raise program.stall_timeout if it "
                "takes longer"
            )
            events.emit(events.Stalled(tasks=(str(self._task),), seconds=timeout))
        else:
            self._why = self._lost
        if self._why:
            link.send(do="kill")

    def _end_evaluator(self) -> None:
        if (self._job.workdir / OVER).exists():
            self._over_at = self._over_at or time.monotonic()
            if time.monotonic() - max(self._over_at, self._output_at) > _EVALUATOR_SECONDS:
                self.stop()

    def _begin_asking(self) -> Loop:
        return Loop(
            self._ask_store,
            self._attempts.seconds if self._attempts else LOOK_SECONDS,
            name="store",
            failing="cannot read from the store whether there is a new attempt or checkpoint",
        ).start()

    def _ask_store(self) -> bool:
        if self._task.role == "evaluator":
            uri, _ = find_published(self._job.checkpoints)
            if uri and uri != self._filled:
                fill(self._folders, uri, keeps=True)
                self._filled = uri
        elif self._attempts:
            try:
                self._attempts.check()
            except ClusterLostError as error:
                self._lost = str(error)
        return not self._lost and self._task.role != "ps"

    def _look(self) -> None:
        if self._metrics and self._publisher:
            self._read_lines(self._metrics)
            self._metrics.flush()
            self._metrics.save(self._folders.exchange)
            self._publisher.look(self._step_at, self._metrics.newest)

    def _read_lines(self, metrics: Metrics) -> None:
        for line, when in self._file.read():
            metrics.take(line, when)

    def _step_at(self, when: float, number: int) -> int:
        assert self._metrics
        # Read new lines first, because the program may just have reported the saved step.
        self._read_lines(self._metrics)
        return self._metrics.step_at(when, number)

    def _finish(self, end: Message, held: lease.NoLease) -> None:
        """Publish the last checkpoint. If training is incomplete, raise one of `train`'s errors."""
        if self._metrics:
            self._read_lines(self._metrics)
            self._metrics.flush()
        if end["is"] == "failed":
            raise ConfigError(str(end["message"]))
        code = int(end["code"])
        if self._over_at:
            return
        if self._stopping.is_set():
            raise RunInterruptedError(self._describe_stop())
        if code == DONE and not self._why:
            self._complete(held)
            return
        if self._publisher:
            # If publishing fails too, only log that error, and raise the error of the program.
            try:
                self._publish(with_model=False)
            except UserError as error:
                log.warning("%s", error)
        if self._why:
            raise ClusterLostError(self._why)
        several = sum(map(len, self._cluster.addresses.values())) > 1
        raise judge_end(code, list(end.get("last", ())), several=several)

    def _describe_stop(self) -> str:
        begun = self._begun_by()
        if not self._publisher or not self._metrics:
            return f"{begun}interrupted"
        published: queue.SimpleQueue[str | UserError] = queue.SimpleQueue()
        threading.Thread(target=self._put_published, args=(published,), daemon=True).start()
        try:
            uri = published.get(timeout=_PUBLISH_SHARE * self._grace)
        except queue.Empty:
            uri = storage.Unavailable("the object store does not respond")
        if isinstance(uri, UserError):
            where = self._folders.checkpoints
            return (
                f"{begun}interrupted; the last checkpoint was not published and exists only in "
                f"{where}: {uri}"
            )
        if not uri:
            return f"{begun}interrupted before the program completed a checkpoint"
        return f"{begun}interrupted at global step {self._publisher.step}; checkpoint {uri}"

    def _put_published(self, published: queue.SimpleQueue[str | UserError]) -> None:
        try:
            published.put(self._publish(with_model=False))
        except UserError as error:
            published.put(error)

    def _begun_by(self) -> str:
        return f"{self._reason}; " if self._reason else ""

    def _publish(self, *, with_model: bool) -> str:
        assert self._publisher
        assert self._metrics
        metrics = self._metrics
        return self._publisher.finish(metrics.step_at, metrics.newest, with_model=with_model)

    def _complete(self, held: lease.NoLease) -> None:
        if not self._publisher:
            return
        model = self._folders.model
        layouts.require_readable(model)
        if self._program.after_training == EVALUATE and not layouts.find_model(model):
            there = "is empty" if layouts.is_empty(model) else "contains no complete model"
            raise UserError(
                f"the program ended with exit code 0 but saved no model: FLOTILLA_MODEL ({model}) "
                f"{there}; save a .keras file or a SavedModel there, or set "
                "program.after_training: stop"
            )
        uri = self._publish(with_model=True)
        held.check()
        record_end(self._job, uri)

    def _dismiss(self, link: Link, code: int, message: str) -> None:
        if self._is_gone:
            return
        while not self._is_ready:
            found = link.receive(None if not self._is_local else _EXIT_SECONDS)
            if not found or found["is"] in ("gone", "ended"):
                return
            self._is_ready = found["is"] == "ready"
        link.send(do="exit", code=code, message=message)
        end = time.monotonic() + _EXIT_SECONDS
        while link.is_connected and (left := end - time.monotonic()) > 0:
            found = link.receive(left)
            if found and found["is"] == "gone":
                return

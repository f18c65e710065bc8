"""Runs a step and its stages: events, records, retries and exit codes.

On a KFP instance, a stage with a transient failure is retried in its pod, because KFP restarts only
lost pods. In a local run, a stage is not retried, because the user can resume the run.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any, NoReturn, TypeVar

import tenacity

from flotilla.components.records import run_store, step_record
from flotilla.components.records.step_record import PublishedRecord
from flotilla.components.table import (
    EXIT_STEP,
    ends_run,
    find_step_of_stage,
    list_stages_after,
    output_kind,
)
from flotilla.trainer import events
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.events import StepBegin, StepEnd
from flotilla.trainer.events.run_state import RunState
from flotilla.trainer.runtime import signals, streams, tensorflow_import, threads
from flotilla.trainer.runtime.environment import check_variables
from flotilla.trainer.runtime.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    RunInterruptedError,
    TransientError,
    UserError,
)
from flotilla.trainer.runtime.loop import Loop
from flotilla.trainer.runtime.masking import mask, one_line
from flotilla.trainer.runtime.user_code import find_traceback, format_error
from flotilla.trainer.tracking.tracker import following_step

# A runner that is asked to stop sets this variable for its steps. Then only the exit step runs.
STOPPING = "FLOTILLA_STOPPING"
_ASKED = "interrupted before the step was finished"
# Shortest and longest pause before a stage is retried. The pauses are long because the failed
# operation was already retried until its own deadline, which is several minutes for a store.
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 30.0, 300.0
# Seconds between two updates of a running stage's record.
PROGRESS_SECONDS = 30.0
# Error numbers of a full disk, an exceeded quota and an exceeded file size limit.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# File of a pod's termination message, and its size limit in bytes. KFP gets the message.
TERMINATION_LOG, TERMINATION_BYTES = Path("/dev/termination-log"), 2048
# Maximum number of incidents in a record; the newest are kept.
_MOST_INCIDENTS = 200
log = logging.getLogger(__name__)
_Result = TypeVar("_Result")


@dataclass(kw_only=True)
class StepOutput:
    """The results of a stage for the summary table and the report; see `StepRecord`."""

    uri: str = ""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    main: MainMetric | None = None
    held: Mapping[str, Any] = field(default_factory=dict)
    displays: Mapping[str, str] = field(default_factory=dict)

    def done(self, uri: str, metrics: Mapping[str, Any], main: MainMetric | None = None) -> None:
        """Record the URI of the result, its key metrics, and the main metric of a model."""
        self.uri, self.metrics, self.main = uri, metrics, main


class Step(SimpleNamespace):
    """The arguments of a step's body, by name, and `at`, the URI of its run.

    A stage also receives `output`, a `StepOutput`.
    """

    #: Name of the stage that started last; empty before the first one.
    last = ""

    def stage(self, name: str, work: Callable[[Step], _Result], **more: Any) -> _Result:
        """Run a stage with the arguments of the step and `more`; see `run_stage`."""
        given = {**vars(self), **more}
        self.last = name
        return run_stage(name, self.at, lambda output: work(Step(**given, output=output)))


def run(work: Callable[[Step], _Result], call: Mapping[str, Any], name: str = "") -> _Result:
    """Run the body of the step `name`, or of the module of `work`, with its component's `locals()`.

    Raises:
        SystemExit: a stage failed, or the step was asked to stop; the error was already reported.
    """
    given = {name: value for name, value in call.items() if not callable(value)}
    name = name or work.__module__.rpartition(".")[2]
    at = _find_run(given)
    step = Step(**given, at=at)
    signals.end_with_parent()
    threads.limit_threads()
    tensorflow_import.prepare()
    streams.log_to_stderr()
    try:
        with streams.stamp_output(), following_step(), _interruptible(lambda: None):
            _note_call(name, given, at)
            return work(step)
    except RunInterruptedError as error:
        # The stop request arrived between two stages, so report it as the end of the next stage.
        for stage in list_stages_after(step.last, name)[:1]:
            with record_stage(stage, at):
                raise
        raise SystemExit(error.exit_code) from None


def _note_call(name: str, given: Mapping[str, Any], at: str) -> None:
    # Log nothing here, because the step itself reports an unavailable store.
    with step_record.harmless(""):
        run_store.write_given(run_store.record_call(name, given), at)


def _find_run(given: Mapping[str, Any]) -> str:
    artifact = next((each.uri for each in given.values() if hasattr(each, "uri")), "")
    if "kfp_run_id" in given:
        root = given.get("root", given.get("storage_root", ""))
        return run_store.run_at_first(root, artifact, given["kfp_run_id"])
    return run_store.find_run(given.get("root", ""), given.get("run_id", ""))


def run_stage(name: str, at: str, work: Callable[[StepOutput], _Result]) -> _Result:
    """Run `work` as a stage, record its progress, and return its result.

    On a KFP instance, the stage is retried after a `TransientError`, up to the limit of its step.
    Its record lists all attempts. A stage that was asked to stop is not retried.

    Args:
        name: name of the stage.
        at: URI of the run, below which the record is published; empty to publish no record.
        work: called with the `StepOutput` of each attempt.

    Raises:
        SystemExit: `work` raised a `UserError`, the user's code failed, or the disk is full; the
            error line was written to standard error.
    """
    with record_stage(name, at) as course:
        return _retrying(course, find_step_of_stage(name).retries)(lambda: work(course.output))


def _retrying(course: _Course, retries: int) -> tenacity.Retrying:
    tries = 1 if run_store.is_local_run() else 1 + retries

    def again(state: tenacity.RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        pause = state.next_action.sleep if state.next_action else 0.0
        number = state.attempt_number + 1
        log.warning("%s; retrying in %.0f s (attempt %d of %d)", error, pause, number, tries)
        course.again(str(error))

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(
            lambda error: isinstance(error, TransientError) and not course.is_asked_to_end
        ),
        stop=tenacity.stop_after_attempt(tries),
        wait=tenacity.wait_exponential(multiplier=FIRST_PAUSE_SECONDS, max=MOST_PAUSE_SECONDS),
        before_sleep=again,
        reraise=True,
    )


@contextmanager
def record_stage(name: str, at: str = "") -> Iterator[_Course]:
    """Run the block as a stage and record its progress; see `run_stage` for the arguments."""
    course = _Course(name, at)
    course.begin()
    try:
        check_variables()
        with _interruptible(course.note_request):
            # The exit step runs even if the run was asked to stop.
            if os.environ.get(STOPPING) and course.name != EXIT_STEP.name:
                raise RunInterruptedError(_ASKED)
            course.published.begin()
            course.report()
            with events.listen(course.state.take), course.publishing_progress():
                yield course
    except UserError as error:
        course.fail(str(error), error.exit_code, find_traceback(error))
        raise SystemExit(error.exit_code) from None
    # Catch `SystemExit`, because the user's code may call `sys.exit`. Flotilla's code does not.
    except (Exception, SystemExit) as error:
        trace = find_traceback(error)
        if full := _full_disk(error):
            course.fail(full, FAILED, trace)
            raise SystemExit(FAILED) from None
        if trace:
            course.fail(f"your code raised {format_error(error)}", FAILED, trace)
            raise SystemExit(FAILED) from None
        words = " ".join(f"{type(error).__name__}: {error}".split())
        course.end("failed", FAILED, f"bug in {course.name}: {words}")
        if isinstance(error, SystemExit):
            # Replace the exit code. The user's code may have exited with 0, which means success.
            raise SystemExit(FAILED) from error
        raise
    course.end("done", DONE)


def _full_disk(error: BaseException) -> str:
    if not isinstance(error, OSError) or error.errno not in _FULL:
        return ""
    where = error.filename or f"below {tempfile.gettempdir()}"
    # TMPDIR has no effect in a local run, which has its temporary folder in the workdir.
    more = "choose another --workdir" if run_store.is_local_run() else "set TMPDIR"
    return f"cannot write {where}: {error.strerror}; free some space, or {more}"


def _leave_message(message: str) -> None:
    """Write the pod's termination message, in case the record cannot be published.

    The file exists only in a container.
    """
    with suppress(OSError), TERMINATION_LOG.open("r+b") as file:
        file.write(mask(one_line(message)).encode()[:TERMINATION_BYTES])


class _Course:
    """The state of a running stage. It also reports how the stage ends."""

    def __init__(self, name: str, at: str) -> None:
        self.name, self.at, self._began = name, at, time.monotonic()
        self.output, self.published = StepOutput(), PublishedRecord(name, at)
        self.is_asked_to_end = False
        self.state = RunState()

    def note_request(self) -> None:
        self.is_asked_to_end = True

    def begin(self) -> None:
        self._began = time.monotonic()
        events.emit(StepBegin(step=self.name))

    def again(self, error: str) -> None:
        failed = self._make_end("failed", FAILED, error)
        events.emit(failed)
        self.begin()
        self.output = StepOutput()
        self.published.again(failed)

    @contextmanager
    def publishing_progress(self) -> Iterator[None]:
        """Publish the stage's progress in its record at intervals. Do nothing without a URI."""
        if not self.at:
            yield
            return
        began, last = events.now(), dict[str, Any]()

        def publish() -> None:
            nonlocal last
            found = self.state.progress_since(began)
            if found and found != last:
                last = found
                self.published.progress(found)

        loop = Loop(publish, PROGRESS_SECONDS, name="record", failing="cannot publish progress")
        loop.start()
        try:
            yield
        finally:
            loop.stop()
            # Wait, so that the final record is written after the last progress.
            loop.join()

    def fail(self, error: str, code: int, trace: str) -> None:
        if trace:
            log.error("%s", trace)
        status = "interrupted" if code == INTERRUPTED else "failed"
        self.end(status, code, error, trace, f"flotilla: {self.name}: {error}")

    def end(self, status: str, code: int, error: str = "", trace: str = "", line: str = "") -> None:
        """Emit and publish the end of the stage. Write `line` to standard error."""
        ended = self._make_end(status, code, error, trace)
        events.emit(ended)
        # Emit the event first, because the store may not respond within the grace period.
        if line:
            streams.say(line)
        if error:
            _leave_message(f"{self.name}: {error}")
        self.published.end(
            ended,
            held=dict(self.output.held),
            displays=dict(self.output.displays),
            incidents=tuple(map(events.to_tree, self.state.incidents))[-_MOST_INCIDENTS:],
        )
        self.report(ended)

    def report(self, ended: StepEnd | None = None) -> None:
        """Rewrite the report if the exit step, which runs only once, has already written it."""
        if not self.published.reported:
            return
        # Import the report only here, because the import takes 0.1 s and is rarely needed.
        from flotilla.components.records.gather_report import AGAIN, write_again

        state = AGAIN
        if ended and ended.status != "done":
            state = "FAILED"
        elif ended and ends_run(self.name, ended.metrics.get("decision")):
            state = "SUCCEEDED"
        write_again(self.published.at, state, self.published.reported.displays)

    def _make_end(self, status: str, code: int, error: str = "", trace: str = "") -> StepEnd:
        return StepEnd(
            step=self.name,
            status=status,
            exit_code=code,
            error=error,
            traceback=trace,
            seconds=round(time.monotonic() - self._began, 2),
            metrics=dict(self.output.metrics),
            main_metric=self.output.main.name if self.output.main else "",
            better=self.output.main.better if self.output.main else "",
            uri=self.output.uri,
            output=output_kind(self.name) or "",
        )


@contextmanager
def _interruptible(note: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        note()
        # Raise `KeyboardInterrupt`, because libraries catch every `Exception` and may continue.
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise RunInterruptedError(_ASKED) from None
    finally:
        signal.signal(signal.SIGTERM, before)

"""Writes the events of a run to MLflow in a background thread.

Errors never end a run. While MLflow is unavailable, a limited number of values is kept. At its end,
the run waits up to `CLOSE_SECONDS` until these are written. MLflow's own asynchronous queue is not
used, because it drops values while the server is unavailable and keeps the process from exiting.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flotilla.trainer import events, storage
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import AttemptBegin, Event, Progress, Restart, StepEnd, Validation
from flotilla.trainer.events.run_state import RunState
from flotilla.trainer.features.names import curve_name
from flotilla.trainer.runtime.errors import ClusterLostError, RunInterruptedError
from flotilla.trainer.runtime.json_records import is_number, read_record
from flotilla.trainer.runtime.masking import mask
from flotilla.trainer.tracking import addresses
from flotilla.trainer.tracking.mlflow_run import (
    REQUEST_SECONDS,
    MlflowRun,
    Pending,
    Point,
    RunName,
    list_parameters,
)

# Maximum time that the end of a run waits for the tracker, in seconds.
CLOSE_SECONDS = 3.0 * REQUEST_SECONDS
FIRST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 2.0, 60.0
MISSING = (
    "MLFLOW_TRACKING_URI is set, but nothing is tracked, because MLflow is not installed; run "
    "pip install 'kfp-flotilla[mlflow]'"
)
# Maximum number of points of a training curve, equal to the maximum rows of a history.
MOST_POINTS = 2000
_LONGEST_TAG = 4000
_TEST = "evaluation"
_TRACKED = (AttemptBegin, Progress, Validation, Restart, StepEnd)
#: The file that marks a local run or sweep whose data in MLflow may be incomplete.
UNSENT = "mlflow.json"
# Maximum number of later commands that try to send the missing data of a run.
MOST_SENDINGS = 5
# MLflow's run statuses. Any other outcome, such as a refused model, is `FINISHED`.
_STATUS = {"failed": "FAILED", "interrupted": "KILLED"}
log = logging.getLogger(__name__)


class Reader:
    """Converts the events of a run to points and tags."""

    def __init__(self) -> None:
        """Start without events."""
        self._state = RunState()
        # The global step of the newest training point.
        self._last = 0

    def read(self, event: Event) -> Pending:
        """Return the points and tags of an event."""
        pending = Pending()
        self._state.take(event)
        if isinstance(event, AttemptBegin):
            # Send the points of repeated steps again. The tracker ignores duplicates.
            self._last = min(self._last, event.global_step)
            pending.tags["flotilla.attempt_from"] = str(event.global_step)
        elif isinstance(event, Progress):
            self._add_progress(event, pending)
        elif isinstance(event, Validation):
            _add(pending, "validation_", event.metrics, event.global_step, event.time)
        elif isinstance(event, Restart):
            pending.tags["flotilla.restarts"] = str(self._state.counts[Restart])
        elif isinstance(event, StepEnd):
            self._add_step(event, pending)
        return pending

    def _add_progress(self, event: Progress, pending: Pending) -> None:
        is_due = (event.global_step - self._last) * MOST_POINTS >= event.steps
        if not is_due and event.global_step < event.steps:
            return
        self._last = event.global_step
        # Leave out values of 0, which mean that a user's program did not report the value.
        known = ("loss", "learning_rate", "steps_per_second")
        values = {name: getattr(event, name) for name in known if getattr(event, name)}
        values |= event.metrics
        _add(pending, "", values, event.global_step, event.time)

    def _add_step(self, event: StepEnd, pending: Pending) -> None:
        metrics = event.metrics
        if event.output == _TEST:
            _add(pending, "test_", metrics, self._state.handed_on_step, event.time)
        tags = {"uri": event.uri, "decision": metrics.get("decision")}
        if tags["decision"]:
            tags["reasons"] = "; ".join(map(str, metrics.get("reasons", ())))
        pending.tags |= {
            f"flotilla.{event.step}.{name}": _tag(str(text)) for name, text in tags.items() if text
        }
        if event.uri and event.status == "done":
            if event.output == "dataset":
                pending.datasets.append(event.uri)
            elif event.output == "validation":
                pending.files["data_page.html"] = storage.join(event.uri, "page.html")
            elif event.output == "report":
                pending.files["report.html"] = event.uri
        if event.main_metric:
            pending.tags["flotilla.main_metric"] = event.main_metric
        if event.error:
            pending.tags["flotilla.error"] = _tag(f"{event.step}: {event.error}")


def _add(pending: Pending, prefix: str, values: Mapping[str, Any], step: int, time: float) -> None:
    """Add a point to each curve. The curves of training have no prefix."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _add(pending, f"{prefix}{name}/", value, step, time)
        elif is_number(value):
            repeats = not prefix.startswith(("validation_", "test_"))
            point = Point(
                curve_name(f"{prefix}{name}"), float(value), step, int(time * 1000), repeats
            )
            pending.points.append(point)


def describe_end(status: str, message: str = "", verdict: str = "", ended: float = 0) -> Pending:
    """Return data that describes the end of a run. `status` is one of MLflow's statuses."""
    tags = {"flotilla.verdict": verdict, "flotilla.message": _tag(message)}
    tags = {key: value for key, value in tags.items() if value}
    return Pending(tags=tags, status=status, ended=int(1000 * ended))


def mlflow_status(error: BaseException | None) -> str:
    """Return MLflow's status for the result of training."""
    if error is None:
        return "FINISHED"
    return "KILLED" if isinstance(error, RunInterruptedError | KeyboardInterrupt) else "FAILED"


def _tag(text: str) -> str:
    return mask(text)[:_LONGEST_TAG]


class Tracker:
    """Writes the events that it receives, in a thread that starts with the first value."""

    def __init__(self, target: MlflowRun, *, first_pause: float = FIRST_PAUSE_SECONDS) -> None:
        """Set the pause after the first failure, in seconds.

        The pause doubles after each further failure.
        """
        self._target = target
        self._reader = Reader()
        self._pending = Pending()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._first_pause = first_pause
        self._is_closing = self._is_over = self._is_warned = False

    def hear(self, event: Event) -> None:
        """Add an event, without waiting for MLflow. Errors are only logged."""
        try:
            with self._changed:
                self.note(self._reader.read(event))
        except Exception as error:
            self._warn(error)

    def close(self, end: Pending | None = None, seconds: float | None = None) -> bool:
        """Write `end` and the pending values within `seconds`. Return whether all were written."""
        seconds = CLOSE_SECONDS if seconds is None else seconds
        with self._changed:
            self._is_closing = True
            self.note(end or Pending())
            self._changed.notify_all()
            thread = self._thread
        if thread is None:
            return True
        thread.join(seconds)
        with self._changed:
            is_done = not thread.is_alive() and not self._pending
            self._is_over = True
        if not is_done:
            self._warn(TimeoutError(f"no response within {seconds:g} s"))
        return is_done

    def note(self, more: Pending) -> None:
        """Add pending values, without waiting for MLflow."""
        with self._changed:
            if not more or self._is_over:
                return
            self._pending = more.merge(self._pending)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="tracker", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def _work(self) -> None:
        pause = self._first_pause
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closing)
                if not self._pending or self._is_over:
                    return
                batch, self._pending = self._pending, Pending()
                is_last = self._is_closing
            try:
                self._target.write(batch)
                pause = self._first_pause
            except Exception as error:
                if not self._again(batch, error, pause, is_last=is_last):
                    return
                pause = min(2 * pause, MOST_PAUSE_SECONDS)

    def _again(self, batch: Pending, error: Exception, pause: float, *, is_last: bool) -> bool:
        """Put unwritten values back, and wait. Return whether to try again."""
        self._warn(error)
        with self._changed:
            self._pending = self._pending.merge(batch)
            self._is_over = self._is_over or isinstance(error, ImportError)
            if self._is_over or is_last:
                return False
            self._changed.wait_for(lambda: self._is_closing, pause)
        return True

    def _warn(self, error: Exception) -> None:
        if self._is_warned:
            return
        self._is_warned = True
        if isinstance(error, ImportError):
            log.warning("%s", MISSING)
            return
        words = " ".join(mask(f"{type(error).__name__}: {error}").split())[:160]
        log.warning(
            "cannot send the data of this run to MLflow at %s (%s); the run continues, and "
            "Flotilla sends the missing data later",
            self._target.url,
            words,
        )


@dataclass(frozen=True, kw_only=True)
class Unsent:
    """The content of the file `UNSENT`.

    Attributes:
        tracker: a digest of the tracker's address.
        experiment: the name of the experiment.
        parent: the id of the sweep that a trial belongs to, or empty.
        place: the location of the run in MLflow.
        sendings: number of later commands that tried to send the missing data.
    """

    tracker: str
    experiment: str
    parent: str = ""
    place: addresses.Place = field(default_factory=addresses.Place)
    sendings: int = 0

    @classmethod
    def read(cls, folder: Path) -> Unsent | None:
        """Read the file, or return None if it is missing, invalid or for another tracker."""
        with suppress(OSError, ValueError):
            found = read_record(cls, (folder / UNSENT).read_bytes())
            if found and found.tracker == _digest_tracker():
                return found
        return None

    def write(self, folder: Path) -> None:
        """Write the file, so that a later command can send the rest if this process is killed."""
        with suppress(OSError):
            (folder / UNSENT).write_text(json.dumps(asdict(self)), encoding="utf-8")


def _digest_tracker() -> str:
    # Store only a digest, because the address may contain a password.
    return hashlib.sha256(os.environ.get(addresses.URI, "").encode()).hexdigest()[:16]


class LocalRun:
    """A run or a sweep on this machine, whose events go to the caller and to MLflow.

    Its folder has the file `UNSENT` until MLflow has all of its data.
    """

    def __init__(
        self,
        config: Config | None,
        run_id: str,
        history: Path,
        on_event: Callable[[Event], None] | None = None,
        *,
        parent: str = "",
    ) -> None:
        """Send the earlier events in `history`, because MLflow may lack some of them.

        Args:
            config: sets the parameters and the experiment, or None to send only missing data.
            run_id: the id of the run or sweep.
            history: the event file, in the folder of the run.
            on_event: called with each event.
            parent: the id of the sweep that a trial belongs to, or empty.
        """
        self._on_event = on_event
        self._tracker: Tracker | None = None
        self._folder = history.parent
        if not addresses.is_tracked():
            return
        experiment = config.name if config else ""
        left = Unsent.read(self._folder) or Unsent(
            tracker=_digest_tracker(), experiment=experiment, parent=parent
        )
        left.write(self._folder)
        past = [each for each in events.read(history, every=_TRACKED) if isinstance(each, _TRACKED)]
        name = RunName(
            run_id=run_id,
            experiment=left.experiment,
            parameters=list_parameters(config) if config else {},
            parent=left.parent,
            began=int(1000 * past[0].time) if past else 0,
            place=left.place,
            ends=True,
        )
        self._tracker = Tracker(MlflowRun(name))
        for event in past:
            self._tracker.hear(event)

    def hear(self, event: Event) -> None:
        """Pass an event to the caller and to MLflow."""
        if self._tracker:
            self._tracker.hear(event)
        if self._on_event:
            self._on_event(event)

    def tag(self, **tags: object) -> None:
        """Set tags of the run."""
        if self._tracker:
            self._tracker.note(
                Pending(tags={f"flotilla.{k}": _tag(str(v)) for k, v in tags.items()})
            )

    def end(self, status: str, message: str, *, word: str = "", ended: float = 0) -> bool:
        """Write the final status within `CLOSE_SECONDS`. Return whether everything was written.

        `word` is MLflow's status. If it is empty, the status is derived from `status`.
        """
        if not self._tracker:
            return True
        word = word or _STATUS.get(status, "FINISHED")
        if is_done := self._tracker.close(describe_end(word, message, status, ended)):
            with suppress(OSError):
                (self._folder / UNSENT).unlink()
        return is_done


@contextmanager
def following_training(job: Job, *, leads: bool) -> Iterator[None]:
    """Track the events of training in this process, unless a CLI process does."""
    if not addresses.writes_itself():
        yield
        return
    ends = leads and not addresses.is_given_run()
    parameters = list_parameters(job.config)
    name = RunName(run_id=job.run_id, experiment=job.config.name, parameters=parameters, ends=ends)
    with _following(name):
        yield


@contextmanager
def following_step() -> Iterator[None]:
    """Track the events of a step on a KFP instance, in the MLflow run that KFP created for it."""
    if not (addresses.writes_itself() and addresses.is_given_run()):
        yield
        return
    with _following(RunName(parameters={})):
        yield


@contextmanager
def _following(name: RunName) -> Iterator[None]:
    tracker, failure = Tracker(MlflowRun(name)), None
    try:
        with events.listen(tracker.hear):
            yield
    except BaseException as error:
        failure = error
        raise
    finally:
        goes_on = isinstance(failure, ClusterLostError) or not name.ends
        tracker.close(None if goes_on else describe_end(mlflow_status(failure)))

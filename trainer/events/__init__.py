"""The events of a run. Each event is one line of JSON, and each kind of event is a class.

Every process of a run appends to the file named by `FLOTILLA_EVENTS`. Without this variable, the
line is written to the log. A line is `{"event": NAME, "time": Unix time, ...fields}`, and NAME is
the name of the class in snake case: `StepBegin` is `step_begin`.

To limit the size of the file, progress is appended only until the file has `PROGRESS_BYTES`. After
that, only the newest progress of each kind is kept, in a separate file that is replaced each time
(`newest_progress`).

Readers get validated instances. They skip damaged or incomplete lines and unknown events, and
ignore unknown fields, so that they can read the events of newer versions.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, dataclass_transform

from flotilla.trainer.runtime.json_records import parse_mapping, parse_record, tree_of
from flotilla.trainer.runtime.masking import mask

VARIABLE = "FLOTILLA_EVENTS"
#: The environment variable with the name of the job that a task belongs to.
JOB = "FLOTILLA_JOB"
MARK = '{"event": '
# The file size up to which progress is appended. At one line per second, that takes most of an
# hour.
PROGRESS_BYTES = 1 << 20
# Maximum size of a line in bytes. Readers split a longer line into pieces, which are invalid.
_LONGEST = 1 << 20
_NAME = MARK.encode() + b'"'
log = logging.getLogger(__name__)
_listeners: list[Callable[[Event], None]] = []


def now() -> float:
    """Return the Unix time, rounded to milliseconds."""
    return round(time.time(), 3)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class _Frozen:
    """A base class that makes each subclass a frozen dataclass with keyword arguments."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Event(_Frozen):
    """The base class of all events. Comparison ignores the time."""

    time: float = field(default_factory=now, compare=False)


class RunBegin(Event):
    """A local run was started or resumed. `number` counts the starts from 1."""

    run_id: str
    number: int


class RunEnd(Event):
    """The pipeline of a local run has ended."""


class Interrupted(Event):
    """A local run was asked to stop. It starts no further steps except the exit step."""


class StepBegin(Event):
    """A stage of a pipeline step has started."""

    step: str


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The result of a stage of a pipeline step.

    Attributes:
        status: `done`, `failed` or `interrupted`.
        error: the error in one line, or empty.
        traceback: traceback of an error in the user's code, or empty.
        seconds: duration of this attempt.
        metrics: metrics for the closing table.
        main_metric: the metric by which models with this name are compared, or empty.
        better: whether a `higher` or a `lower` value of that metric is better, or empty.
        uri, output: URI and kind of the published result, or empty.
    """

    step: str
    status: str
    exit_code: int = 0
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    main_metric: str = ""
    better: str = ""
    uri: str = ""
    output: str = ""


class StepEnd(Event, StepResult):
    """A stage of a pipeline step has ended."""


class AttemptBegin(Event):
    """The chief starts to train at `global_step`. A `resumed` run has trained before."""

    global_step: int
    steps: int
    resumed: bool
    epochs: float = 0.0  # Number of epochs in `steps`; 0 if unknown.
    checkpoint: int = -1  # Global step of the newest checkpoint if it is lower; else -1.


class Progress(Event):
    """An interval of training steps is done.

    Attributes:
        global_step: the global step that training has reached.
        steps: the global step at which training ends.
        loss: mean loss over the interval.
        steps_per_second: mean speed over the interval.
        seconds: training time so far, over all attempts.
        epoch: passes over the training examples so far, or 0 if unknown.
        epochs: passes over the training examples at the end, or 0 if unknown.
        metrics: further metrics of the strategy.
    """

    global_step: int
    steps: int
    loss: float
    steps_per_second: float
    seconds_left: float
    seconds: float = 0.0
    learning_rate: float = 0.0
    epoch: float = 0.0
    epochs: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)


class WorkProgress(Event):
    """The progress of a long piece of work other than training.

    Attributes:
        what: a description, such as `reading the files`.
        unit: unit of `done` and `total`, such as `rows` or `bytes`, or empty if nothing is counted.
        total: the total count, or 0 if unknown.
        share: the completed share, from 0 to 1, or -1 if unknown.
        rate: recent number of units per second.
        seconds: time since the work started.
        seconds_left: remaining time, or -1 if unknown.
        detail: the current activity, or what the work waits for.
        is_over: whether the work has ended.
    """

    what: str
    unit: str = ""
    done: int = 0
    total: int = 0
    share: float = -1.0
    rate: float = 0.0
    seconds: float = 0.0
    seconds_left: float = -1.0
    detail: str = ""
    is_over: bool = False


class Saved(Event):
    """A checkpoint was saved but may not be published yet. Training waited for `seconds`."""

    uri: str
    global_step: int
    seconds: float


class CheckpointPublished(Event):
    """A checkpoint was published."""

    uri: str
    global_step: int


class CheckpointPassedOver(Event):
    """A checkpoint is unreadable, so an older one is used."""

    uri: str
    reason: str


class UploadFailed(Event):
    """A background upload to the checkpoint folder failed."""

    reason: str


class Restart(Event):
    """A training task that ended with `code` is restarted. `restarts` counts failures so far."""

    task: str
    cause: str
    restarts: int
    code: int = 0  # For a pod killed by a signal, 128 plus the signal's number.


class ServersLost(Event):
    """Parameter servers were lost, so some variables go back to an earlier global step.

    Attributes:
        recovery: `partial` if only the lost variables go back, or `full` if all variables do.
        global_step: the last global step that the chief knew.
        back_to: global step of the restored values, or -1 if unknown.
        reason: why the recovery is full, or empty.
    """

    servers: tuple[str, ...]
    recovery: str
    global_step: int
    back_to: int
    reason: str = ""


class Suspension(Event):
    """The job waits for capacity. With `is_over`, the wait is over and its tasks start."""

    is_over: bool
    was_running: bool


class TaskFailed(Event):
    """A training task failed permanently."""

    task: str
    cause: str
    log: str = ""
    last_lines: tuple[str, ...] = ()


class Stalled(Event):
    """Training made no progress for `seconds`, and these tasks did not respond."""

    tasks: tuple[str, ...]
    seconds: float


class EvaluatorLeft(Event):
    """Training continues without its evaluator."""

    reason: str


class Validation(Event):
    """The model was validated. An evaluator sets `created`, the time of the checkpoint."""

    global_step: int
    metrics: Mapping[str, Any]
    created: str = ""


class OpenPorts(Event):
    """The ports of a local cluster can be reached from other machines."""

    warning: str


class MetricsUnserved(Event):
    """The metrics of the run cannot be served. Training continues without them."""

    reason: str


class LauncherUnwatched(Event):
    """The job continues if its launcher dies, because the leading task cannot watch it."""

    reason: str


class LeaseTakenOver(Event):
    """The lease of a checkpoint folder was taken over from a dead holder."""

    uri: str
    holder: str
    reason: str


class LeaseAwaited(Event):
    """The holder of a lease may be dead, so this process waits for the lease."""

    uri: str
    holder: str
    until: str


class NewestVersion(Event):
    """The newest version of the dataset, which is used because the configuration names none."""

    dataset: str
    version: str


class DataNote(Event):
    """A one-line remark about the data, from data preparation or data validation.

    Attributes:
        text: the remark, which names the column or the file, and the key to set.
        is_warning: whether a rule of the data gate emitted it as a warning.
    """

    text: str
    is_warning: bool = False


class WarmStart(Event):
    """Training starts with existing weights."""

    uri: str
    taken: int = 0  # Number of the model's variables that got values.
    left: Mapping[str, int] = field(default_factory=dict)  # Skipped variables, counted by reason.
    what: str = ""  # A line for the log, which names some of the skipped variables.


class HandedOn(Event):
    """Training is over, and this checkpoint is selected. `trained` is the last global step."""

    uri: str
    global_step: int
    trained: int
    why: str


class FromScratch(Event):
    """There is no champion yet from which training could start."""

    reason: str


class TableEmpty(Event):
    """Training ended, but a dynamic table has no rows: all ids use the row of unknown ids."""

    table: str
    why: str


class UserCodeFailed(Event):
    """The user's code raised an error in a training task."""

    error: str
    traceback: str


_PROGRESS = (Progress, WorkProgress)


def emit(event: Event, *, in_log: str | None = None) -> None:
    """Append one event to the file of the run, in one `write`, or write it to the log.

    If `in_log` is given, it replaces the line in the log. If it is empty, nothing is logged. In the
    log, an event names its job, because the user's code may print a similar line.
    """
    for listener in _listeners:
        listener(event)
    path = os.environ.get(VARIABLE)
    job = {} if path else {"job": os.environ.get(JOB, "")}
    line = _line(event, job).decode().rstrip() if in_log is None or path else in_log
    if not path:
        if line:
            log.info("%s", line)
        return
    try:
        append(Path(path), event)
    except OSError as error:
        # Do not fail, because code that cannot continue on a full disk raises its own error.
        level = logging.DEBUG if isinstance(event, _PROGRESS) else logging.WARNING
        log.log(level, "cannot write to %s: %s: %s", path, error.strerror, line)


@contextmanager
def listen(listener: Callable[[Event], None]) -> Iterator[None]:
    """Call a function with each event that this process emits in the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def append(path: Path, event: Event) -> None:
    """Append an event to a file. If the file is full, store progress in a separate file."""
    with open(path, "ab", buffering=0) as file:
        # Always write to a pipe, because its reported size is 0.
        has_room = os.fstat(file.fileno()).st_size < PROGRESS_BYTES
        if has_room or not isinstance(event, _PROGRESS):
            file.write(_line(event))
            return
    place = _place_of_progress(path, type(event))
    # Use a separate name, because an attempt that is being replaced may write at the same time.
    staged = place.with_name(f"{place.name}.{os.getpid()}")
    staged.write_bytes(_line(event))
    staged.replace(place)


def begin_again(path: Path, run_id: str) -> int:
    """Append a `RunBegin` event. Return the position in the file at which earlier events end."""
    if path.exists() and not path.is_file():
        # Reject a pipe, because opening it would block until a reader opens it too.
        raise OSError(errno.EINVAL, f"{path.name} is not a file", str(path))
    before = sum(isinstance(each, RunBegin) for each in read(path, every=(RunBegin,)))
    with path.open("ab", buffering=0) as file:
        for progress in newest_progress(path):
            # Append the newest progress of the earlier start to the events of that start.
            file.write(_line(progress))
        for kind in _PROGRESS:
            _place_of_progress(path, kind).unlink(missing_ok=True)
        size = os.fstat(file.fileno()).st_size
        file.write(_line(RunBegin(run_id=run_id, number=before + 1)))
    return size


def read(path: Path, *, every: Collection[type[Event]] = ()) -> Iterator[Event]:
    """Yield the events of a file in order, or nothing if the file does not exist.

    If `every` lists kinds, all events of these kinds and all `RunBegin` events are yielded. Of each
    other kind, only the newest event of each start of the run is yielded, at the end of that start.
    This way, a week of progress can be read in a second. Raises `OSError`.
    """
    whole = {event_name(kind).encode() for kind in every}
    newest: dict[bytes, bytes] = {}
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in iter(partial(file.readline, _LONGEST), b""):
            begin = line.rfind(_NAME) + len(_NAME)
            name = line[begin : line.find(b'"', begin)]
            if whole and name not in whole and name != b"run_begin":
                newest[name] = line
                continue
            event = _parse_bytes(line)
            if isinstance(event, RunBegin):
                yield from filter(None, map(_parse_bytes, newest.values()))
                newest.clear()
            if event:
                yield event
    yield from filter(None, map(_parse_bytes, newest.values()))
    yield from newest_progress(path)


class Follower:
    """A reader of the events that are appended to a file after a given position."""

    def __init__(self, path: Path, begin: int = 0) -> None:
        """Open the file, which must exist. Raises `OSError`."""
        self._path = path
        self._lines = path.open("rb")
        self._lines.seek(begin)
        self._progress_at: dict[type[Event], float] = {}

    def __enter__(self) -> Follower:
        """Return this reader."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the file."""
        self._lines.close()

    def new(self) -> Iterator[Event]:
        """Yield the events since the last call. An incomplete line is left for the next call."""
        while True:
            position = self._lines.tell()
            line = self._lines.readline()
            if not line.endswith(b"\n"):
                self._lines.seek(position)
                break
            # Skip an invalid line, which may be truncated because the disk was full.
            if event := _parse_bytes(line):
                self._progress_at[type(event)] = event.time
                yield event
        for event in newest_progress(self._path):
            # Compare only for equality, because the clock may have been set back.
            if event.time != self._progress_at.get(type(event)):
                self._progress_at[type(event)] = event.time
                yield event


def newest_progress(path: Path) -> list[Progress | WorkProgress]:
    """Return the newest progress event of each kind from the separate progress files."""
    found = []
    for kind in _PROGRESS:
        place = _place_of_progress(path, kind)
        if not place.is_file():
            continue
        with suppress(OSError), place.open("rb") as file:
            if isinstance(event := _parse_bytes(file.read(_LONGEST)), kind):
                found.append(event)
    return found


def _place_of_progress(path: Path, kind: type[Event]) -> Path:
    return path.with_name(f"{path.name}.{event_name(kind)}")


def _line(event: Event, more: Mapping[str, str] | None = None) -> bytes:
    return f"{mask(json.dumps({**to_tree(event), **(more or {})}, default=str))}\n".encode()


def _parse_bytes(line: bytes) -> Event | None:
    return parse(line.decode("utf-8", "replace"))


def parse(line: str, *, job: str = "") -> Event | None:
    """Return the event at the end of a line, or None. A truncated line may precede the event.

    With `job`, for lines from a log, return the event only if it names this job.
    """
    at = line.rfind(MARK)
    if at < 0:
        return None
    try:
        tree = parse_mapping(line[at:])
    except ValueError:
        return None
    if job and tree.get("job") != job:
        return None
    kind = _kinds().get(str(tree["event"]))
    return parse_record(kind, tree) if kind and "time" in tree else None


def event_name(kind: type[Event]) -> str:
    """Return the name that identifies a kind of event in a line."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def to_tree(record: Any) -> dict[str, Any]:
    """Return the fields of a record as a JSON object. For an event, add its name."""
    tree = tree_of(record)
    return {"event": event_name(type(record)), **tree} if isinstance(record, Event) else tree


@cache
def _kinds() -> dict[str, type[Event]]:
    return {event_name(kind): kind for kind in Event.__subclasses__()}

"""What happens in a run: one line of JSON an event, one class a kind of event.

Every process of a run appends to the file that `FLOTILLA_EVENTS` names; without the variable the
same line goes to the log. A line is `{"event": NAME, "time": seconds since 1970, ...fields}`, and
NAME is the name of the class in snake case: `StepBegin` is `step_begin`.

The file is bounded: progress is appended to its first `PROGRESS_BYTES`. From then on the newest of
each kind of progress alone is kept, in a file next to it (`newest_progress`), which each replaces.

A reader gets checked instances. It passes over what is damaged, half-written or of an unknown name,
and ignores fields that it does not know, so that it can follow a newer version of this program.
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
#: Names the job that a task belongs to.
JOB = "FLOTILLA_JOB"
MARK = '{"event": '
# Progress is appended up to this size of the file: at one a second, most of an hour.
PROGRESS_BYTES = 1 << 20
# No event is longer; the pieces of a longer line are no events.
_LONGEST = 1 << 20
_NAME = MARK.encode() + b'"'
log = logging.getLogger(__name__)
_listeners: list[Callable[[Event], None]] = []


def now() -> float:
    """Return the seconds since 1970, to the millisecond."""
    return round(time.time(), 3)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class _Frozen:
    """Makes each subclass a frozen dataclass with arguments by name."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)


class Event(_Frozen):
    """The base of all kinds; the time is no part of whether two are equal."""

    time: float = field(default_factory=now, compare=False)


class RunBegin(Event):
    """A run on this machine was started, or resumed: `number` counts from 1."""

    run_id: str
    number: int


class RunEnd(Event):
    """The pipeline of a run on this machine has run to its end."""


class Interrupted(Event):
    """A run on this machine was asked to end: it starts no step but the exit step."""


class StepBegin(Event):
    """A stage of a pipeline step begins."""

    step: str


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """How a stage of a pipeline step ended.

    Attributes:
        status: `done`, `failed` or `interrupted`.
        error: one line, empty where there is none.
        traceback: of an error in the user's code, else empty.
        seconds, metrics: of this try; key values for the closing table.
        main_metric, better: by which of these models are compared, and whether a `higher` or a
            `lower` value is better; empty where there is none.
        uri, output: of what the step has published, its URI and its kind, or empty.
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
    """A stage of a pipeline step ends."""


class AttemptBegin(Event):
    """The chief begins to train at a global step; `resumed`: not for the first time in this run."""

    global_step: int
    steps: int
    resumed: bool
    epochs: float = 0.0  # Of `steps`; 0 where it is not known.
    checkpoint: int = -1  # Global step of the newest, where those on the servers are newer.


class Progress(Event):
    """A stretch of training steps is done.

    Attributes:
        global_step: reached.
        steps: where training ends.
        loss: mean over the stretch, as is `steps_per_second`.
        seconds: of training so far, over all attempts.
        epoch: passes over the training examples so far, and `epochs` where training ends; 0 where
            it is not known.
        metrics: further ones of the strategy.
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
    """A piece of work that takes long has come so far; training has `Progress`.

    Attributes:
        what: is done, in words, such as `reading the files`.
        unit: of what `done` and `total` count, such as `rows` or `bytes`; empty where nothing is.
        total: 0 where it is not known.
        share: of the whole that is done, from 0 to 1; -1 where it is not known.
        rate: units in a second, lately.
        seconds: since the work began.
        seconds_left: -1 where it is not known.
        detail: what it does now, or waits for.
        is_over: whether it has ended.
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
    """A checkpoint is written on this machine; training waited for `seconds`."""

    uri: str
    global_step: int
    seconds: float


class CheckpointPublished(Event):
    """A checkpoint is published."""

    uri: str
    global_step: int


class CheckpointPassedOver(Event):
    """A checkpoint cannot be read; an older one is used."""

    uri: str
    reason: str


class UploadFailed(Event):
    """A checkpoint could not be uploaded yet."""

    reason: str


class Restart(Event):
    """A training task that ended with `code` starts again; `restarts` counts incidents up to it."""

    task: str
    cause: str
    restarts: int
    code: int = 0  # In the log of a pod: 128 and its number for a signal.


class ServersLost(Event):
    """Parameter servers are gone: what of the model goes back to an earlier global step.

    Attributes:
        recovery: `partial`: their values alone go back; `full`: those of all servers do.
        global_step: that training had reached, as far as the chief knows.
        back_to: the global step of the values that go back; -1 where it is not known.
        reason: why the recovery is full, else empty.
    """

    servers: tuple[str, ...]
    recovery: str
    global_step: int
    back_to: int
    reason: str = ""


class Suspension(Event):
    """The job waits for room, which others have; `is_over`: it may run, and its tasks start."""

    is_over: bool
    was_running: bool


class TaskFailed(Event):
    """A training task failed for good."""

    task: str
    cause: str
    log: str = ""
    last_lines: tuple[str, ...] = ()


class Stalled(Event):
    """Training made no progress for `seconds`, and these tasks did not answer."""

    tasks: tuple[str, ...]
    seconds: float


class EvaluatorLeft(Event):
    """Training continues without its evaluator."""

    reason: str


class Validation(Event):
    """The model was measured on the validation split; `created` is an evaluator's checkpoint."""

    global_step: int
    metrics: Mapping[str, Any]
    created: str = ""


class OpenPorts(Event):
    """The ports of a local cluster are open to more than this machine."""

    warning: str


class MetricsUnserved(Event):
    """The metrics of the run cannot be served; training goes on without."""

    reason: str


class LeaseTakenOver(Event):
    """The lease of a folder of checkpoints was taken over from a holder that is gone."""

    uri: str
    holder: str
    reason: str


class LeaseAwaited(Event):
    """The holder of a lease may be dead; the lease is waited for."""

    uri: str
    holder: str
    until: str


class NewestVersion(Event):
    """No version of the dataset was named; this is its newest."""

    dataset: str
    version: str


class DataNote(Event):
    """What the preparation or the validation of the data says of them, in one line.

    Attributes:
        text: names the column or the file, and the key that answers it.
        is_warning: whether a rule of the data gate warns of it.
    """

    text: str
    is_warning: bool = False


class WarmStart(Event):
    """Training begins with weights that were there already."""

    uri: str
    taken: int = 0  # How many variables of the model got their values.
    left: Mapping[str, int] = field(default_factory=dict)  # How many did not, by the reason.
    what: str = ""  # Both in a line, with the names of some that were left.


class HandedOn(Event):
    """Training is over, and this checkpoint goes on; `trained` is the last global step."""

    uri: str
    global_step: int
    trained: int
    why: str


class FromScratch(Event):
    """There is no champion yet to begin with."""

    reason: str


class TableEmpty(Event):
    """Training is over, and no id has a row in a table that grows: all get that of unknown ones."""

    table: str
    why: str


class UserCodeFailed(Event):
    """The user's own code raised an error in a training task."""

    error: str
    traceback: str


_PROGRESS = (Progress, WorkProgress)


def emit(event: Event, *, in_log: str | None = None) -> None:
    """Append one event, by one `write`, to the file of the run, or write it to the log.

    The log gets the line `in_log` in its place, where there is one; none where it is empty. In the
    log an event names its job: what user code prints there may look like one.
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
        # A full disk has to be reported by what cannot go on without it.
        level = logging.DEBUG if isinstance(event, _PROGRESS) else logging.WARNING
        log.log(level, "cannot write to %s: %s: %s", path, error.strerror, line)


@contextmanager
def listen(listener: Callable[[Event], None]) -> Iterator[None]:
    """Have a function called with each event that this process emits in the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def append(path: Path, event: Event) -> None:
    """Append one event to a file; raises `OSError`."""
    with open(path, "ab", buffering=0) as file:
        # A pipe has no size.
        has_room = os.fstat(file.fileno()).st_size < PROGRESS_BYTES
        if has_room or not isinstance(event, _PROGRESS):
            file.write(_line(event))
            return
    place = _place_of_progress(path, type(event))
    # Of an attempt that is being replaced, the last progress may come at the same time.
    staged = place.with_name(f"{place.name}.{os.getpid()}")
    staged.write_bytes(_line(event))
    staged.replace(place)


def begin_again(path: Path, run_id: str) -> int:
    """Append that a run begins; return where the events of earlier starts end."""
    if path.exists() and not path.is_file():
        # To open a pipe would wait for its reader.
        raise OSError(errno.EINVAL, f"{path.name} is not a file", str(path))
    before = sum(isinstance(each, RunBegin) for each in read(path, every=(RunBegin,)))
    with path.open("ab", buffering=0) as file:
        for progress in newest_progress(path):
            # How far that start has come stays with its events.
            file.write(_line(progress))
        for kind in _PROGRESS:
            _place_of_progress(path, kind).unlink(missing_ok=True)
        size = os.fstat(file.fileno()).st_size
        file.write(_line(RunBegin(run_id=run_id, number=before + 1)))
    return size


def read(path: Path, *, every: Collection[type[Event]] = ()) -> Iterator[Event]:
    """Yield the events of a file in order; none where there is no such file.

    Where `every` names kinds, only the newest event of each other kind is yielded for each start of
    the run, after the events of that start: a week of progress is read in a second. Raises
    `OSError`.
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
            event = _parsed(line)
            if isinstance(event, RunBegin):
                yield from filter(None, map(_parsed, newest.values()))
                newest.clear()
            if event:
                yield event
    yield from filter(None, map(_parsed, newest.values()))
    yield from newest_progress(path)


class Follower:
    """Reads the events of a file as they come, from a place in it on."""

    def __init__(self, path: Path, begin: int = 0) -> None:
        """Open the file, which has to be there; raises `OSError`."""
        self._path = path
        self._lines = path.open("rb")
        self._lines.seek(begin)
        self._progress_at: dict[type[Event], float] = {}

    def __enter__(self) -> Follower:
        """Begin."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close the file."""
        self._lines.close()

    def new(self) -> Iterator[Event]:
        """Yield the events since the last call; an incomplete line is left for the next."""
        while True:
            position = self._lines.tell()
            line = self._lines.readline()
            if not line.endswith(b"\n"):
                self._lines.seek(position)
                break
            # A full disk tears lines; the run says what is wrong by its exit code too.
            if event := _parsed(line):
                self._progress_at[type(event)] = event.time
                yield event
        for event in newest_progress(self._path):
            # The clock may be set back meanwhile.
            if event.time != self._progress_at.get(type(event)):
                self._progress_at[type(event)] = event.time
                yield event


def newest_progress(path: Path) -> list[Progress | WorkProgress]:
    """Return the newest progress of each kind for which the file of events has no room."""
    found = []
    for kind in _PROGRESS:
        place = _place_of_progress(path, kind)
        if not place.is_file():
            continue
        with suppress(OSError), place.open("rb") as file:
            if isinstance(event := _parsed(file.read(_LONGEST)), kind):
                found.append(event)
    return found


def _place_of_progress(path: Path, kind: type[Event]) -> Path:
    return path.with_name(f"{path.name}.{event_name(kind)}")


def _line(event: Event, more: Mapping[str, str] | None = None) -> bytes:
    return f"{mask(json.dumps({**to_tree(event), **(more or {})}, default=str))}\n".encode()


def _parsed(line: bytes) -> Event | None:
    return parse(line.decode("utf-8", "replace"))


def parse(line: str, *, job: str = "") -> Event | None:
    """Return the event that a line, also one after a line cut short, ends with, if any.

    With `job`, of a line of a log: only an event that names this job.
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
    """Return the name of a kind of event in its line."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


def to_tree(record: Any) -> dict[str, Any]:
    """Return the fields of a record, to be written as a JSON object; of an event the name too."""
    tree = tree_of(record)
    return {"event": event_name(type(record)), **tree} if isinstance(record, Event) else tree


@cache
def _kinds() -> dict[str, type[Event]]:
    return {event_name(kind): kind for kind in Event.__subclasses__()}

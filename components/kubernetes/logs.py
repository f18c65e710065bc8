"""Follows the logs of all tasks, and relays their events.

Each line is read exactly once, even if connections break. The API can resend a log only from the
start of a second. Therefore lines that were already read are recognized by their timestamps, and
lines with equal timestamps are counted.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flotilla.components.kubernetes.client import Api, RefusedError, UnreachableError
from flotilla.components.kubernetes.names import PODS, Tree
from flotilla.components.kubernetes.pods import pod_state
from flotilla.trainer import events
from flotilla.trainer.config.topology import Task
from flotilla.trainer.events.progress import LogLines, convert_to_work

log = logging.getLogger(__name__)
# Number of log lines in the report of a failed task.
TAIL = 5
_RETRY_SECONDS = 1.0
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")
# The training events that `EventRelay` processes.
_TRAINING_EVENTS = (
    events.AttemptBegin, events.Progress, events.CheckpointPublished, events.CheckpointPassedOver,
    events.ServersLost, events.Validation, events.Stalled, events.LauncherUnwatched,
    events.MetricsUnserved, events.LeaseAwaited, events.TableEmpty, events.UserCodeFailed,
)  # fmt: skip

LogSink = Callable[[Task, str], None]
# A point in time: the date and time up to the second, and the nanoseconds.
_Timestamp = tuple[str, str]


class LogPosition:
    """The position in a log. `take` returns only new lines."""

    def __init__(self) -> None:
        """Start at the first line."""
        self._last: _Timestamp = ("", "")
        self._zone = ""
        # Of the lines with the last timestamp: the number of lines that were read in total, and the
        # number of these lines that the current request has repeated.
        self._read = self._repeated = 0
        self._catching_up = False

    def begin_request(self) -> str:
        """Start a new request, and return its `sinceTime`, which is empty for the whole log."""
        self._repeated, self._catching_up = 0, True
        return f"{self._last[0]}{self._zone}" if self._last[0] else ""

    def take(self, line: str) -> str | None:
        """Return the text of a new line, or None for a line that was read before."""
        time, _, text = line.partition(" ")
        match = _TIME.fullmatch(time)
        if not match:
            return line
        timestamp = (match[1], (match[2] or "").ljust(9, "0"))
        if self._catching_up:
            if timestamp < self._last:
                return None
            if timestamp == self._last and self._repeated < self._read:
                self._repeated += 1
                return None
            self._catching_up = False
        self._read = self._read + 1 if timestamp == self._last else 1
        self._last, self._zone = timestamp, match[3]
        return text


class LogFollower(threading.Thread):
    """A daemon thread that reads the log of one container until its next restart."""

    def __init__(self, api: Api, pod: Tree, container: str, sink: LogSink) -> None:
        """Store the arguments. `start` starts reading."""
        self.task = pod_state.find_task(pod)
        super().__init__(name=f"log {self.task}", daemon=True)
        self._api, self._container, self._sink = api, container, sink
        self._pod, self._uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        self._restart_count = pod_state.restart_count(pod, container)
        self._position = LogPosition()
        self._partial = ""
        self.stopped = threading.Event()

    def run(self) -> None:
        """Read the whole log of the container, until it has ended or `stopped` is set."""
        while not self.stopped.is_set():
            try:
                pod = self._api.get(PODS, self._pod)
                if pod["metadata"]["uid"] != self._uid:
                    break
                count = pod_state.restart_count(pod, self._container)
                restarted = count > self._restart_count
                ended = restarted or pod_state.has_ended(pod, self._container)
                self._read_log(follow=not ended, previous=restarted)
                if ended:
                    break
            except RefusedError as error:
                if error.is_missing:
                    break
                self.stopped.wait(_RETRY_SECONDS)
            except UnreachableError as error:
                self.stopped.wait(max(_RETRY_SECONDS, error.retry_after))
        if self._partial:
            self._sink(self.task, self._partial)

    def _read_log(self, *, follow: bool, previous: bool) -> None:
        since = self._position.begin_request()
        lines = self._api.log(
            self._pod, self._container, since=since, follow=follow, previous=previous
        )
        for line in lines:
            if not line.endswith("\n"):
                self._store_truncated(line)
                return
            self._partial = ""
            text = self._position.take(line[:-1])
            if text is not None:
                self._sink(self.task, text)
            if self.stopped.is_set():
                return

    def _store_truncated(self, line: str) -> None:
        """Store a truncated line, because it cannot be read again if the task has died."""
        timestamp, _, partial = line.partition(" ")
        is_of_the_task = bool(_TIME.fullmatch(timestamp))
        self._partial = partial if is_of_the_task else ""
        if not is_of_the_task:
            # The kubelet no longer has the log, and this line is its error message.
            log.warning("the log of %s (pod %s) cannot be read: %s", self.task, self._pod, line)


class Logs:
    """The log followers of all tasks, and the last lines of each task."""

    def __init__(self, api: Api, sink: LogSink) -> None:
        """Store the API and the function that receives every line."""
        self._api, self._sink = api, sink
        self._followers: dict[tuple[str, str, int], LogFollower] = {}
        self._tails: dict[Task, deque[str]] = {}
        self._lock = threading.Lock()

    def follow(self, pod: Tree) -> None:
        """Follow the logs of the started containers of a pod, once for each restart."""
        for name in pod_state.logging_containers(pod):
            key = (pod["metadata"]["uid"], name, pod_state.restart_count(pod, name))
            if pod_state.has_started(pod, name) and key not in self._followers:
                self._followers[key] = LogFollower(self._api, pod, name, self._write)
                self._followers[key].start()

    def tail(self, task: Task) -> list[str]:
        """Return the last lines of a task's log."""
        with self._lock:
            return list(self._tails.get(task, ()))

    def drain(self, seconds: float, task: Task | None = None) -> None:
        """Wait up to `seconds` until the logs of a task, or of all tasks, have been read."""
        end = time.monotonic() + seconds
        for follower in list(self._followers.values()):
            if task in (None, follower.task):
                follower.join(max(0.0, end - time.monotonic()))

    def stop(self) -> None:
        """Stop reading."""
        for follower in self._followers.values():
            follower.stopped.set()

    def _write(self, task: Task, text: str) -> None:
        with self._lock:
            self._tails.setdefault(task, deque(maxlen=TAIL)).append(text)
            self._sink(task, text)


@dataclass
class EventRelay:
    """Relays events of the leading task.

    `on_progress` is called when the global step changes, and `on_published` at each checkpoint.
    `traceback` is the traceback of failed user code.
    """

    on_progress: Callable[[], None]
    on_published: Callable[[int], None]
    traceback: str = ""
    _step: int = -1
    _lines: LogLines = field(default_factory=LogLines)

    def take(self, event: events.Event) -> None:
        """Process the next event of the log."""
        if not isinstance(event, _TRAINING_EVENTS):
            return
        if isinstance(event, events.UserCodeFailed):
            self.traceback = event.traceback
        step = getattr(event, "global_step", self._step)
        if step != self._step:
            self._step = step
            self.on_progress()
        if isinstance(event, events.CheckpointPublished):
            self.on_published(event.global_step)
        if os.environ.get(events.VARIABLE):
            # Set the time again, so that all events in the file use the clock of this machine.
            events.emit(replace(event, time=events.now()))
        elif line := self._lines.take(event):
            if isinstance(event, events.Progress):
                # The progress of the leading task is the progress of the step.
                events.emit(convert_to_work(event), in_log=line)
            else:
                log.info("%s", line)

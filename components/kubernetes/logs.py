"""Follows the logs of all tasks: each line once, across broken connections, and their events.

The API can repeat a log only from a whole second on. Timestamps identify lines that were read
before, and the count identifies lines with equal timestamps.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from flotilla.components.kubernetes.api.client import Api, RefusedError, UnreachableError
from flotilla.components.kubernetes.names import PODS, Tree
from flotilla.components.kubernetes.pods import pod_state
from flotilla.trainer import events
from flotilla.trainer.config.topology import Task
from flotilla.trainer.events.event_lines import LogLines, convert_to_work

log = logging.getLogger(__name__)
# The number of lines of a failed task in its report.
TAIL = 5
_RETRY_SECONDS = 1.0
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")
# Events of training; other events in the log of the leading task are ordinary lines.
_TRAINING_EVENTS = (
    events.AttemptBegin,
    events.Progress,
    events.CheckpointPublished,
    events.CheckpointPassedOver,
    events.ServersLost,
    events.Validation,
    events.UserCodeFailed,
)

LogSink = Callable[[Task, str], None]
# Seconds and nanoseconds, as texts that sort by time.
_Timestamp = tuple[str, str]


class LogPosition:
    """The position in a log; `take` returns only new lines."""

    def __init__(self) -> None:
        """Begin at the first line."""
        self._last: _Timestamp = ("", "")
        self._zone = ""
        # The number of lines with the last timestamp: in all, and in the current request.
        self._read = self._repeated = 0
        self._catching_up = False

    def begin_request(self) -> str:
        """Start a new request, and return its `sinceTime`; empty for the whole log."""
        self._repeated, self._catching_up = 0, True
        return f"{self._last[0]}{self._zone}" if self._last[0] else ""

    def take(self, line: str) -> str | None:
        """Return the text of a new line; None for a line that was read before."""
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
    """A daemon thread that reads the log of one container, up to its next restart."""

    def __init__(self, api: Api, pod: Tree, container: str, sink: LogSink) -> None:
        """Store the arguments; `start` begins to read."""
        self.task = pod_state.find_task(pod)
        super().__init__(name=f"log {self.task}", daemon=True)
        self._api = api
        self._pod = pod["metadata"]["name"]
        self._uid = pod["metadata"]["uid"]
        self._container = container
        self._restart_count = pod_state.restart_count(pod, container)
        self._sink = sink
        self._position = LogPosition()
        self._partial = ""
        self.stopped = threading.Event()

    def run(self) -> None:
        """Read until the container has ended, then the rest of its log, or until `stopped`."""
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
        """Store a truncated line, which the next request repeats unless the task has died."""
        timestamp, _, partial = line.partition(" ")
        is_of_the_task = bool(_TIME.fullmatch(timestamp))
        self._partial = partial if is_of_the_task else ""
        if not is_of_the_task:
            # The response of a kubelet that no longer has the log.
            log.warning("the log of %s (pod %s) cannot be read: %s", self.task, self._pod, line)


class Logs:
    """The log followers of all tasks, and the last lines of each task."""

    def __init__(self, api: Api, sink: LogSink) -> None:
        """Store the API and the function that receives every line."""
        self._api = api
        self._sink = sink
        self._followers: dict[tuple[str, str, int], LogFollower] = {}
        self._tails: dict[Task, deque[str]] = {}
        self._lock = threading.Lock()

    def follow(self, pod: Tree) -> None:
        """Follow the containers of a pod that have started, once for each restart."""
        for name in pod_state.logging_containers(pod):
            key = (pod["metadata"]["uid"], name, pod_state.restart_count(pod, name))
            if pod_state.has_started(pod, name) and key not in self._followers:
                self._followers[key] = LogFollower(self._api, pod, name, self._write)
                self._followers[key].start()

    def tail(self, task: Task) -> list[str]:
        """Return the last lines of a task."""
        with self._lock:
            return list(self._tails.get(task, ()))

    def drain(self, seconds: float, task: Task | None = None) -> None:
        """Wait until the logs of a task, or of all tasks, are read; at most `seconds`."""
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


class EventRelay:
    """Relays the events in the leading task's log; `traceback` comes from the user's code."""

    def __init__(
        self, on_progress: Callable[[], None], on_published: Callable[[int], None]
    ) -> None:
        """Store the functions to call after a change of the global step, and at each checkpoint."""
        self._on_progress, self._on_published = on_progress, on_published
        self.traceback = ""
        self._step = -1
        self._lines = LogLines()

    def take(self, event: events.Event) -> None:
        """Process the next event of the log."""
        if not isinstance(event, _TRAINING_EVENTS):
            return
        if isinstance(event, events.UserCodeFailed):
            self.traceback = event.traceback
        step = getattr(event, "global_step", self._step)
        if step != self._step:
            self._step = step
            self._on_progress()
        if isinstance(event, events.CheckpointPublished):
            self._on_published(event.global_step)
        if os.environ.get(events.VARIABLE):
            # All events in the file have the time of this machine.
            events.emit(replace(event, time=events.now()))
        elif line := self._lines.take(event):
            if isinstance(event, events.Progress):
                # The leading task determines the progress of the step.
                events.emit(convert_to_work(event), in_log=line)
            else:
                log.info("%s", line)

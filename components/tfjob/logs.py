"""The logs of all tasks, each line once, whatever happens to the connections.

The API gives a log again from a whole second on. Lines that were seen are told by their time, and
those of the very same time by their number.

How far training has come, from what the leading task writes to its log.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from components.tfjob import state
from components.tfjob.client import Api, RefusedError, Tree, UnreachableError
from trainer import events
from trainer.topology import Task

log = logging.getLogger(__name__)
_MARK = '{"event": '
# Where no command line follows the events, a line of progress comes at most so often.
LINE_SECONDS = 10.0


class Progress:
    """Passes the events of the leading task on, and tells when training has moved."""

    def __init__(self, moved: Callable[[], None]) -> None:
        """Take what to call when the global step has grown."""
        self._moved = moved
        self._step = -1
        self._line_at = -LINE_SECONDS

    def take(self, text: str) -> None:
        """Look at one line of the log."""
        event = _event(text)
        if event is None:
            return
        fields = {key: value for key, value in event.items() if key not in ("event", "time")}
        step = fields.get("global_step")
        if isinstance(step, int) and step != self._step:
            self._step = step
            self._moved()
        if os.environ.get(events.VARIABLE):
            events.emit(event["event"], **fields)
        elif event["event"] == "progress":
            self._say(fields)

    def _say(self, fields: dict[str, Any]) -> None:
        if time.monotonic() - self._line_at < LINE_SECONDS:
            return
        self._line_at = time.monotonic()
        log.info(
            "global step %s/%s  loss %.4f  %.0f steps/s  %.0f s left",
            *(fields.get(key, 0) for key in _SHOWN),
        )


_SHOWN = ("global_step", "steps", "loss", "steps_per_second", "seconds_left")


# What a task may tell, with what whoever follows relies on; any other text is just a line.
_PASSED_ON: dict[str, set[str]] = {
    "life": {"global_step", "steps", "resumed"},
    "progress": set(_SHOWN),
    "checkpoint": {"uri", "global_step"},
    "checkpoint_passed_over": {"uri", "reason"},
}


def _event(text: str) -> dict[str, Any] | None:
    at = text.find(_MARK)
    if at < 0:
        return None
    try:
        tree = json.loads(text[at:])
    except ValueError:
        return None
    needed = _PASSED_ON.get(str(tree.get("event"))) if isinstance(tree, dict) else None
    return tree if needed is not None and needed <= tree.keys() else None


# Of a task that has ended badly, so many lines go into the report.
TAIL = 5
_WAIT_SECONDS = 1.0
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)")

Sink = Callable[[Task, str], None]
_Stamp = tuple[str, str]


class Position:
    """How far a log has been read; `take` says whether a line is new."""

    def __init__(self) -> None:
        """Begin at the beginning."""
        self._last: _Stamp = ("", "")
        self._zone = ""
        self._seen = self._again = 0
        self._catching_up = False

    def since(self) -> str:
        """Begin a new reading, and return from when on."""
        self._again, self._catching_up = 0, True
        return f"{self._last[0]}{self._zone}" if self._last[0] else ""

    def take(self, line: str) -> str | None:
        """Return the text of a line that is new, None for one that was seen."""
        time, _, text = line.partition(" ")
        match = _TIME.fullmatch(time)
        if not match:
            return line
        stamp = (match[1], (match[2] or "").ljust(9, "0"))
        if self._catching_up:
            if stamp < self._last:
                return None
            if stamp == self._last and self._again < self._seen:
                self._again += 1
                return None
            self._catching_up = False
        self._seen = self._seen + 1 if stamp == self._last else 1
        self._last, self._zone = stamp, match[3]
        return text


class Follower(threading.Thread):
    """Reads the log of one start of one pod to its end."""

    def __init__(self, api: Api, pod: Tree, sink: Sink) -> None:
        """Begin nothing yet."""
        self.task = state.task_of(pod)
        super().__init__(name=f"log {self.task}", daemon=True)
        self._api = api
        self._pod = pod["metadata"]["name"]
        self._uid = pod["metadata"]["uid"]
        self._start = state.starts(pod)
        self._sink = sink
        self._position = Position()
        self._part = ""
        self._halted = threading.Event()

    def stop(self) -> None:
        """Read no further."""
        self._halted.set()

    def run(self) -> None:
        """Read until the container has ended, then the rest."""
        while not self._halted.is_set():
            try:
                pod = self._api.get_pod(self._pod)
                if pod["metadata"]["uid"] != self._uid:
                    break
                newer = state.starts(pod) > self._start
                over = newer or state.has_ended(pod)
                self._read(follow=not over, previous=newer)
                if over:
                    break
            except RefusedError as error:
                if error.is_missing:
                    break
                self._halted.wait(_WAIT_SECONDS)
            except UnreachableError as error:
                self._halted.wait(max(_WAIT_SECONDS, error.wait))
        if self._part:
            self._sink(self.task, self._part)

    def _read(self, *, follow: bool, previous: bool) -> None:
        since = self._position.since()
        for line in self._api.log(self._pod, since=since, follow=follow, previous=previous):
            if not line.endswith("\n"):
                # Not seen yet: it comes again, whole, unless the task died in the middle of it.
                self._part = line.partition(" ")[2]
                return
            self._part = ""
            text = self._position.take(line[:-1])
            if text is not None:
                self._sink(self.task, text)
            if self._halted.is_set():
                return


class Logs:
    """The followers of all tasks, and the last lines of each."""

    def __init__(self, api: Api, sink: Sink) -> None:
        """Follow nothing yet."""
        self._api = api
        self._sink = sink
        self._followers: dict[tuple[str, int], Follower] = {}
        self._tails: dict[Task, deque[str]] = {}
        self._lock = threading.Lock()

    def follow(self, pod: Tree) -> None:
        """Follow a pod whose container has started, once for each start."""
        key = (pod["metadata"]["uid"], state.starts(pod))
        if state.has_started(pod) and key not in self._followers:
            self._followers[key] = Follower(self._api, pod, self._take)
            self._followers[key].start()

    def tail(self, task: Task) -> list[str]:
        """Return the last lines of a task."""
        with self._lock:
            return list(self._tails.get(task, ()))

    def drain(self, seconds: float, task: Task | None = None) -> None:
        """Wait until the logs of a task, or of all, are read to their end; at most so long."""
        end = time.monotonic() + seconds
        for follower in list(self._followers.values()):
            if task in (None, follower.task):
                follower.join(max(0.0, end - time.monotonic()))

    def stop(self) -> None:
        """Read no further."""
        for follower in self._followers.values():
            follower.stop()

    def _take(self, task: Task, text: str) -> None:
        with self._lock:
            self._tails.setdefault(task, deque(maxlen=TAIL)).append(text)
            self._sink(task, text)

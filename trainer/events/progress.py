"""The progress of long work, which is counted in batches, and readable lines of a run's events.

A thread reports the counts twice a second to the run's event file, which a terminal follows, or
every 30 seconds to the log if there is no such file. Work that ends before the first report is
never reported.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, Self

from flotilla.trainer import events
from flotilla.trainer.events import Event, Progress, WorkProgress
from flotilla.trainer.runtime.loop import Loop

# Seconds per minute and minutes per hour, the number of seconds from which tenths are omitted, and
# the number of hours from which days are shown.
_SIXTY, _TENTHS, _DAYS = 60, 10, 48
_BYTES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))


def duration(seconds: object) -> str:
    """Format seconds as `7.3 s`, `2 min 08 s`, `1 h 05 min` or `2 d 7 h`, or as `-` if invalid."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        return "-"
    if not 0 <= seconds < math.inf:
        return "-"
    if round(seconds, 1) < _TENTHS:
        return f"{seconds:.1f} s"
    if round(seconds) < _SIXTY:
        return f"{round(seconds)} s"
    minutes, rest = divmod(round(seconds), _SIXTY)
    if minutes < _SIXTY:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, _SIXTY)
    return f"{hours} h {minutes:02d} min" if hours < _DAYS else f"{hours // 24} d {hours % 24} h"


def join_tries(tries: Iterable[tuple[str, float, float]]) -> list[tuple[float, float]]:
    """Return the start and end of each period in which a run was working.

    A try consists of the name of a step, its start and its end. If a step is tried again, the time
    before the new try is idle, because the run was waiting to be resumed.
    """
    joined: list[tuple[float, float]] = []
    seen: set[str] = set()
    for step, began, ended in sorted(tries, key=itemgetter(1)):
        if joined and (step not in seen or began <= joined[-1][1]):
            joined[-1] = joined[-1][0], max(joined[-1][1], ended)
        else:
            joined.append((began, ended))
            # Later steps may be tried again too, but they belong to the same period.
            seen.clear()
        seen.add(step)
    return joined


def time_at_work(tries: Iterable[tuple[str, float, float]]) -> float:
    """Return the time for which a run was working, in seconds. See `join_tries`."""
    return sum(ended - began for began, ended in join_tries(tries))


def format_line(event: WorkProgress) -> str:
    """Return the progress as a log line, with the parts that are known."""
    if event.is_over:
        counts = f"{format_counts(event)} in " if event.done else ""
        return f"{event.what}: done, {counts}{duration(event.seconds)}"
    return f"{event.what}: {'  '.join(format_parts(event)) or duration(event.seconds)}"


def format_parts(event: WorkProgress) -> list[str]:
    """Return the known parts: percentage, counts, rate, remaining time and current activity."""
    found = [f"{math.floor(100 * event.share)} %"] if event.share >= 0 else []
    if event.done or event.total:
        found.append(format_counts(event))
    if event.done and event.rate > 0:
        unit, size = _scale(event.unit, event.rate)
        found.append(f"{_amount(event.rate / size)} {unit}/s")
    if event.seconds_left >= 0:
        found.append(f"{duration(event.seconds_left)} left")
    return [*found, event.detail] if event.detail else found


def format_counts(event: WorkProgress) -> str:
    """Return the completed count and the total, with their unit."""
    done, total = float(event.done), float(event.total)
    unit, size = _scale(event.unit, max(done, total))
    of = f"/{_amount(total / size)}" if total else ""
    return f"{_amount(done / size)}{of} {unit}"


def _scale(unit: str, largest: float) -> tuple[str, float]:
    if unit != "bytes":
        return unit, 1.0
    return next(each for each in _BYTES if largest >= _TENTHS * each[1] or each[1] == 1)


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= _TENTHS or value == round(value) else f"{value:.1f}"


# Seconds before the first report, and between reports to the file and to the log.
QUIET_SECONDS, LIVE_SECONDS, LOG_SECONDS = 3.0, 0.5, 30.0
# Time constant of the smoothed speed of work, in seconds.
_SPEED_SECONDS = 10.0
# The largest displayed share of work that is not complete.
_NEARLY = 0.999


class _Speed:
    """The recent speed, without the time before the first progress."""

    def __init__(self) -> None:
        self._at = self._reached = self._sum = self._weight = 0.0

    def take(self, at: float, reached: float) -> None:
        """Record the count that was reached after this many seconds."""
        seconds, gain = at - self._at, reached - self._reached
        if seconds > 0 and (gain > 0 or self._weight):
            kept = math.exp(-seconds / _SPEED_SECONDS)
            self._sum = kept * self._sum + (1 - kept) * gain / seconds
            self._weight = kept * self._weight + 1 - kept
        self._at, self._reached = at, reached

    @property
    def value(self) -> float:
        """The count per second, or 0 without data."""
        return self._sum / self._weight if self._weight else 0.0


class Work:
    """Work of this process, as a context manager. Any thread may count the units that are done.

    If the total number of units is unknown, but the total of another measure is known, such as the
    size of the files, the share is computed from that measure.
    """

    # The time at which the last reported work ended. The next work is reported sooner if it starts
    # soon after, because both are parts of a longer operation.
    _ended_at = -math.inf

    def __init__(
        self,
        what: str,
        unit: str = "",
        total: int = 0,
        *,
        size: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Describe the work. `total` is the number of units, and `size` their total size."""
        self._what, self._unit, self._total, self._size = what, unit, total, size
        self._clock, self._began = clock, clock()
        self._done, self._sized = 0, 0.0
        self._detail = ""
        self._speed, self._share_speed = _Speed(), _Speed()
        self._lock = threading.Lock()
        self._reported: float | None = None
        self._is_over = self._is_given_up = False
        self._loop = Loop(self.look, LIVE_SECONDS, name="progress", failing="no progress report")

    def __enter__(self) -> Self:
        """Start reporting."""
        self._loop.start()
        return self

    def __exit__(self, error: object = None, *_more: object) -> None:
        """Report the end if the work was reported. After an error, `add` raises in all threads."""
        self._loop.stop()
        with self._lock:
            self._is_over, self._is_given_up = True, error is not None
            if self._reported is not None:
                self._report(self._clock())
                Work._ended_at = self._reported

    def add(self, done: int, size: float = 0.0) -> None:
        """Add `done` completed units, which have the total size `size`.

        Raises `InterruptedError` if the work was canceled, and no caller waits for the rest.
        """
        with self._lock:
            if self._is_given_up:
                raise InterruptedError("the work was abandoned")
            self._done += done
            self._sized += size

    def reach(self, done: int, detail: str = "") -> None:
        """Set the current count, which may decrease, and what the work waits for."""
        with self._lock:
            self._done, self._detail = done, detail

    def expect(self, more: int) -> None:
        """Increase the total number of units by `more`."""
        with self._lock:
            self._total += more

    def say(self, detail: str) -> None:
        """Set the current activity, or what the work waits for."""
        self._detail = detail

    def look(self) -> None:
        """Report the progress if the interval since the last report has passed."""
        first, pause = LOG_SECONDS, LOG_SECONDS
        if os.environ.get(events.VARIABLE):
            first, pause = QUIET_SECONDS, LIVE_SECONDS
            if 0 <= self._began - Work._ended_at < QUIET_SECONDS:
                first = LIVE_SECONDS
        now = self._clock()
        with self._lock:
            self._speed.take(now - self._began, self._done)
            self._share_speed.take(now - self._began, self._share())
            due = self._began + first if self._reported is None else self._reported + pause
            if not self._is_over and now >= due:
                self._report(now)

    def _report(self, now: float) -> None:
        self._reported, seconds = now, now - self._began
        share, speed = self._share(), self._share_speed.value
        event = WorkProgress(
            what=self._what,
            unit=self._unit,
            done=self._done,
            total=self._total,
            share=round(share, 4),
            rate=round(self._speed.value, 2),
            seconds=round(seconds, 1),
            seconds_left=round((1 - share) / speed, 1) if share > 0 and speed > 0 else -1.0,
            detail=self._detail,
            is_over=self._is_over,
        )
        events.emit(event, in_log=format_line(event))

    def _share(self) -> float:
        """Return the completed share, which is 1 only if all units are done, or -1 if unknown."""
        done, whole = (self._sized, self._size) if self._size else (self._done, self._total)
        if not whole:
            return -1.0
        # The count may exceed an estimated total, and some units may never be counted.
        return min(max(done / whole, 0.0), 1.0 if self._done == self._total else _NEARLY)


# Minimum time between two progress lines, in seconds.
LINE_SECONDS = 5.0
# Time constant of the smoothed speed of training in seconds, and the minimum weight of a new
# interval.
_STEPS_SECONDS, _LEAST_WEIGHT = 20.0, 0.2


def _lost(event: events.ServersLost) -> str:
    gone = f"{', '.join(event.servers)} lost at global step {event.global_step}"
    back = "to the newest checkpoint"
    if event.back_to >= 0:
        back = f"{event.global_step - event.back_to} steps back to {event.back_to}"
    if event.recovery == "partial":
        whose = "their" if len(event.servers) > 1 else "its"
        return f"{gone}; partial recovery: only {whose} variables go {back}; the others are kept"
    return f"{gone}; full recovery: all variables go {back} ({event.reason})"


def _describe_servers(event: events.AttemptBegin) -> str:
    if event.checkpoint < 0:
        return ""
    return f", with the state of the servers; the newest checkpoint is from step {event.checkpoint}"


_LINES: dict[type[Event], Callable[[Any], str]] = {
    events.AttemptBegin: lambda event: (
        f"training resumes from global step {event.global_step}{_describe_servers(event)}"
        if event.resumed
        else ""
    ),
    events.OpenPorts: lambda event: f"warning: {event.warning}",
    events.MetricsUnserved: lambda event: f"warning: no metrics for Prometheus: {event.reason}",
    events.LauncherUnwatched: lambda event: (
        "warning: the job continues if its launcher dies, because the leading task cannot watch "
        f"the launcher: {event.reason}; give the account in "
        "cluster.kubernetes.pod.service_account the role flotilla-trainer from deploy/"
    ),
    events.NewestVersion: lambda event: f"the newest version of {event.dataset} is {event.version}",
    events.DataNote: lambda event: f"{'warning' if event.is_warning else 'note'}: {event.text}",
    events.WarmStart: lambda event: (
        f"training begins with the weights of {event.uri}"
        + (f": {event.what}" if event.what else "")
    ),
    events.FromScratch: lambda event: f"training begins from scratch: {event.reason}",
    events.HandedOn: lambda event: (
        f"global step {event.global_step} of {event.trained} is selected: {event.why}"
        if event.trained
        else f"{event.uri} is selected: {event.why}"
    ),
    events.TableEmpty: lambda event: (
        f"warning: the table {event.table} has no rows, so its ids share one row per shard: "
        f"{event.why}"
    ),
    events.Restart: lambda event: f"{event.task} ended with {event.cause} and is restarted",
    events.ServersLost: _lost,
    events.Suspension: lambda event: (
        "the job is resumed and its tasks start"
        if event.is_over
        else "the job is suspended and waits in the queue for capacity"
    ),
    events.Stalled: lambda event: (
        f"no progress for {duration(event.seconds)}: no response from {', '.join(event.tasks)}"
    ),
    events.EvaluatorLeft: lambda event: f"training continues without the evaluator: {event.reason}",
    events.CheckpointPassedOver: lambda event: f"skipped {event.uri}: {event.reason}",
    events.LeaseAwaited: lambda event: (
        f"waiting for the lease of {event.uri}: {event.holder} may be dead, but holds it until "
        f"{event.until}"
    ),
    events.LeaseTakenOver: lambda event: (
        f"took over the lease of {event.uri} from {event.holder}, which {event.reason}"
    ),
}
# Events that are not shown on a terminal with a progress bar.
_LINES_OF_LOG: dict[type[Event], Callable[[Any], str]] = {
    events.CheckpointPublished: lambda event: (
        f"checkpoint of global step {event.global_step}: {event.uri}"
    ),
    events.UploadFailed: lambda event: f"cannot upload a checkpoint yet: {event.reason}",
    events.Validation: lambda event: (
        f"validation of global step {event.global_step}: "
        + "  ".join(f"{name} {value:.4g}" for name, value in event.metrics.items())
    ),
}


def format_event(event: Event) -> str:
    """Return the line of an event, or "" for an event without a line, such as progress."""
    return _LINES.get(type(event), lambda _event: "")(event)


def format_metrics(progress: Progress) -> str:
    """Return the loss, the speed and, if known, the remaining time."""
    left = f"  {duration(progress.seconds_left)} left" if progress.seconds_left >= 0 else ""
    # A user's program may not report a loss.
    loss = f"loss {progress.loss:.4g}  " if progress.loss else ""
    return f"{loss}{progress.steps_per_second:.0f} steps/s{left}"


def format_reached(progress: Progress) -> str:
    """Return the progress of training in global steps and epochs."""
    epoch = f" ({format_epoch(progress)})" if progress.epochs else ""
    of = f"/{progress.steps}" if progress.steps else ""
    return f"global step {progress.global_step}{of}{epoch}"


def format_epoch(progress: Progress) -> str:
    """Return the progress of training in epochs, or an empty string if unknown."""
    # Limit the value, because the last batch of an epoch may extend into the next epoch.
    epoch = min(progress.epoch, progress.epochs)
    return f"epoch {epoch:.3g} of {progress.epochs:.3g}" if progress.epochs else ""


def drop_time_left(progress: Progress) -> Progress:
    """Remove the remaining time from the first progress event, whose speed includes tracing."""
    return replace(progress, seconds_left=-1.0)


def convert_to_work(progress: Progress) -> WorkProgress:
    """Convert the progress of training to generic progress."""
    loss = f"loss {progress.loss:.4g}" if progress.loss else ""
    return WorkProgress(
        what="training",
        unit="steps",
        done=progress.global_step,
        total=progress.steps,
        share=progress.global_step / progress.steps if progress.steps else -1.0,
        rate=progress.steps_per_second,
        seconds=progress.seconds,
        seconds_left=progress.seconds_left,
        detail="  ".join(filter(None, (loss, format_epoch(progress)))),
    )


@dataclass
class LogLines:
    """Formats events as lines of a log, and limits the rate of progress lines."""

    _progress_at: float = -LINE_SECONDS
    _work_at: dict[str, float] = field(default_factory=dict)

    def take(self, event: Event) -> str:
        """Return the line of the next event, or an empty string."""
        if isinstance(event, Progress):
            return self._progress(event)
        if isinstance(event, WorkProgress):
            return self._work(event)
        return _LINES_OF_LOG.get(type(event), format_event)(event)

    def _progress(self, event: Progress) -> str:
        # A clock that was set back must not suppress lines.
        if 0 <= event.time - self._progress_at < LINE_SECONDS:
            return ""
        event = drop_time_left(event) if self._progress_at < 0 else event
        self._progress_at = event.time
        return f"{format_reached(event)}  {format_metrics(event)}"

    def _work(self, event: WorkProgress) -> str:
        if event.is_over:
            return format_line(event) if self._work_at.pop(event.what, 0.0) else ""
        before = self._work_at.get(event.what, event.time - event.seconds)
        if 0 <= event.time - before < LOG_SECONDS:
            return ""
        self._work_at[event.what] = event.time
        return format_line(event)


@dataclass
class TimeLeft:
    """An estimate of the time until training ends, from a smoothed speed."""

    _speed: float = 0.0
    _last: Progress | None = None
    _is_first: bool = True

    def take(self, event: Progress) -> None:
        """Add an interval. The first one is ignored, because it includes tracing."""
        seconds = event.time - self._last.time if self._last else 0.0
        weight = max(1 - math.exp(-max(seconds, 0.0) / _STEPS_SECONDS), _LEAST_WEIGHT)
        goes_on = self._last is not None and self._last.global_step < event.global_step
        known = self._speed if goes_on and not self._is_first else 0.0
        self._speed = known + weight * (event.steps_per_second - known)
        if not known:
            self._speed = event.steps_per_second
        self._is_first = self._last is None
        self._last = event

    def seconds(self, now: float) -> float | None:
        """Return the seconds left at the time `now`, or None if the speed is not known yet."""
        if self._last is None or self._is_first or not self._speed > 0:
            return None
        left = (self._last.steps - self._last.global_step) / self._speed
        return max(left - max(now - self._last.time, 0.0), 0.0)

"""Formats the events of a run as readable lines for a step's log or a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from flotilla.trainer import events
from flotilla.trainer.events import Event, Progress, WorkProgress
from flotilla.trainer.events.progress import LOG_SECONDS, duration
from flotilla.trainer.events.progress import format_line as work_line

# Minimum time between two progress lines, in seconds.
LINE_SECONDS = 5.0
# Time constant of the smoothed speed in seconds, and the minimum weight of a new interval.
_SPEED_SECONDS, _LEAST_WEIGHT = 20.0, 0.2


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
            return work_line(event) if self._work_at.pop(event.what, 0.0) else ""
        before = self._work_at.get(event.what, event.time - event.seconds)
        if 0 <= event.time - before < LOG_SECONDS:
            return ""
        self._work_at[event.what] = event.time
        return work_line(event)


@dataclass
class TimeLeft:
    """An estimate of the time until training ends, from a smoothed speed."""

    _speed: float = 0.0
    _last: Progress | None = None
    _is_first: bool = True

    def take(self, event: Progress) -> None:
        """Add an interval. The first one is ignored, because it includes tracing."""
        seconds = event.time - self._last.time if self._last else 0.0
        weight = max(1 - math.exp(-max(seconds, 0.0) / _SPEED_SECONDS), _LEAST_WEIGHT)
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

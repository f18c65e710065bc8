"""Trains on this machine, and records the memory and CPU time of its tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flotilla.pipelines.runs import local
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import Event, Progress
from flotilla.trainer.runtime.errors import RunInterruptedError


@dataclass(frozen=True, kw_only=True)
class Used:
    """The memory and the total CPU time of a task."""

    resident_bytes: int
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Look:
    """The state of all tasks at one moment.

    Attributes:
        global_step: the last reported step.
        time: Unix timestamp of the report.
        tasks: usage by name of the task, such as `worker-0`.
        metrics: further metrics of the strategy.
    """

    global_step: int
    time: float
    tasks: Mapping[str, Used]
    metrics: Mapping[str, Any] = field(default_factory=dict)


def watched(
    config: Config, workdir: Path, steps: Sequence[int], dataset: str = ""
) -> tuple[Look, ...]:
    """Train below a folder, and record all tasks when each of `steps` is reached.

    Args:
        config: the configuration of the run.
        workdir: the folder in which the run's folder is created.
        steps: global steps in ascending order, far enough apart to be reported separately.
        dataset: URI of the published dataset; if empty, the dataset is prepared.

    Raises:
        RunInterruptedError: SIGINT or SIGTERM was received.
        RuntimeError: training failed, a task was restarted, or two of the steps were reported
            together.
    """
    run = local.new_run(config, workdir)
    looks: list[Look] = []
    left = list(steps)

    def follow(event: Event) -> None:
        if isinstance(event, Progress) and left and event.global_step >= left[0]:
            found = tasks_below(run.folder)
            step, metrics = event.global_step, event.metrics
            looks.append(Look(global_step=step, time=event.time, tasks=found, metrics=metrics))
            left[:] = [step for step in left if step > event.global_step]

    extra = {"dataset": dataset} if dataset else {}
    outcome = local.execute(run, "train_on" if dataset else "train", extra, follow)
    if outcome.status == "interrupted":
        raise RunInterruptedError(outcome.message)
    if outcome.status != "done":
        raise RuntimeError(f"training ended as {outcome.status}: {outcome.message}")
    if len(looks) != len(steps) or len({frozenset(each.tasks) for each in looks}) != 1:
        raise RuntimeError(f"not all tasks were seen at all of the steps {list(steps)}")
    return tuple(looks)


def tasks_below(folder: Path) -> dict[str, Used]:
    """Return the memory and CPU time of the tasks below a folder, by name."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        # The process may have exited since it was listed.
        with suppress(psutil.NoSuchProcess):
            words = process.cmdline()
            if words[1:4] == ["-m", "flotilla.trainer", "task"]:
                place = Path(words[words.index("--workdir") + 1])
                if place.is_relative_to(folder):
                    found[place.name] = _used(process)
    return found


def _used(process: psutil.Process) -> Used:
    times = process.cpu_times()
    return Used(
        resident_bytes=process.memory_info().rss,
        cpu_seconds=times.user + times.system,
    )

"""A training run of this machine, and what its tasks hold and have used at some of its steps."""

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
    """What one task holds and has used so far."""

    resident_bytes: int
    cpu_seconds: float


@dataclass(frozen=True, kw_only=True)
class Look:
    """All tasks at one moment.

    Attributes:
        global_step: as training said it last.
        time: seconds since the epoch when it did.
        tasks: by name, such as `worker-0`.
        metrics: further ones of the strategy.
    """

    global_step: int
    time: float
    tasks: Mapping[str, Used]
    metrics: Mapping[str, Any] = field(default_factory=dict)


def watched(
    config: Config, workdir: Path, steps: Sequence[int], dataset: str = ""
) -> tuple[Look, ...]:
    """Train below a folder, and look at all tasks as soon as each of these global steps is reached.

    Args:
        config: of the run.
        workdir: the run's folder is made in it.
        steps: in order; two that are reached together cannot be distinguished.
        dataset: URI of the published dataset; prepared when empty.

    Raises:
        RunInterruptedError: SIGINT or SIGTERM came.
        RuntimeError: training has failed, a task was begun again on the way, or two of the steps
            were reached together.
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
    """Return what the tasks that work below a folder hold and have used, by name."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        # Some that were there a moment ago have ended.
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

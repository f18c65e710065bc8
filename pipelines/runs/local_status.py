"""A run on this machine that another process has started: how it stands, its log, its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from components.step_record import StepRecord, last_start, step_records
from pipelines.runs import local
from pipelines.runs.outcome import Outcome, outcome_of
from trainer import events
from trainer.errors import DONE, UserError
from trainer.events import Event

LOOK_SECONDS = 0.3
LOG = "pipeline.log"
# How its child is started, and how a process that starts one is called.
_CHILD = " -m pipelines.runs.local_child "
_STARTER = re.compile(r"(^|[ /])(flotilla|pipelines\.cli)( |$)")
_PROCESSES = Path("/proc")
_COLUMNS = 3


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """How a run stands.

    Attributes:
        folder: of the run.
        child: process in which its steps run, or 0 when the run has ended.
        outcome: how it ended, or what there is so far.
    """

    folder: Path
    child: int
    outcome: Outcome


def is_local(workdir: Path, run_id: str) -> bool:
    """Return whether a run of this id is below `workdir`."""
    single = bool(run_id) and Path(run_id).name == run_id
    return single and (workdir / run_id / local.EVENTS).is_file()


def run_ids(workdir: Path) -> list[str]:
    """Return the runs below `workdir`, newest first."""
    begun = {path.parent.name: path.stat().st_mtime for path in workdir.glob("*/config.json")}
    return sorted(begun, key=lambda name: (begun[name], name), reverse=True)


def status_of(workdir: Path, run_id: str) -> RunStatus:
    """Return how a run stands."""
    folder = (workdir / run_id).absolute()
    child = child_of(folder)
    happened = last_start(events.read(folder / local.EVENTS))
    if child:
        return RunStatus(folder=folder, child=child, outcome=_so_far(happened))
    steps = step_records(happened)
    ended = any(step.step == "finish" and step.ended is not None for step in steps)
    if not ended and all(step.status == "done" for step in steps):
        # `prepare` and `train` have no exit step; a run that was killed has none either.
        alone = bool(steps) and steps[-1].step in ("prepare_data", "train_model")
        return RunStatus(folder=folder, child=0, outcome=_without_end(steps, alone))
    return RunStatus(folder=folder, child=0, outcome=outcome_of(happened, 0, interrupted=False))


def child_of(folder: Path) -> int:
    """Return the process in which a run's steps run, or 0: it names the run's folder."""
    for pid, _, words in _processes():
        if _CHILD in words and words.rstrip().endswith(f" {folder}"):
            return pid
    return 0


def lines(folder: Path, follow: bool) -> Iterator[str]:
    """Yield the log of a run piece by piece; to its end where it is followed."""
    try:
        log = (folder / LOG).open(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"cannot read {folder / LOG}: {error.strerror}") from None
    with log:
        while True:
            # Asked before reading: what was written before the end is read after it.
            going = follow and child_of(folder)
            while piece := log.read(1 << 16):
                yield piece
            if not going:
                return
            time.sleep(LOOK_SECONDS)


def interrupt(found: RunStatus) -> None:
    """Ask a run to end as Ctrl-C does: it publishes a last checkpoint; raises `UserError`."""
    processes = {pid: (parent, words) for pid, parent, words in _processes()}
    parent, _ = processes.get(found.child, (0, ""))
    _, words = processes.get(parent, (0, ""))
    try:
        if _STARTER.search(words):
            os.kill(parent, signal.SIGINT)
        else:
            # Nobody follows it any more: what its starter would have done.
            os.killpg(found.child, signal.SIGTERM)
    except ProcessLookupError:
        return
    except PermissionError:
        raise UserError(
            f"process {found.child} of the run is another user's: ask them to end it"
        ) from None


def _so_far(happened: list[Event]) -> Outcome:
    steps = tuple(
        step
        if step.ended is not None
        else replace(
            step,
            status="running",
            error="",
            seconds=max(time.time() - step.began, 0.0),
            metrics=_progress(happened),
        )
        for step in step_records(happened)
    )
    return Outcome(status="running", exit_code=DONE, message="", steps=steps)


def _progress(happened: list[Event]) -> dict[str, Any]:
    last = next((each for each in reversed(happened) if isinstance(each, events.Progress)), None)
    names = ("global_step", "steps", "loss", "seconds_left")
    return {name: getattr(last, name) for name in names} if last else {}


def _without_end(steps: tuple[StepRecord, ...], alone: bool) -> Outcome:
    if alone:
        return Outcome(status="done", exit_code=DONE, message="", steps=steps)
    message = "the run ended without a word: its process was killed, or the machine stopped"
    return Outcome(status="failed", exit_code=1, message=message, steps=steps)


def _processes() -> Iterator[tuple[int, int, str]]:
    """Yield number, parent and command line of every process."""
    if _PROCESSES.is_dir() and sys.platform == "linux":
        for entry in _PROCESSES.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                words = (entry / "cmdline").read_bytes().decode("utf-8", "replace")
                # The name of the program, in parentheses, may hold anything.
                state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            except OSError:
                continue
            yield int(entry.name), int(state[1]), words.replace("\0", " ")
        return
    told = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=False
    )
    for line in told.stdout.splitlines():
        numbers = line.split(None, 2)
        if len(numbers) == _COLUMNS:
            yield int(numbers[0]), int(numbers[1]), numbers[2]

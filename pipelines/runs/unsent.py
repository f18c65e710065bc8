"""Sends the missing data of earlier local runs to MLflow, and marks killed runs as ended.

A run has the file `UNSENT` in its folder until MLflow has all of its data. The file is small,
because the data itself comes from the records of the run.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from flotilla.components.records.step_record import OF_STEPS
from flotilla.pipelines.runs.outcome import RunResult, judge_ended
from flotilla.trainer import events
from flotilla.trainer.config.load import load_config
from flotilla.trainer.events.run_state import reduce_events
from flotilla.trainer.promotion import registration
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tracking import addresses, mlflow_run
from flotilla.trainer.tracking.tracker import MOST_SENDINGS, UNSENT, LocalRun, Unsent

# Maximum number of runs whose missing data one command sends. The newest runs come first.
MOST_RUNS = 20
# Seconds that a command waits at its end for the data of earlier runs.
CLOSE_SECONDS = 5.0
CONFIG, EVENTS = "config.json", "events.jsonl"
log = logging.getLogger(__name__)


@contextmanager
def sending_unsent(workdir: Path, root: str, model: str) -> Iterator[None]:
    """While the block runs, send missing data of earlier runs and the champion to MLflow."""
    if not addresses.is_tracked():
        yield
        return

    def work() -> None:
        try:
            # Send nothing if the tracker is unavailable. The run itself reports the problem.
            mlflow_run.health()
            send_unsent(workdir)
            registration.announce_again(root, model)
        # A failing tracker must not fail the run. The next run tries to send the data again.
        except Exception as error:
            log.debug("not sent to the tracker: %s", error)

    thread = threading.Thread(target=work, name="unsent", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(CLOSE_SECONDS)


def send_unsent(workdir: Path) -> None:
    """Send the missing data of the ended runs below `workdir`, newest first."""
    places = sorted(workdir.glob(f"*/{UNSENT}"), key=_modified, reverse=True)
    for place in places[:MOST_RUNS]:
        with _locked(place.parent) as is_free:
            left = Unsent.read(place.parent) if is_free else None
            if left and not _send(place.parent, left):
                return


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a run. Yield False if it is running or another command is sending its data."""
    try:
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(lock)


def _send(folder: Path, left: Unsent) -> bool:
    """Send the missing data of one run, and return False if some of it could not be sent."""
    if left.sendings >= MOST_SENDINGS:
        with suppress(OSError):
            (folder / UNSENT).unlink()
        return True
    replace(left, sendings=left.sendings + 1).write(folder)
    history = folder / EVENTS
    try:
        # A folder without a configuration is a sweep, whose end can be sent without one.
        if not (folder / CONFIG).exists():
            sent = LocalRun(None, folder.name, history)
            return sent.end("interrupted", "the process was killed")
        state = reduce_events(events.read(history, every=OF_STEPS), newest_start=True)
        result = judge_ended(state)
        sent = LocalRun(load_config(folder / CONFIG), folder.name, history)
    except (OSError, UserError) as error:
        log.debug("%s: %s", folder, error)
        return True
    ends = [step.ended for step in result.steps if step.ended]
    word = "KILLED" if _is_killed(result) else ""
    return sent.end(result.status, result.message, word=word, ended=max(ends, default=0))


def _is_killed(result: RunResult) -> bool:
    """Return whether a run was killed: it failed, but no step recorded a failure."""
    failed = [each for each in result.steps if each.status == "failed"]
    return result.status == "failed" and all(each.ended is None for each in failed)

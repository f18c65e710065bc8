"""Run a pipeline on this machine: lay out the run's folder, start the runner, follow its events."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from components.locations import RUN_FOLDER, RUN_ID
from components.record import STOPPING
from pipelines.runs.outcome import Outcome, outcome_of
from trainer import events, storage, user_code
from trainer.cluster import signals
from trainer.config.run_parameters import to_parameters
from trainer.config.schema import Config
from trainer.errors import ConfigError, UserError, nearest
from trainer.events import Event, RunBegin

Follower = Callable[[Event], None]

EVENTS = "events.jsonl"
# How often the events of a run are looked at: often enough for a progress bar.
LOOK_SECONDS = 0.2
# A disk with less free bytes is full.
LEAST_ROOM = 1 << 16


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """One run on this machine.

    Attributes:
        run_id: its id.
        folder: all of it that is on this machine.
        config: the configuration, with a storage root.
        lock: descriptor of a file that is locked until the run, or this process, has ended.
        begin: bytes in the file of events before those of this start.
    """

    run_id: str
    folder: Path
    config: Config
    lock: int
    begin: int


def new_run(config: Config, workdir: Path) -> LocalRun:
    """Lay out a fresh run below `workdir`; raises `ConfigError` when it cannot be written."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return _laid_out(config, workdir, f"{config.name}-{stamp}-{secrets.token_hex(2)}")


def resumed_run(config: Config, workdir: Path, run_id: str) -> LocalRun:
    """Take up the run `run_id` below `workdir` again; raises `ConfigError` if there is none."""
    check_run_id(workdir, run_id)
    return _laid_out(config, workdir, run_id)


def saved_config(workdir: Path, run_id: str) -> Path:
    """Return the file with the configuration that a run was started with."""
    check_run_id(workdir, run_id)
    return workdir / run_id / "config.json"


def check_run_id(workdir: Path, run_id: str) -> None:
    """Raise a `ConfigError` unless `run_id` is a run below `workdir`."""
    runs = [path.parent.name for path in workdir.glob("*/config.json")]
    if run_id not in runs:
        known = nearest(run_id, runs) or (f" (newest: {max(runs, key=_stamp)})" if runs else "")
        raise ConfigError(f"no run {run_id!r} below {workdir}{known}")


def _stamp(run_id: str) -> list[str]:
    return run_id.split("-")[-3:]


def root_of(config: Config, workdir: Path) -> str:
    """Return the URI below which a run on this machine publishes."""
    return config.storage.root or storage.uri_of(workdir.absolute())


def _laid_out(config: Config, workdir: Path, run_id: str) -> LocalRun:
    folder = workdir.absolute() / run_id
    root = root_of(config, workdir)
    placed = config.model_copy(update={"storage": config.storage.model_copy(update={"root": root})})
    try:
        # The runner leaves a folder of every step in the temporary directory.
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begin = _begun(folder / EVENTS, run_id)
        (folder / "config.json").write_text(config.model_dump_json(indent=2), encoding="utf-8")
    except BlockingIOError:
        raise ConfigError(f"run {run_id} is still going on; wait for its end or stop it") from None
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}; choose another --workdir"
        ) from None
    return LocalRun(run_id=run_id, folder=folder, config=placed, lock=lock, begin=begin)


def _begun(path: Path, run_id: str) -> int:
    """Append that the run begins to the events of earlier starts; return the file's size."""
    before = [each for each in events.read(path) if isinstance(each, RunBegin)]
    events.append(path, RunBegin(run_id=run_id, number=len(before) + 1))
    return path.stat().st_size


def execute(run: LocalRun, pipeline: str, extra: Mapping[str, str], follow: Follower) -> Outcome:
    """Run `pipeline` (a name of `pipelines.training.PIPELINES`) to its end.

    SIGINT and SIGTERM end it with a last checkpoint; a second one ends it at once.

    Args:
        run: the run, laid out.
        pipeline: its name.
        extra: further arguments of the pipeline.
        follow: is called with every event as it comes.
    """
    child = _started(run, pipeline, {**to_parameters(run.config), **extra})
    try:
        with _interrupts(child) as interrupts:
            happened = _follow(run, child, follow)
    finally:
        _signal_group(child, signal.SIGKILL)
        child.wait()
        shutil.rmtree(run.folder / "tmp", ignore_errors=True)
        os.close(run.lock)
    outcome = outcome_of(happened, child.returncode, interrupted=bool(interrupts))
    return told_of_a_full_disk(outcome, run.folder)


def told_of_a_full_disk(outcome: Outcome, folder: Path) -> Outcome:
    """Return how a run ended, with a word on a disk that is full.

    What the steps had to say of it may have found no room either.
    """
    if outcome.status != "failed" or shutil.disk_usage(folder).free >= LEAST_ROOM:
        return outcome
    message = f"{outcome.message}; there is no space left at {folder}"
    return replace(outcome, message=message)


def _started(run: LocalRun, pipeline: str, arguments: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    try:
        (run.folder / "arguments.json").write_text(json.dumps(arguments), encoding="utf-8")
        log = (run.folder / "pipeline.log").open("ab")
    except OSError as error:
        raise UserError(f"cannot write to {run.folder}: {error.strerror}") from None
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "pipelines.runs.local_child", pipeline, str(run.folder)],
            env=_environment(run),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Its own session: an interrupt reaches it from here, once, and not by the terminal.
            start_new_session=True,
        )


def _environment(run: LocalRun) -> dict[str, str]:
    return {
        # An interrupt is this run's own affair: the shell may still have another one's.
        **{name: value for name, value in os.environ.items() if name != STOPPING},
        **signals.parent_environment(),
        events.VARIABLE: str(run.folder / EVENTS),
        RUN_ID: run.run_id,
        RUN_FOLDER: str(run.folder),
        "TMPDIR": str(run.folder / "tmp"),
        **user_code.environment(),
    }


def _follow(run: LocalRun, child: subprocess.Popen[bytes], follow: Follower) -> list[Event]:
    happened: list[Event] = []
    running = True
    with (run.folder / EVENTS).open("rb") as lines:
        lines.seek(run.begin)
        while running:
            try:
                child.wait(timeout=LOOK_SECONDS)
                running = False
            except subprocess.TimeoutExpired:
                pass
            for event in _since(lines):
                happened.append(event)
                follow(event)
    return happened


def _since(lines: BinaryIO) -> Iterator[Event]:
    """Yield the events that came since the last call; a line that is not whole is left."""
    while True:
        position = lines.tell()
        line = lines.readline()
        if not line.endswith(b"\n"):
            lines.seek(position)
            return
        # A full disk tears lines; the run says what is wrong by its exit code too.
        if event := events.parse(line.decode("utf-8", "replace")):
            yield event


@contextmanager
def _interrupts(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass the first interrupt on as a request, the second as an end; yield what came.

    A terminal that is closed interrupts too, unless the run was started to outlive it (`nohup`).
    """
    seen: list[int] = []

    def handle(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        _signal_group(child, signal.SIGTERM if len(seen) == 1 else signal.SIGKILL)

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)

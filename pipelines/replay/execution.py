"""Replay a step: fetch what it had, run its body in a process of its own, and compare.

The process sees storage as it was when the step began, and writes to a mirror of it below
`<workdir>/replays/`; the storage of the run is only read (`trainer.storage.replays.overlay`).
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from components.locations import RUN_FOLDER, RUN_ID
from components.pinned_inputs import FILE as PINNED
from components.records.record import STOPPING
from components.table import EXIT_STEP, RESOLVE
from pipelines.replay.adaptation import arguments_of, code_remark, require_arguments
from pipelines.replay.inputs import fetch, inputs_of, require_room, snapshot_of
from pipelines.replay.recorded import RecordedStep, find
from pipelines.replay.verdict import Verdict, compare
from pipelines.runs import local
from pipelines.runs.kfp_access import Instance
from trainer import events, mirror, user_code
from trainer.cluster import signals
from trainer.errors import ConfigError, RunInterruptedError, UserError
from trainer.events import StepBegin, StepEnd
from trainer.storage.errors import reported

REPLAYS = "replays"
# So long a step that was asked to end may take.
_END_SECONDS = 20
_POD = "replay"
_MEGABYTE = 1_000_000
OnLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """Which step to replay, and how.

    Attributes:
        run: id of the run; of one on an instance also its name.
        step: its name.
        settings: `storage.root=URI`, where a run of a cluster has published.
        workdir: the folder of the runs of this machine; replays are below it.
        instance: the KFP instance; from the environment when left out.
        debug: stop in pdb where the step fails.
    """

    run: str
    step: str
    settings: Sequence[str] = ()
    workdir: str | Path = "runs"
    instance: Instance = field(default_factory=Instance)
    debug: bool = False


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What was replayed.

    Attributes:
        recorded: the step on record.
        replayed: how the replay ended; None where its process was killed.
        verdict: how they compare.
        folder: all that the replay has fetched and written.
        fetched: bytes that were fetched before the step began.
        remarks: what was not as it was.
    """

    recorded: RecordedStep
    replayed: StepEnd | None
    verdict: Verdict
    folder: Path
    fetched: int
    remarks: tuple[str, ...]


def replay(options: ReplayOptions, on_line: OnLine = lambda _line: None) -> ReplayResult:
    """Run a step of a run again on this machine; nothing is published.

    Args:
        options: which one, and how.
        on_line: called with each remark before the step begins.

    Raises:
        UserError: there is no such step, or its inputs are not there any more.
        RunInterruptedError: SIGINT or SIGTERM came; the step was ended.
    """
    local.require_current_folder()
    workdir = Path(options.workdir)
    recorded = find(
        options.run,
        options.step,
        settings=options.settings,
        workdir=workdir,
        instance=options.instance,
    )
    require_arguments(recorded.given)
    snapshot = snapshot_of(recorded)
    inputs, more = inputs_of(recorded, snapshot)
    arguments, remarks = arguments_of(recorded.given, debug=options.debug)
    remarks = [*filter(None, [code_remark(recorded.given)]), *remarks, *more]
    for line in remarks:
        on_line(line)
    with _interruptible(), _folder(workdir, recorded) as folder:
        require_room(inputs, folder, is_local=recorded.is_local)
        on_line(
            f"replaying {recorded.step} of {recorded.run_id}, which {_ended(recorded)}; "
            f"{len(inputs)} inputs, {_size(sum(each.bytes for each in inputs))}, into {folder}"
        )
        fetched = fetch(inputs, folder, snapshot)
        _lay_out(folder, recorded)
        with reported(f"write to {folder}"):
            said: dict[str, Any] = {"step": recorded.step, "arguments": arguments}
            said |= {"artifacts": dict(recorded.given.artifacts), "debug": options.debug}
            mirror.write(folder, snapshot, {**said, "in_process": options.debug})
        replayed = _run(recorded, folder, debug=options.debug)
    return ReplayResult(
        recorded=recorded,
        replayed=replayed,
        verdict=compare(recorded.record, replayed),
        folder=folder,
        fetched=fetched,
        remarks=tuple(remarks),
    )


def _ended(recorded: RecordedStep) -> str:
    return (
        "did not report its end"
        if recorded.record.ended is None
        else (f"ended as {recorded.record.status}")
    )


def _size(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= _MEGABYTE else f"{size} bytes"


@contextmanager
def _folder(workdir: Path, recorded: RecordedStep) -> Iterator[Path]:
    """Yield a new folder below the workdir; removed where nothing was run in it."""
    name = f"{recorded.run_id}-{recorded.step}-{secrets.token_hex(3)}"
    folder = workdir.absolute() / REPLAYS / name
    try:
        (folder / "tmp").mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}; "
            + ("make it writable" if recorded.is_local else "choose another --workdir")
        ) from None
    try:
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(folder / "tmp", ignore_errors=True)


def _lay_out(folder: Path, recorded: RecordedStep) -> None:
    """Give the step what a run on this machine keeps next to its storage."""
    with reported(f"write to {folder}"):
        if recorded.pinned:
            shutil.copyfile(recorded.pinned, folder / PINNED)
        if recorded.log and recorded.step == EXIT_STEP.name:
            for event in events.read(recorded.log):
                if event.time < recorded.record.began:
                    events.append(folder / local.EVENTS, event)


def _environment(recorded: RecordedStep, folder: Path) -> dict[str, str]:
    # A tracker is told of a run once, and not of its replays.
    left = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    for name in (STOPPING, RUN_ID, RUN_FOLDER, "KFP_POD_NAME"):
        left.pop(name, None)
    here = {
        **signals.parent_environment(),
        **user_code.environment(),
        mirror.VARIABLE: str(folder),
        events.VARIABLE: str(folder / local.EVENTS),
        "TMPDIR": str(folder / "tmp"),
    }
    if recorded.given.on_this_machine:
        here |= {RUN_ID: recorded.run_id, RUN_FOLDER: str(folder)}
    if recorded.given.in_pod and recorded.step == RESOLVE:
        # Some of what it refuses is wrong in a pod alone.
        here["KFP_POD_NAME"] = _POD
    return {**left, **here}


def _run(recorded: RecordedStep, folder: Path, *, debug: bool) -> StepEnd | None:
    command = [sys.executable, "-m", "pipelines.replay.child", str(folder)]
    # A debugger needs the terminal, whose Ctrl-C would reach the step as well: it gets none.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if debug else ())
    try:
        child = subprocess.Popen(
            command,
            env=_environment(recorded, folder),
            stdin=None if debug else subprocess.DEVNULL,
            # Standard output is that of the command.
            stdout=sys.stderr.fileno() if _has_descriptor() else subprocess.DEVNULL,
            start_new_session=not debug,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        child.wait()
    except BaseException:
        _end(child)
        raise
    finally:
        if not debug:
            _kill_group(child)
    course = [
        each
        for each in events.read(folder / local.EVENTS)
        if isinstance(each, StepBegin | StepEnd) and each.step == recorded.step
    ]
    if not course:
        raise UserError(
            f"{recorded.step} could not be started again (exit code {child.returncode}): the lines "
            "above say why"
        )
    return course[-1] if isinstance(course[-1], StepEnd) else None


def _has_descriptor() -> bool:
    try:
        sys.stderr.fileno()
    except (OSError, ValueError):
        return False
    return True


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        with signals.on_interrupt(_interrupt):
            yield
    except KeyboardInterrupt:
        raise RunInterruptedError("interrupted; the replay is stopped") from None


def _interrupt() -> NoReturn:
    raise KeyboardInterrupt


def _end(child: subprocess.Popen[Any]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _kill_group(child: subprocess.Popen[Any]) -> None:
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def metrics_of(result: ReplayResult) -> Mapping[str, Any]:
    """Return the figures that the replay has measured."""
    return dict(result.replayed.metrics) if result.replayed else {}

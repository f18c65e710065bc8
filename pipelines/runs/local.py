"""Runs on this machine: `run`, `train` and `prepare`.

A run is a folder below the workdir and a process in which KFP's local runner works; this process
follows the events that the steps write.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from flotilla.components.in_use import publish_code
from flotilla.components.records.record import STOPPING
from flotilla.components.records.run_store import RUN_FOLDER, RUN_ID
from flotilla.pipelines.runs.outcome import RunResult, add_full_disk, judge_outcome
from flotilla.pipelines.runs.settings import Sections, Settings, assignments_of
from flotilla.trainer import events, storage
from flotilla.trainer.cluster import child_process
from flotilla.trainer.cluster.process import require_gpus
from flotilla.trainer.code.bundle import Bundle
from flotilla.trainer.config.form import to_local_form
from flotilla.trainer.config.load import load_config, override, parse_value
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import AttemptBegin, Event, Interrupted
from flotilla.trainer.events.run_state import RunState
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest
from flotilla.trainer.storage.uri import require_uri
from flotilla.trainer.tracking import tracker

if TYPE_CHECKING:
    from flotilla.trainer.preflight.proposal import Proposal

OnEvent = Callable[[Event], None]
GivenConfig = Config | Mapping[str, Any] | str | Path | None

_SOURCE = "data.source"
DEFAULT_CONFIG = Path("configs/digits.yaml")
CONFIG = "config.json"
EVENTS = "events.jsonl"
# How often the events of a run are read: often enough for a progress bar.
LOOK_SECONDS = 0.2
_PIPELINES = ("run", "prepare", "train")


class Loaded(NamedTuple):
    """A configuration, and what it was proposed by where files were named in place of it."""

    config: Config
    proposal: Proposal | None = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What to run on this machine.

    Attributes:
        pipeline: `run`, `prepare` or `train`.
        config: a configuration, its YAML file, a mapping, files to learn from (a path, a URI or a
            pattern), or None: that of the run to resume, else `configs/digits.yaml` in the current
            folder, else the defaults of every key.
        settings: `section.key=value` texts laid over the configuration.
        workdir: the folder below which everything is written.
        resume: id of a run to resume; None for a new one.
        dataset: URI of a published dataset to train on, or empty.
        code: folder of the user's modules, which the run gets as they are now, or empty.
        label: column of the files that is to be predicted, or several.
    """

    pipeline: str = "run"
    config: GivenConfig = None
    settings: Sequence[str] = ()
    workdir: str | Path = "runs"
    resume: str | None = None
    dataset: str = ""
    code: str | Path = ""
    label: str | Sequence[str] = ""

    def __post_init__(self) -> None:
        """Refuse what cannot be run; raises `ConfigError`."""
        if self.pipeline not in _PIPELINES:
            raise ConfigError(f"pipeline {self.pipeline!r} is none of {', '.join(_PIPELINES)}")
        if self.dataset and self.pipeline != "train":
            raise ConfigError(f"dataset {self.dataset!r}: only `train` trains on a given dataset")
        if self.dataset:
            require_uri("dataset", self.dataset)

    def load(self) -> Loaded:
        """Return the checked configuration; raises `ConfigError`."""
        config = self.config
        if config is None and self.resume is not None:
            saved = saved_config(Path(self.workdir), self.resume)
            return Loaded(load_config(saved, self.settings))
        return loaded(config, self.settings, self.label)

    def target(self) -> tuple[str, dict[str, str]]:
        """Return a name of `flotilla.pipelines.training.PIPELINES`, and its further arguments."""
        return ("train_on", {"dataset": self.dataset}) if self.dataset else (self.pipeline, {})


def run(
    config: GivenConfig = None,
    *,
    settings: Settings = (),
    workdir: str | Path = "runs",
    resume: str | None = None,
    code: str | Path = "",
    label: str | Sequence[str] = "",
    on_event: OnEvent | None = None,
    **sections: Unpack[Sections],
) -> RunResult:
    """Run the whole pipeline on this machine, to its end.

    In the main thread SIGINT and SIGTERM end the run with a last checkpoint; from any other thread
    or process `cancel` does.

    Args:
        config: a configuration, its YAML file, a mapping, files to learn from, or None for the
            default; see `RunOptions`.
        settings: laid over the configuration: a mapping, nested or with dotted keys, or
            `section.key=value` texts.
        workdir: the folder below which everything is written.
        resume: id of a run to resume; None for a new one.
        code: folder of your own modules, which the run gets as they are now; see `submit`.
        label: column of the files that is to be predicted, or several.
        on_event: called with every event as it comes, in this thread.
        sections: of the configuration, laid over `settings`.

    Raises:
        UserError: nothing was started; the message says why. A run that fails is returned.

    Example:
        result = flotilla.run("configs/digits.yaml", training={"steps": 200})
        result.status, result.metrics["accuracy"], result.report
    """
    options = RunOptions(
        config=config, settings=assignments_of(settings, sections), workdir=workdir, resume=resume,
        code=code, label=label,
    )  # fmt: skip
    return execute(start(options), *options.target(), on_event)


def train(
    config: GivenConfig = None,
    *,
    settings: Settings = (),
    workdir: str | Path = "runs",
    dataset: str = "",
    resume: str | None = None,
    code: str | Path = "",
    label: str | Sequence[str] = "",
    on_event: OnEvent | None = None,
    **sections: Unpack[Sections],
) -> RunResult:
    """Train on the dataset at URI `dataset`; without one it is prepared first. See `run`.

    Example:
        dataset = flotilla.prepare("configs/digits.yaml").artifacts["dataset"]
        flotilla.train("configs/digits.yaml", dataset=dataset, training={"steps": 200})
    """
    options = RunOptions(
        pipeline="train", config=config, settings=assignments_of(settings, sections),
        workdir=workdir, resume=resume, dataset=dataset, code=code, label=label,
    )  # fmt: skip
    return execute(start(options), *options.target(), on_event)


def prepare(
    config: GivenConfig = None,
    *,
    settings: Settings = (),
    workdir: str | Path = "runs",
    code: str | Path = "",
    label: str | Sequence[str] = "",
    on_event: OnEvent | None = None,
    **sections: Unpack[Sections],
) -> RunResult:
    """Download, split, shard and publish the dataset. See `run`.

    Example:
        flotilla.prepare("configs/digits.yaml", data={"shards": 4}).artifacts["dataset"]
    """
    options = RunOptions(
        pipeline="prepare", config=config, settings=assignments_of(settings, sections),
        workdir=workdir, code=code, label=label,
    )  # fmt: skip
    return execute(start(options), *options.target(), on_event)


def configuration(
    config: GivenConfig, settings: Sequence[str], label: str | Sequence[str] = ""
) -> Config:
    """Return a configuration with `settings` laid over it; raises `ConfigError`.

    It may be files to learn from as well, and `label` their column that is to be predicted.
    Relative paths in a file are relative to it, all others to the working folder.
    """
    return loaded(config, settings, label).config


def form_configuration(
    config: GivenConfig, settings: Sequence[str], label: str | Sequence[str] = ""
) -> Config:
    """Return the defaults of a form: those of a file, or of every key where there is none."""
    if config is None and not label:
        return load_config(None, settings)
    return configuration(config, settings, label)


def loaded(config: GivenConfig, settings: Sequence[str], label: str | Sequence[str] = "") -> Loaded:
    """Return a configuration, or that which is proposed for files; see `configuration`."""
    labels = [label] if isinstance(label, str) and label else [*label]
    of_label = [f"data.label={json.dumps(labels, ensure_ascii=False)}"] if labels else []
    if isinstance(config, Mapping):
        return Loaded(load_config(None, (*assignments_of(config), *of_label, *settings)))
    if isinstance(config, Config):
        return Loaded(override(config, [*of_label, *settings]))
    if config is None:
        # The last one counts.
        given = [each.partition("=") for each in settings]
        sources = [value for key, _, value in given if key.strip() == _SOURCE and value.strip()]
        if sources:
            config = str(parse_value(sources[-1], _SOURCE))
        elif labels:
            raise ConfigError("--label: name the files that have the column as well")
    if config is not None:
        # It takes a tenth of a second to load, which a typo does without.
        from flotilla.trainer.preflight.proposal import is_source, propose  # noqa: PLC0415

        if not is_source(config):
            return Loaded(load_config(config, [*of_label, *settings], rebases=True))
        proposal = propose(config, labels, settings)
        return Loaded(proposal.config, proposal)
    default = DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None
    return Loaded(load_config(default, settings, rebases=True))


def list_runs(workdir: Path) -> dict[str, float]:
    """Return the runs below `workdir`, and when each was begun or resumed; raises `UserError`."""
    try:
        folders = os.listdir(workdir)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"cannot read {workdir}: {error.strerror}") from None
    found: dict[str, float] = {}
    # Any other is no run of ours: a line of a table cannot show it.
    for name in filter(str.isprintable, folders):
        # One of them may be damaged, or whatever else.
        for file in (CONFIG, EVENTS):
            with suppress(OSError):
                found.setdefault(name, os.lstat(workdir / name / file).st_mtime)
    return found


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """One run on this machine.

    Attributes:
        config: the configuration, with a storage root.
        lock: descriptor of a file that is locked until the run, or this process, has ended.
        begin: bytes in the file of events before those of this start, of which `RunBegin` is first.
        bundle: of the user's modules, where this start has published one.
        written: the file with the configuration that was proposed for files, if one was.
        saved: what `config.json` says once training has begun; a refused resume changes nothing.
    """

    run_id: str
    folder: Path
    config: Config
    lock: int
    begin: int
    saved: str
    bundle: Bundle | None = None
    written: Path | None = None

    def save_config(self) -> None:
        """Write `config.json`, from which a resume takes what it is not given."""
        with suppress(OSError):
            (self.folder / CONFIG).write_text(self.saved, encoding="utf-8")


def start(options: RunOptions) -> LocalRun:
    """Lay out the folder of a run; raises `ConfigError`."""
    require_current_folder()
    (config, proposal), workdir, bundle = options.load(), Path(options.workdir), None
    if options.resume is None and not options.dataset:
        # It takes a tenth of a second to load, which what watches runs does without.
        from flotilla.trainer.preflight.check import require_source  # noqa: PLC0415

        require_source(config.data)
    if options.pipeline != "prepare" and config.cluster.launcher == "local":
        require_gpus(config)
    if options.code:
        config, bundle = publish_code(config, options.code, find_root(config, workdir))
    resume = options.resume
    laid = (
        new_run(config, workdir) if resume is None else lay_out_resumed_run(config, workdir, resume)
    )
    written = _written(proposal, laid.folder) if proposal else None
    return replace(laid, bundle=bundle, written=written)


def _written(proposal: Proposal, folder: Path) -> Path:
    """Write the configuration that gives the same run next to what the run writes."""
    path = folder / proposal.file_name
    try:
        path.write_text(proposal.text(folder), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return path


def require_current_folder() -> None:
    """Raise a `ConfigError` where it was removed: the steps import the user's modules from it."""
    storage.uri_of(Path())


def new_run(config: Config, workdir: Path, run_id: str = "") -> LocalRun:
    """Lay out a run below `workdir`, of a new id when empty; raises `ConfigError` if it cannot."""
    return _laid_out(config, workdir, run_id or run_name(config))


def run_name(config: Config) -> str:
    """Return a name for a run that no other run has."""
    return f"{config.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def lay_out_resumed_run(config: Config, workdir: Path, run_id: str) -> LocalRun:
    """Lay out the existing run `run_id` to resume it; raises `ConfigError` if there is none."""
    check_run_id(workdir, run_id)
    return _laid_out(config, workdir, run_id)


def saved_config(workdir: Path, run_id: str) -> Path:
    """Return the file with the configuration that a run was started with."""
    check_run_id(workdir, run_id)
    return workdir / run_id / CONFIG


def check_run_id(workdir: Path, run_id: str) -> None:
    """Raise a `ConfigError` unless `run_id` is a run below `workdir`."""
    runs = list_runs(workdir)
    if run_id not in runs:
        # By the stamp after the name.
        newest = max(runs, key=lambda each: each.split("-")[-3:], default="")
        known = nearest(run_id, runs) or (f" (newest: {newest})" if newest else "")
        raise ConfigError(f"no run {run_id!r} below {workdir}{known}")


def find_root(config: Config, workdir: Path) -> str:
    """Return the URI below which a run on this machine publishes."""
    return config.storage.root or storage.uri_of(workdir)


def _laid_out(config: Config, workdir: Path, run_id: str) -> LocalRun:
    folder = workdir.absolute() / run_id
    root = find_root(config, workdir)
    placed = config.model_copy(update={"storage": config.storage.model_copy(update={"root": root})})
    try:
        # The runner leaves a folder of every step in the temporary directory.
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begin = events.begin_again(folder / EVENTS, run_id)
        saved = config.model_dump_json(indent=2)
        if (folder / CONFIG).exists():
            # The time at which the run was last begun.
            os.utime(folder / CONFIG)
        else:
            (folder / CONFIG).write_text(saved, encoding="utf-8")
    except BlockingIOError:
        raise ConfigError(
            f"run {run_id} is still running; wait for its end, or cancel it"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder}: {error.strerror}; choose another --workdir"
        ) from None
    return LocalRun(
        run_id=run_id, folder=folder, config=placed, lock=lock, begin=begin, saved=saved
    )


def execute(
    run: LocalRun, pipeline: str, extra: Mapping[str, str], on_event: OnEvent | None = None
) -> RunResult:
    """Run `pipeline` (a name of `flotilla.pipelines.training.PIPELINES`) to its end.

    In the main thread, where Python delivers signals, SIGINT and SIGTERM end it with a last
    checkpoint; a second one ends it at once. `extra` are further arguments of the pipeline.
    """
    tracked = tracker.LocalRun(run.config, run.run_id, run.folder / EVENTS, on_event)
    child = _started(run, pipeline, {**to_local_form(run.config), **extra})
    try:
        with _interrupts(child) as interrupts:
            state = _follow(run, child, tracked.hear)
    finally:
        _signal_group(child, signal.SIGKILL)
        child.wait()
        shutil.rmtree(run.folder / "tmp", ignore_errors=True)
        os.close(run.lock)
    if child.returncode == -signal.SIGTERM:
        # The request came before the child could handle it.
        state.take(_interrupted(run))
    result = judge_outcome(state, child.returncode, interrupted=bool(interrupts))
    if result.status not in ("failed", "interrupted") and result.step_of("checkpoint"):
        run.save_config()
    result = replace(result, run_id=run.run_id, folder=run.folder)
    result = add_full_disk(result, run.folder)
    tracked.end(result.status, result.message)
    return result


def _interrupted(run: LocalRun) -> Interrupted:
    event = Interrupted()
    with suppress(OSError):
        events.append(run.folder / EVENTS, event)
    return event


def _started(run: LocalRun, pipeline: str, arguments: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    try:
        (run.folder / "arguments.json").write_text(json.dumps(arguments), encoding="utf-8")
        log = (run.folder / "pipeline.log").open("ab")
    except OSError as error:
        raise UserError(f"cannot write to {run.folder}: {error.strerror}") from None
    with log:
        return child_process.start(
            "flotilla.pipelines.runs.local_child",
            pipeline,
            str(run.folder),
            *(("resumed",) if run.begin else ()),
            env=_environment(run),
            stdout=log,
            stderr=subprocess.STDOUT,
            # A session of its own: an interrupt reaches it once, from here, not from the terminal.
            start_new_session=True,
        )


def _environment(run: LocalRun) -> dict[str, str]:
    own = {
        events.VARIABLE: str(run.folder / EVENTS),
        RUN_ID: run.run_id,
        RUN_FOLDER: str(run.folder),
        "TMPDIR": str(run.folder / "tmp"),
    }
    found = child_process.environment(own)
    # It may still have the interrupt of another run.
    found.pop(STOPPING, None)
    return found


def _follow(run: LocalRun, child: subprocess.Popen[bytes], on_event: OnEvent) -> RunState:
    state = RunState()
    running = True
    with events.Follower(run.folder / EVENTS, run.begin) as follower:
        while running:
            try:
                child.wait(timeout=LOOK_SECONDS)
                running = False
            except subprocess.TimeoutExpired:
                pass
            for event in follower.new():
                if isinstance(event, AttemptBegin):
                    run.save_config()
                on_event(event)
                state.take(event)
    return state


@contextmanager
def _interrupts(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """End the run by SIGTERM at the first interrupt, by SIGKILL at the second; yield what came."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return

    def handle(number: int, _frame: FrameType | None) -> None:
        seen.append(number)
        _signal_group(child, signal.SIGTERM if len(seen) == 1 else signal.SIGKILL)

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)

"""Local runs: `run`, `train` and `prepare`.

A run has a folder below the workdir and a child process with KFP's local runner. The parent process
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from flotilla.components.in_use import publish_code
from flotilla.components.launchers import ENGINES, require_shared
from flotilla.components.records.record import STOPPING
from flotilla.components.records.run_store import RUN_FOLDER, RUN_ID
from flotilla.pipelines.runs.outcome import RunResult, add_full_disk, judge_outcome
from flotilla.pipelines.runs.unsent import sending_unsent
from flotilla.pipelines.settings import Sections, Settings, make_assignments
from flotilla.trainer import events, storage
from flotilla.trainer.cluster import child_process
from flotilla.trainer.cluster.process import require_gpus
from flotilla.trainer.code import Bundle
from flotilla.trainer.config.form import to_local_form
from flotilla.trainer.config.load import load_config, override, parse_value
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import AttemptBegin, Event, Interrupted
from flotilla.trainer.events.run_state import RunState
from flotilla.trainer.runtime.errors import ConfigError, UserError, nearest
from flotilla.trainer.runtime.signals import handle_interrupts
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
# Seconds between two reads of a run's events: short enough for a progress bar.
LOOK_SECONDS = 0.2
_PIPELINES = ("run", "prepare", "train")


class Loaded(NamedTuple):
    """A configuration, and the `proposal` that it comes from if the user gave data files."""

    config: Config
    proposal: Proposal | None = None


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a local run.

    Attributes:
        pipeline: `run`, `prepare` or `train`.
        config: a configuration, its YAML file, a mapping, or data files to learn from (a path, a
            URI or a pattern). None means the first that exists of: the configuration of the run to
            resume, the data files in the setting `data.source`, `configs/digits.yaml` in the
            current folder, and the defaults.
        settings: `section.key=value` strings that override the configuration.
        workdir: the folder below which everything is written.
        resume: id of a run to resume; None for a new one.
        dataset: URI of a published dataset to train on, or empty.
        code: folder of the user's modules, which are copied for the run, or empty.
        label: name of the column to predict, or several names.
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
        """Raise a `ConfigError` for an invalid combination of options."""
        if self.pipeline not in _PIPELINES:
            raise ConfigError(f"pipeline {self.pipeline!r} is not one of {', '.join(_PIPELINES)}")
        if self.dataset and self.pipeline != "train":
            raise ConfigError(
                f"dataset {self.dataset!r}: only the pipeline `train` accepts a dataset"
            )
        if self.dataset:
            require_uri("dataset", self.dataset)

    def load(self) -> Loaded:
        """Return the validated configuration. Raises `ConfigError`."""
        config = self.config
        if config is None and self.resume is not None:
            saved = config_file(Path(self.workdir), self.resume)
            return Loaded(load_config(saved, self.settings))
        return loaded(config, self.settings, self.label)

    def target(self) -> tuple[str, dict[str, str]]:
        """Return the pipeline's name in `pipelines.training.PIPELINES`, and its extra arguments."""
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
    """Run the whole pipeline on this machine, and wait until it ends.

    In the main thread, SIGINT and SIGTERM stop the run after a last checkpoint. From any other
    thread or process, use `cancel`.

    Args:
        config: a configuration, its YAML file, a mapping, files to learn from, or None for the
            default; see `RunOptions`.
        settings: overrides of the configuration: a mapping, nested or with dotted keys, or
            `section.key=value` strings.
        workdir: the folder below which everything is written.
        resume: id of a run to resume, or None for a new one.
        code: folder of your modules, which are copied for the run; see `submit`.
        label: name of the column to predict, or several names.
        on_event: called with every event, in this thread.
        sections: sections of the configuration; they override `settings`.

    Raises:
        UserError: the run could not be started. A run that fails does not raise an error.

    Example:
        result = flotilla.run("configs/digits.yaml", training={"steps": 200})
        result.status, result.metrics["accuracy"], result.report
    """
    options = RunOptions(
        config=config, settings=make_assignments(settings, sections), workdir=workdir,
        resume=resume, code=code, label=label,
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
    """Train on the dataset at URI `dataset`, or prepare one first. See `run`.

    Example:
        dataset = flotilla.prepare("configs/digits.yaml").artifacts["dataset"]
        flotilla.train("configs/digits.yaml", dataset=dataset, training={"steps": 200})
    """
    options = RunOptions(
        pipeline="train", config=config, settings=make_assignments(settings, sections),
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
        pipeline="prepare", config=config, settings=make_assignments(settings, sections),
        workdir=workdir, code=code, label=label,
    )  # fmt: skip
    return execute(start(options), *options.target(), on_event)


def configuration(
    config: GivenConfig, settings: Sequence[str], label: str | Sequence[str] = ""
) -> Config:
    """Return a configuration with `settings` applied. Raises `ConfigError`.

    `config` may also name data files, with `label` as the column to predict. Relative paths in a
    configuration file are relative to that file, all others to the working directory.
    """
    return loaded(config, settings, label).config


def form_configuration(
    config: GivenConfig, settings: Sequence[str], label: str | Sequence[str] = ""
) -> Config:
    """Return the configuration with a form's default values: `config`, or all defaults."""
    if config is None and not label:
        return load_config(None, settings)
    return configuration(config, settings, label)


def loaded(config: GivenConfig, settings: Sequence[str], label: str | Sequence[str] = "") -> Loaded:
    """Return a configuration, with its proposal if `config` names data; see `configuration`."""
    labels = [label] if isinstance(label, str) and label else [*label]
    of_label = [f"data.label={json.dumps(labels, ensure_ascii=False)}"] if labels else []
    if isinstance(config, Mapping):
        return Loaded(load_config(None, (*make_assignments(config), *of_label, *settings)))
    if isinstance(config, Config):
        return Loaded(override(config, [*of_label, *settings]))
    if config is None:
        # If there is more than one source, use the last one, as for every setting.
        given = [each.partition("=") for each in settings]
        sources = [value for key, _, value in given if key.strip() == _SOURCE and value.strip()]
        if sources:
            config = str(parse_value(sources[-1], _SOURCE))
        elif labels:
            raise ConfigError("--label needs training data: pass the files that contain the column")
    if config is not None:
        # Import this here, because the import takes 0.1 s and the errors above should come first.
        from flotilla.trainer.preflight.proposal import is_source, propose  # noqa: PLC0415

        if not is_source(config):
            return Loaded(load_config(config, [*of_label, *settings], rebases=True))
        proposal = propose(config, labels, settings)
        return Loaded(proposal.config, proposal)
    default = DEFAULT_CONFIG if DEFAULT_CONFIG.exists() else None
    return Loaded(load_config(default, settings, rebases=True))


def list_runs(workdir: Path) -> dict[str, float]:
    """Return the Unix time of each run's last start, keyed by run id. Raises `UserError`."""
    try:
        folders = os.listdir(workdir)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise UserError(f"cannot read {workdir}: {error.strerror}") from None
    found: dict[str, float] = {}
    # Skip folders whose names are not printable, because the id of a run is always printable.
    for name in filter(str.isprintable, folders):
        for file in (CONFIG, EVENTS):
            with suppress(OSError):
                found.setdefault(name, os.lstat(workdir / name / file).st_mtime)
    return found


@dataclass(frozen=True, kw_only=True)
class LocalRun:
    """One run on this machine.

    Attributes:
        config: the configuration, with a storage root.
        lock: descriptor of a file that is locked until the run or this process has ended.
        begin: the offset in the events file at which this start wrote its `RunBegin`.
        bundle: the bundle of the user's modules, if this start has published one.
        written: the file with the configuration that was proposed for data files, if any.
        parent: the id of the sweep that a trial belongs to, or empty.
        saved: the content of `config.json`. A resumed run writes it only once training has begun,
            so that a refused resume changes nothing.
    """

    run_id: str
    folder: Path
    config: Config
    lock: int
    begin: int
    saved: str
    bundle: Bundle | None = None
    written: Path | None = None
    parent: str = ""

    def save_config(self) -> None:
        """Write `config.json`, from which a resumed run takes missing settings."""
        with suppress(OSError):
            (self.folder / CONFIG).write_text(self.saved, encoding="utf-8")


def start(options: RunOptions) -> LocalRun:
    """Check the options and create the folder of a run. Raises `ConfigError`."""
    require_current_folder()
    (config, proposal), workdir, bundle = options.load(), Path(options.workdir), None
    if options.resume is None and not options.dataset:
        # Import this here, because the import is slow and commands that watch runs do not need it.
        from flotilla.trainer.preflight.check import require_source  # noqa: PLC0415

        require_source(config.data)
    if options.pipeline != "prepare" and config.cluster.launcher == "local":
        require_gpus(config)
    elif options.pipeline != "prepare" and config.cluster.launcher in ENGINES:
        require_shared(config, find_root(config, workdir))
    if options.code:
        config, bundle = publish_code(config, options.code, find_root(config, workdir))
    if options.resume is not None:
        check_run_id(workdir, options.resume)
    laid = new_run(config, workdir, options.resume or "")
    written = _write_proposal(proposal, laid.folder) if proposal else None
    return replace(laid, bundle=bundle, written=written)


def _write_proposal(proposal: Proposal, folder: Path) -> Path:
    path = folder / proposal.file_name
    try:
        path.write_text(proposal.text(folder), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    return path


def require_current_folder() -> None:
    """Raise a `ConfigError` if the current folder, from which steps import, was removed."""
    storage.uri_of(Path())


def run_name(config: Config) -> str:
    """Return a unique name for a run."""
    return f"{config.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def config_file(workdir: Path, run_id: str) -> Path:
    """Return the file with the configuration of a run."""
    check_run_id(workdir, run_id)
    return workdir / run_id / CONFIG


def check_run_id(workdir: Path, run_id: str) -> None:
    """Raise a `ConfigError` if there is no run `run_id` below `workdir`."""
    runs = list_runs(workdir)
    if run_id not in runs:
        # Compare only the timestamp at the end of each id, because the names before it differ.
        newest = max(runs, key=lambda each: each.split("-")[-3:], default="")
        known = nearest(run_id, runs) or (f" (newest: {newest})" if newest else "")
        raise ConfigError(f"no run {run_id!r} below {workdir}{known}")


def find_root(config: Config, workdir: Path) -> str:
    """Return the URI below which a local run publishes."""
    return config.storage.root or storage.uri_of(workdir)


def new_run(config: Config, workdir: Path, run_id: str = "") -> LocalRun:
    """Create a run below `workdir`, or prepare to resume the run `run_id`. Raises `ConfigError`."""
    run_id = run_id or run_name(config)
    folder = workdir.absolute() / run_id
    root = find_root(config, workdir)
    placed = config.model_copy(update={"storage": config.storage.model_copy(update={"root": root})})
    try:
        # Give the run its own temporary directory, because the runner leaves folders in it.
        (folder / "tmp").mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        begin = events.begin_again(folder / EVENTS, run_id)
        saved = config.model_dump_json(indent=2)
        if (folder / CONFIG).exists():
            # Update the modification time, which shows when the run last started.
            os.utime(folder / CONFIG)
        else:
            (folder / CONFIG).write_text(saved, encoding="utf-8")
    except BlockingIOError:
        raise ConfigError(
            f"run {run_id} is still running; wait until it ends, or cancel it"
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
    """Run a pipeline, named as in `flotilla.pipelines.training.PIPELINES`, until it ends.

    In the main thread, where Python delivers signals, the first SIGINT or SIGTERM stops the run
    after a last checkpoint. The second one kills it. `extra` contains further arguments.
    """
    history = run.folder / EVENTS
    tracked = tracker.LocalRun(run.config, run.run_id, history, on_event, parent=run.parent)
    with sending_unsent(run.folder.parent, run.config.storage.root, run.config.name):
        return _execute(run, pipeline, extra, tracked)


def _execute(
    run: LocalRun, pipeline: str, extra: Mapping[str, str], tracked: tracker.LocalRun
) -> RunResult:
    child = _start(run, pipeline, {**to_local_form(run.config), **extra})
    try:
        with _interrupts(child) as interrupts:
            state = _follow(run, child, tracked.hear)
    finally:
        _signal_group(child, signal.SIGKILL)
        child.wait()
        shutil.rmtree(run.folder / "tmp", ignore_errors=True)
        os.close(run.lock)
    if child.returncode == -signal.SIGTERM:
        # The child was stopped before it could write an event about the interrupt, so add one.
        event = Interrupted()
        with suppress(OSError):
            events.append(run.folder / EVENTS, event)
        state.take(event)
    result = judge_outcome(state, child.returncode, interrupted=bool(interrupts))
    if result.status not in ("failed", "interrupted") and result.find_step("checkpoint"):
        run.save_config()
    result = replace(result, run_id=run.run_id, folder=run.folder)
    result = add_full_disk(result, run.folder)
    tracked.end(result.status, result.message)
    return result


def _start(run: LocalRun, pipeline: str, arguments: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    try:
        (run.folder / "arguments.json").write_text(json.dumps(arguments), encoding="utf-8")
        log = (run.folder / "pipeline.log").open("ab")
    except OSError as error:
        raise UserError(f"cannot write to {run.folder}: {error.strerror}") from None
    with log:
        return child_process.start(
            "flotilla.pipelines.runs.local_child",
            pipeline,
            *(("resumed",) if run.begin else ()),
            str(run.folder),
            env=_environment(run),
            stdout=log,
            stderr=subprocess.STDOUT,
            # Start a new session, so that the child does not get Ctrl+C from the terminal. This
            # process forwards it as SIGTERM.
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
    # Unset the variable, which remains set if this process was interrupted in an earlier run.
    found.pop(STOPPING, None)
    return found


def _follow(run: LocalRun, child: subprocess.Popen[bytes], on_event: OnEvent) -> RunState:
    state, running = RunState(), True
    with events.Follower(run.folder / EVENTS, run.begin) as follower:
        while running:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=LOOK_SECONDS)
                running = False
            for event in follower.new():
                if isinstance(event, AttemptBegin):
                    run.save_config()
                on_event(event)
                state.take(event)
    return state


@contextmanager
def _interrupts(child: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Forward the first interrupt as SIGTERM, and later ones as SIGKILL. Yield what was sent."""
    sent: list[int] = []

    def forward() -> None:
        sent.append(signal.SIGKILL if sent else signal.SIGTERM)
        _signal_group(child, sent[-1])

    with handle_interrupts(forward):
        yield sent


def _signal_group(child: subprocess.Popen[bytes], number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, number)

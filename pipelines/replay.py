"""Replays a step with all its stages and its recorded arguments, in a separate process.

Inputs are read in place, and outputs are written to a root below `<workdir>/replays/`.
The stores of the run, the registry and the trackers are not changed. The process is `python -m
flotilla.pipelines.replay FOLDER`.
"""

from __future__ import annotations

import inspect
import json
import os
import pdb
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NoReturn, Unpack

from flotilla.components.image import MARK_OPTION, own_mark, required_arguments
from flotilla.components.launchers import DEBUGGER
from flotilla.components.records import run_store
from flotilla.components.records.record import STOPPING
from flotilla.components.records.step_record import StepRecord, list_tries, read_records
from flotilla.components.table import EVALUATE, EXPORT, PREPARE, STEPS, TRAIN, find_step
from flotilla.pipelines.runs import local, local_status
from flotilla.pipelines.runs.control import select_step
from flotilla.pipelines.runs.kfp_access import Instance, is_named
from flotilla.pipelines.runs.outcome import RunResult, judge_outcome
from flotilla.pipelines.settings import Sections, Settings, make_assignments
from flotilla.trainer import events, storage
from flotilla.trainer.config.form import SETTINGS, WHOLE, parse_settings
from flotilla.trainer.config.load import override
from flotilla.trainer.events import StepBegin, StepEnd
from flotilla.trainer.events.run_state import reduce_events
from flotilla.trainer.promotion import lineage, registry
from flotilla.trainer.runtime import signals, threads, user_code
from flotilla.trainer.runtime.errors import (
    DONE,
    ConfigError,
    RunInterruptedError,
    UserError,
    nearest,
)
from flotilla.trainer.runtime.tensorflow_import import has_gpus
from flotilla.trainer.runtime.user_code import find_frames
from flotilla.trainer.storage.errors import report_errors
from flotilla.trainer.storage.manifest import MANIFEST
from flotilla.trainer.storage.uri import locate
from flotilla.trainer.tracking.addresses import HUB

REPLAYS, CALL, STORAGE, LOG = "replays", "replay.json", "storage", "replay.log"
# Maximum time for a step to stop on request, in seconds.
_END_SECONDS = 20
_MOST_SERVERS, _MOST_NAMED = 2, 3
_WITH_CHAMPION = (PREPARE, EVALUATE, EXPORT)
# The metrics in which the stages of the first step record the version of their data.
_VERSIONS = ("data_version", "version")
OnLine = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """The result of a replay: how its stages ended, its folder, and differences from the run."""

    stages: tuple[StepEnd, ...]
    is_killed: bool
    folder: Path
    remarks: tuple[str, ...]

    @property
    def replayed(self) -> StepEnd | None:
        """How the step ended, or None if it was killed."""
        return None if self.is_killed else self.stages[-1]


def replay(
    recorded: RecordedStep,
    workdir: Path,
    *,
    debug: bool = False,
    quiet: bool = False,
    on_line: OnLine = lambda _line: None,
) -> ReplayResult:
    """Run a step of a run again on this machine, without changing the run.

    `on_line` is called with each remark before the step starts. With `debug`, pdb opens at an
    error. With `quiet`, the output of the step is written to a file in the folder. Raises
    `UserError`, or `RunInterruptedError` on a signal.
    """
    local.require_current_folder()
    require_arguments(recorded.given)
    name = f"{recorded.run_id}-{recorded.step}-{secrets.token_hex(3)}"
    folder = workdir.absolute() / REPLAYS / name
    with report_errors(f"write to {folder}", ConfigError):
        (folder / "tmp").mkdir(parents=True)
        if recorded.pinned:
            shutil.copyfile(recorded.pinned, folder / run_store.PINNED)
    root = storage.uri_of(folder / STORAGE)
    arguments, remarks = adapt_arguments(recorded, root, debug=debug)
    remarks = [*filter(None, [code_remark(recorded.given)]), *remarks]
    remarks += _copy_lookups(recorded, arguments, folder / STORAGE)
    if recorded.stage:
        on_line(f"{recorded.stage} is a stage of {recorded.step}, which is replayed as a whole")
    on_line(f"replaying {recorded.step} of {recorded.run_id} in {folder}")
    for line in remarks:
        on_line(line)
    call = {"step": recorded.step, "arguments": arguments, "debug": debug}
    call |= {"artifacts": dict(recorded.given.artifacts)}
    with report_errors(f"write to {folder}"):
        (folder / CALL).write_text(json.dumps(call, indent=2), encoding="utf-8")
    with (folder / LOG).open("wb") if quiet else nullcontext() as log:
        stages, is_killed = _run(recorded, folder, log, debug=debug)
    shutil.rmtree(folder / "tmp", ignore_errors=True)
    return ReplayResult(stages=stages, is_killed=is_killed, folder=folder, remarks=tuple(remarks))


def evaluate(
    run: str | RunResult,
    *,
    settings: Settings = (),
    workdir: str | Path = "runs",
    root: str = "",
    instance: Instance | None = None,
    **sections: Unpack[Sections],
) -> RunResult:
    """Evaluate the model of a run again, and apply the gate, without changing the run.

    Args:
        run: a run, its id, or its name on an instance.
        settings: changes to the configuration of the run, for example its slices or gate.
        workdir: the folder of local runs, below which the evaluation is written.
        root: the storage root of the run, if the run is not below `workdir`.
        instance: the KFP instance of the run.
        sections: sections of the configuration, which override `settings`.

    Raises:
        UserError: the run has no model, or its model or data were removed.

    Example:
        flotilla.evaluate(result, gate={"min": {"accuracy": 0.99}}).reasons
    """
    folder, named = Path(workdir), run if isinstance(run, str) else run.run_id
    place = [f"storage.root={root}"] if root else []
    found = find(named, EVALUATE, settings=place, workdir=folder, instance=instance or Instance())
    config = run_store.find_config(found.given.arguments)
    if config and (texts := make_assignments(settings, sections)):
        changed = override(config, texts).model_dump_json()
        given = replace(found.given, arguments={**found.given.arguments, "config": changed})
        found = replace(found, given=given)
    done = replay(found, folder, quiet=True)
    state = reduce_events(events.read(done.folder / local.EVENTS))
    result = judge_outcome(state, None if done.is_killed else DONE, interrupted=False)
    return replace(result, run_id=named, folder=done.folder)


def require_arguments(given: run_store.Given) -> None:
    """Raise a `UserError` if the record lacks an argument of this version's step."""
    needed = required_arguments(given.step)
    if missing := sorted(needed - {*given.arguments, *given.artifacts}):
        made_by = given.version
        if made_by == version("kfp-flotilla") and given.commit:
            made_by += f" at commit {given.commit[:12]}"
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        raise UserError(
            f"{given.step} of Flotilla {version('kfp-flotilla')} needs "
            f"{', '.join(missing[:_MOST_NAMED])}{more}, which Flotilla {made_by} did not record; "
            "replay the run with that version"
        )


def adapt_arguments(
    recorded: RecordedStep, root: str, *, debug: bool
) -> tuple[dict[str, Any], list[str]]:
    """Return the step's arguments for this machine, and a remark on each change."""
    arguments = _adapt_record(recorded)
    remarks = list[str]()
    if recorded.step == PREPARE:
        settings = _adapt_settings(arguments[SETTINGS], root, recorded.data_version)
        arguments |= {"storage_root": root, SETTINGS: settings}
    else:
        arguments["root"] = root
    if "config" in arguments:
        try:
            tree = json.loads(arguments["config"])
            if recorded.step == TRAIN:
                remarks = _reduce_cluster(tree, debug=debug)
            tree.get("registry", {})["hub"] = ""
        except (ValueError, TypeError, KeyError, AttributeError):
            raise UserError(
                f"the configuration of {recorded.step} in the run {recorded.run_id} is damaged, "
                "so the step cannot be replayed"
            ) from None
        arguments["config"] = json.dumps(tree)
    return arguments, remarks


def _adapt_settings(settings: Mapping[str, Any], root: str, data_version: str) -> dict[str, Any]:
    """Return the form settings with the data version of the run, and without its model hub."""
    tree = parse_settings(settings)
    tree["registry"] = {**tree.get("registry", {}), "hub": ""}
    if data_version:
        tree["data"] = {**tree.get("data", {}), "version": data_version}
    if WHOLE not in settings:
        return tree
    tree["storage"] = {**tree["storage"], "root": root}
    return {WHOLE: json.dumps(tree)}


def _adapt_record(recorded: RecordedStep) -> dict[str, Any]:
    """Return the recorded arguments, with the URIs below the root changed for this machine."""
    text = json.dumps(dict(recorded.given.arguments))
    (there, _, options), (here, _, own) = (
        uri.partition("?") for uri in (recorded.root, recorded.source)
    )
    if recorded.root and recorded.root != recorded.source:
        text = text.replace(f"{there}/", f"{here}/")
        if options:
            text = text.replace(f"?{options}", f"?{own}" if own else "")
    return dict(json.loads(text))


def _reduce_cluster(tree: dict[str, Any], *, debug: bool) -> list[str]:
    """Reduce the training cluster to what this machine can run. Return the changes."""
    cluster, training, remarks = tree["cluster"], tree["training"], list[str]()
    if cluster["launcher"] != "local":
        cluster["launcher"] = "local"
        remarks.append("training runs as processes on this machine, not as a Kubernetes job")
    if cluster["existing_servers"]:
        cluster["existing_servers"] = False
        remarks.append("the run used existing parameter servers, but the replay starts its own")
    if debug and training["strategy"] != "single":
        remarks.append(
            "the debugger needs a single process, so the replay uses the strategy 'single' instead "
            f"of {training['strategy']!r}"
        )
        training["strategy"] = "single"
        cluster["evaluator"] = False
        # Reset this setting, because a single process aggregates no gradients of other workers.
        training["replicas_to_aggregate"] = 0
    if cluster["gpus_per_worker"] and not has_gpus():
        used = cluster["gpus_per_worker"]
        remarks.append(f"this machine has no GPU, but the run used {used} for each worker")
        cluster["gpus_per_worker"] = 0
    if training["strategy"] == "single":
        return remarks
    most = {"workers": max(threads.usable(), 2), "parameter_servers": _MOST_SERVERS}
    for name, limit in most.items():
        if cluster[name] > limit:
            remarks.append(f"only {limit} of {cluster[name]} {name.replace('_', ' ')} run here")
            cluster[name] = limit
    needed = training["replicas_to_aggregate"]
    training["replicas_to_aggregate"] = min(needed, cluster["workers"])
    return remarks


def code_remark(given: run_store.Given) -> str:
    """Return how the current code differs from the code that ran the step, or an empty string."""
    pairs = {
        "version": (version("kfp-flotilla"), given.version),
        "commit": (lineage.commit()[:12], given.commit[:12]),
    }
    differs = [
        f"{name} {here or 'unknown'} instead of {then}"
        for name, (here, then) in pairs.items()
        if then and here != then
    ]
    here = run_store.digests(run_store.find_config(given.arguments))
    differs += [
        f"module {name} {'has changed' if here.get(name) else 'is not found here'}"
        for name, digest in given.code.items()
        if digest and here.get(name) != digest
    ]
    return f"the code differs: {'; '.join(differs)}" if differs else ""


def _copy_lookups(recorded: RecordedStep, arguments: Mapping[str, Any], folder: Path) -> list[str]:
    """Copy the listing and the champion that the step reads below its root. Return remarks."""
    config = run_store.find_config(arguments)
    if config is None:
        # Copy nothing. The step reports the invalid configuration.
        return []
    if config.data.source and config.data.version:
        with suppress(storage.NotPublished):
            _copy(recorded.source, folder, "listings", config.data.version)
    if recorded.step not in _WITH_CHAMPION:
        return []
    name = config.name
    checkpoint = str(arguments.get("checkpoint", ""))
    try:
        found = (
            registry.opponent(recorded.source, name, checkpoint)
            if checkpoint
            else (registry.champion(recorded.source, name))
        )
        if found is None:
            return []
        version_of = ("registry", "models", name, "versions", storage.name_of(found.uri))
        _copy(recorded.source, folder, *version_of)
        registry.promote(storage.uri_of(folder), name, found.number, after=0, by="replay")
    except UserError as error:
        return [f"the model cannot be compared with the champion: {error}"]
    return [
        f"the replay uses the current champion, version {found.number}; the run may use another"
    ]


def _copy(root: str, folder: Path, *names: str) -> None:
    place = folder.joinpath(*names)
    manifest = storage.fetch(storage.join(root, *names), place)
    (place / MANIFEST).write_bytes(manifest.to_json())


def _environment(recorded: RecordedStep, folder: Path, *, debug: bool) -> dict[str, str]:
    # Remove these variables, because a replay must not notify the trackers.
    left = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    for name in (STOPPING, HUB, "KFP_POD_NAME"):
        left.pop(name, None)
    here = {
        **signals.parent_environment(),
        **user_code.environment(),
        run_store.RUN_ID: recorded.run_id,
        run_store.RUN_FOLDER: str(folder),
        events.VARIABLE: str(folder / local.EVENTS),
        "TMPDIR": str(folder / "tmp"),
        **({DEBUGGER: "1"} if debug else {}),
    }
    if storage.local_path(recorded.source) is None:
        # URIs in manifests have no endpoint option, so pass the endpoint in a variable.
        endpoint = locate(recorded.source).option("endpoint")
        here |= {"AWS_ENDPOINT_URL": endpoint} if endpoint else {}
    return {**left, **here}


def _run(
    recorded: RecordedStep, folder: Path, log: IO[bytes] | None, *, debug: bool
) -> tuple[tuple[StepEnd, ...], bool]:
    """Run the step in a child process.

    Return how its stages ended, and whether the last one was killed.
    """
    # With a debugger, the step shares the terminal and would get Ctrl+C too, so it inherits a
    # blocked SIGINT. Without a debugger, it runs in its own session.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT} if debug else ())
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "flotilla.pipelines.replay", str(folder)],
            env=_environment(recorded, folder, debug=debug),
            stdin=None if debug else subprocess.DEVNULL,
            # Use standard error, because standard output is reserved for the result of the command.
            stdout=log or sys.__stderr__,
            stderr=log,
            start_new_session=not debug,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        with signals.handle_interrupts(_interrupt):
            child.wait()
    finally:
        _end(child, group=not debug)
    course = [
        each for each in events.read(folder / local.EVENTS) if isinstance(each, StepBegin | StepEnd)
    ]
    if not course:
        raise UserError(
            f"the replay of {recorded.step} could not start (exit code {child.returncode}): see "
            "the lines above"
        )
    ends = {each.step: each for each in course if isinstance(each, StepEnd)}
    return tuple(ends.values()), isinstance(course[-1], StepBegin)


def _interrupt() -> NoReturn:
    raise RunInterruptedError("the replay was interrupted")


def _end(child: subprocess.Popen[Any], *, group: bool) -> None:
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_END_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        # Also kill the processes that the step has started.
        (os.killpg if group else os.kill)(child.pid, signal.SIGKILL)


class OutputArtifact:
    """A stand-in for the KFP artifact of a step, because a replay has no KFP UI."""

    def __init__(self, uri: str, path: Path) -> None:
        """Store the URI, and the path of the file that represents the artifact."""
        self.uri, self.path, self.metadata = uri, str(path), dict[str, Any]()

    def log_confusion_matrix(self, *_given: Any) -> None:
        """Do nothing."""

    def log_roc_curve(self, *_given: Any) -> None:
        """Do nothing."""


def main() -> None:
    """Run the step described in the folder `argv[1]`. With `debug`, open a debugger if it fails."""
    folder = Path(sys.argv[1])
    tree = json.loads((folder / CALL).read_text(encoding="utf-8"))
    # Pass the mark of this version, because the run has already checked its own mark.
    sys.argv = [tree["step"], MARK_OPTION, own_mark()]
    try:
        _call(tree["step"], tree["arguments"], tree["artifacts"], folder)
    # Every error is raised again. With `debug`, the debugger opens first.
    except (Exception, SystemExit) as error:
        cause = error.__context__ if isinstance(error, SystemExit) else error
        # Do not open the debugger if the user interrupted the replay.
        if tree["debug"] and cause and not isinstance(cause, RunInterruptedError):
            post_mortem(cause)
        raise


def _call(step: str, arguments: dict[str, Any], artifacts: Mapping[str, Any], folder: Path) -> None:
    place = folder / "artifacts"
    place.mkdir(exist_ok=True)
    given = {**arguments}
    for name, said in artifacts.items():
        given[name] = OutputArtifact(str(said.get("uri", "")), place / name)
        if said.get("tree") is not None:
            (place / name).write_text(json.dumps(said["tree"]), encoding="utf-8")
    # `decision_uri` is an output path, so pass a local file.
    given |= {name: str(place / name) for name in given if name == "decision_uri"}
    call = getattr(import_module(f"flotilla.components.{step}"), step).python_func
    taken = inspect.signature(call).parameters
    call(**{name: value for name, value in given.items() if name in taken})


def post_mortem(error: BaseException) -> None:
    """Open pdb at the innermost frame of the user's code, or where the error was raised."""
    trace: TracebackType | None = None
    for frame, line in reversed(find_frames(error)):
        # Leave out the frames below the user's code, because pdb opens at the last frame.
        trace = TracebackType(trace, frame, frame.f_lasti, line)
    if trace is None:
        return
    debugger = pdb.Pdb(stdin=sys.stdin, stdout=sys.stderr)
    debugger.reset()
    debugger.interaction(None, trace)


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A step of a run: its arguments, and how its stages ended.

    Attributes:
        stages: the records of the stages, in execution order.
        stage: the requested stage, or empty if the step itself was requested.
        root: the storage root that the run used.
        source: the URI at which this machine reads that storage root.
        pinned: the file with the pinned inputs of a local run, or None if there is none.
    """

    run_id: str
    stages: tuple[StepRecord, ...]
    given: run_store.Given
    root: str
    source: str
    pinned: Path | None = None
    stage: str = ""

    @property
    def data_version(self) -> str:
        """The version of the dataset or the listing of files that the step used."""
        said = [each.metrics.get(name) for each in self.stages for name in _VERSIONS]
        return str(next(filter(None, said), ""))

    @property
    def step(self) -> str:
        """The name of the step."""
        return self.given.step


def find(
    run: str, step: str, *, settings: Sequence[str], workdir: Path, instance: Instance
) -> RecordedStep:
    """Find a recorded step on this machine, below `storage.root=URI` in `settings`, or on KFP."""
    # Leave out the exit step, because it computes no result that could be compared.
    rows = [row for row in STEPS if not row.is_exit_step]
    name, _ = select_step(step, rows)
    found = _find(name, run, settings, workdir, instance)
    stage = step.replace("-", "_")
    return replace(found, stage=stage) if stage != found.step else found


def _find(
    name: str, run: str, settings: Sequence[str], workdir: Path, instance: Instance
) -> RecordedStep:
    root = local.configuration(None, settings).storage.root if settings else ""
    if settings and not root:
        raise ConfigError("--set: a replay accepts only storage.root=URI")
    if not root and not instance.endpoint and local_status.is_local(workdir, run):
        return _local(workdir, run, name)
    if not root and not is_named(instance.endpoint):
        local.check_run_id(workdir, run)
    if root:
        if not storage.names(storage.join(root, run, "steps")):
            raise UserError(f"no run {run!r} below {root}{_nearest_run(root, run)}")
        at = storage.join(root, run)
        return _make_step(at, run, name, read_records(at))
    from flotilla.pipelines.runs.kfp_client import connect
    from flotilla.pipelines.runs.kfp_run import find_run

    found = find_run(connect(instance.access()), run)
    if not found.at:
        raise UserError(f"the storage root of the run {run} is unknown: add --set storage.root=URI")
    try:
        # Check that the store can be reached, because its address may be valid only in the cluster.
        storage.names(storage.join(found.at, "steps"))
    except UserError as error:
        raise UserError(
            f"{error}; if the store has another address on this machine, add --set "
            "storage.root=URI, such as minio://BUCKET/FOLDER?endpoint=http://localhost:9000"
        ) from None
    return _make_step(found.at, found.run_id, name, read_records(found.at))


def _nearest_run(root: str, run: str) -> str:
    others = ("registry", "datasets", "listings", "preparing")
    known = [name for name in storage.names(root) if name not in others]
    return nearest(run, known) or (f"; existing: {', '.join(known[-3:])}" if known else "")


def _local(workdir: Path, run: str, step: str) -> RecordedStep:
    folder = (workdir / run).absolute()
    log = folder / local.EVENTS
    records = list_tries(reduce_events(events.read(log)))
    newest = {each.step: each for each in records}
    found = _make_step(storage.uri_of(folder), run, step, list(newest.values()))
    pinned = folder / run_store.PINNED
    # Read from the storage root of the run, which may not be the workdir.
    return replace(found, source=found.root, pinned=pinned if pinned.is_file() else None)


def _make_step(at: str, run: str, step: str, records: Sequence[StepRecord]) -> RecordedStep:
    by_name = {each.step: each for each in records}
    stages = [by_name[each.name] for each in find_step(step).stages if each.name in by_name]
    if not stages:
        begun = ", ".join(f"{each.step} ({each.status})" for each in records) or "none"
        raise UserError(f"the run {run} did not start {step}; the steps that it started: {begun}")
    given, source = run_store.read_given(at, step), storage.parent_of(at)
    named = given.arguments.get("root") or given.arguments.get("storage_root") or ""
    uris = [str(each.get("uri", "")) for each in given.artifacts.values() if isinstance(each, dict)]
    root = source
    with suppress(UserError):
        root = run_store.find_root(str(named), next(filter(None, uris), ""), run)
    return RecordedStep(run_id=run, stages=tuple(stages), given=given, root=root, source=source)


if __name__ == "__main__":
    main()

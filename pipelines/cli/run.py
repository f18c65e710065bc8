"""`flotilla run`, `prepare`, `train`, `replay`, `init` and `configs`: pipelines on this machine."""

from __future__ import annotations

import os
import re
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.pipelines.cli import options as opt
from flotilla.pipelines.cli.completion import complete_examples, complete_steps
from flotilla.pipelines.cli.exit import Answer, answers, output, show_lines, warn
from flotilla.pipelines.runs.kfp_access import Instance
from flotilla.trainer.runtime.errors import FAILED, INTERRUPTED, USAGE, ConfigError, UserError
from flotilla.trainer.runtime.streams import say

if TYPE_CHECKING:
    from flotilla.pipelines.runs.local import LocalRun, RunOptions
    from flotilla.pipelines.runs.outcome import RunResult
    from flotilla.trainer.code import Bundle
    from flotilla.trainer.events import StepResult


@answers
def run(
    config: opt.Config = None,
    label: opt.Label = None,
    assignments: opt.Assignments = None,
    workdir: opt.Workdir = opt.RUNS,
    resume: opt.Resume = None,
    code: opt.Code = None,
) -> Answer:
    """Run the whole pipeline on this machine."""
    return _run("run", config, label, assignments, workdir, code, resume=resume)


@answers
def prepare(
    config: opt.Config = None,
    label: opt.Label = None,
    assignments: opt.Assignments = None,
    workdir: opt.Workdir = opt.RUNS,
    code: opt.Code = None,
) -> Answer:
    """Download, split, shard and publish the dataset."""
    return _run("prepare", config, label, assignments, workdir, code)


@answers
def train(
    config: opt.Config = None,
    label: opt.Label = None,
    assignments: opt.Assignments = None,
    workdir: opt.Workdir = opt.RUNS,
    dataset: opt.Dataset = "",
    resume: opt.Resume = None,
    code: opt.Code = None,
) -> Answer:
    """Train a model, after preparing the dataset if it is not yet published."""
    return _run("train", config, label, assignments, workdir, code, dataset=dataset, resume=resume)


def make_answer(result: RunResult) -> Answer:
    """Return the result of a command that ran a pipeline."""
    steps = {"global_step": result.global_step, "handed_on_step": result.handed_on_step}
    main = result.main_metric
    return Answer(
        status=result.status,
        code=result.exit_code,
        run_id=result.run_id,
        metrics=result.metrics,
        artifacts=result.artifacts,
        message=result.message,
        more={
            "headline": result.headline,
            "notes": result.notes,
            **({"main_metric": main.name, "better": main.better} if main else {}),
            **{name: step for name, step in steps.items() if step is not None},
        },
    )


def _run(
    pipeline: str,
    config: str | None,
    label: list[str] | None,
    assignments: list[str] | None,
    workdir: Path,
    code: Path | None,
    *,
    dataset: str = "",
    resume: str | None = None,
) -> Answer:
    from flotilla.pipelines.cli import display, live
    from flotilla.pipelines.runs import local
    from flotilla.trainer.storage.uri import plain_http_remark

    options = local.RunOptions(
        pipeline=pipeline,
        config=config,
        label=tuple(label or ()),
        settings=tuple(assignments or ()),
        workdir=workdir,
        dataset=dataset,
        resume=resume,
        code=code or "",
    )
    started = local.start(options)
    errors = display.Terminal(stderr=True)
    errors.print(f"run {started.run_id} in {started.folder}")
    if started.written:
        path, drop = shlex.quote(os.path.relpath(started.written)), started.config.data.drop
        left = f" and leaves out the columns {', '.join(drop[:9])}" if drop else ""
        errors.print(f"the configuration is in {path}{left}; repeat it with: flotilla run {path}")
    for line in bundle_lines(started.bundle) if started.bundle else ():
        errors.print(line)
    if remark := plain_http_remark(started.config.storage.root):
        warn(remark)
    with live.Display() as show:
        result = local.execute(started, *options.target(), show)
    with output():
        display.show_result(display.Terminal(), result)
    for line in _closing_lines(options, started, result):
        errors.print(f"flotilla: {line}")
    is_said = bool(result.message) and result.status != "refused"
    display.show_verdict(errors, result, is_said=is_said)
    return make_answer(result)


def bundle_lines(bundle: Bundle) -> list[str]:
    """Return the lines that describe a bundle of the user's modules."""
    files = f"{bundle.files} file{'s' if bundle.files > 1 else ''}"
    return [
        f"code: {files}, {bundle.bytes / 1000:.1f} kB, kept at {bundle.uri}",
        *(f"flotilla: warning: {each}" for each in bundle.remarks),
    ]


_LOG_OF_TASK = re.compile(r" \((\S+), log .*\)$")


def _closing_lines(options: RunOptions, run: LocalRun, result: RunResult) -> list[str]:
    lines = []
    if result.message and result.status != "refused":
        # Do not repeat the status if the message already begins with it.
        is_said = result.message.startswith(result.status)
        # Leave out the path of the task's log, which is printed on a separate line.
        message = _LOG_OF_TASK.sub(r" (\1)", result.message)
        lines.append(message if is_said else f"{result.status}: {message}")
    if result.status == "failed":
        lines += _where_it_failed(options, run, result)
    if remedy := find_remedy(options, run, result):
        lines.append(remedy)
    return lines


def _where_it_failed(options: RunOptions, run: LocalRun, result: RunResult) -> list[str]:
    """Return lines with the failing line of the user's code, the log, and a command to debug."""
    from flotilla.pipelines.runs.local_status import find_failure

    failure = find_failure(run.folder)
    if failure is None:
        return [f"all output is in {run.folder / 'pipeline.log'}"]
    if result.exit_code == USAGE and not failure.frame:
        # A user error needs no more than its message.
        return []
    place = [] if options.workdir == opt.RUNS else ["--workdir", str(options.workdir)]
    replayed = ["flotilla", "replay", run.run_id, failure.step, "--pdb", *place]
    return [
        *([f"at {failure.frame}"] if failure.frame else []),
        f"log: {failure.log} ({shlex.join(['flotilla', 'logs', run.run_id, *place])})",
        f"debug the step with: {shlex.join(replayed)}",
    ]


def find_remedy(options: RunOptions, run: LocalRun, result: RunResult) -> str:
    """Return the line that tells how to resume a run, or an empty string if that is impossible."""
    resume = ["flotilla", options.pipeline, "--workdir", str(options.workdir)]
    resume += ["--resume", run.run_id]
    if options.resume is not None:
        # Repeat the settings, because a resumed run does not record them until training starts.
        resume += [each for text in options.settings for each in ("--set", text)]
        resume += [str(options.config)] if isinstance(options.config, str | Path) else []
        resume += [each for column in options.label for each in ("--label", column)]
    if options.dataset:
        resume += ["--dataset", options.dataset]
    if options.code:
        # Repeat the option to use the current modules. Without it, the run uses the modules it was
        # first started with.
        resume += ["--code", str(options.code)]
    # An interrupted `prepare` cannot be resumed, because it has not published anything.
    if result.exit_code == INTERRUPTED and options.pipeline != "prepare":
        return f"resume with: {shlex.join(resume)}"
    if result.status == "failed" and result.exit_code != USAGE and _has_checkpoint(run):
        return f"after fixing the error, resume with: {shlex.join(resume)}"
    return ""


def _has_checkpoint(run: LocalRun) -> bool:
    from flotilla.trainer import storage
    from flotilla.trainer.checkpoints.index import list_checkpoints

    try:
        uri = storage.join(run.config.storage.root, run.run_id, "checkpoints")
        return bool(list_checkpoints(uri))
    except UserError:
        return False


_KILLED = "the process of the step was killed"
Step = Annotated[str, typer.Argument(metavar="STEP", help="The step or stage, such as train_model.",
    autocompletion=complete_steps)]  # fmt: skip


@answers
@opt.add_instance_options
def replay(
    instance: Instance,
    run: opt.Run,
    step: Step,
    assignments: opt.Assignments = None,
    pdb: Annotated[
        bool, typer.Option("--pdb", help="Open a debugger at the line that raises the error.")
    ] = False,
    workdir: opt.Workdir = opt.RUNS,
) -> Answer:
    """Run a step of a run again on this machine with the same inputs, without changing the run.

    To replay a step of a run on a cluster, add --set storage.root=URI or --endpoint.
    """
    from flotilla.pipelines.replay import find
    from flotilla.pipelines.replay import replay as replayed

    recorded = find(run, step, settings=assignments or (), workdir=workdir, instance=instance)
    result = replayed(recorded, workdir, debug=pdb, on_line=lambda line: say(f"flotilla: {line}"))
    now, folder = result.replayed, str(result.folder)
    before, here = (
        {each.step: each for each in found} for found in (recorded.stages, result.stages)
    )
    for name in {**before, **here}:
        say(f"flotilla: {name} in the run: {_describe_result(before.get(name))}")
        say(f"flotilla: {name} in the replay: {_describe_result(here.get(name))}")
    say(f"flotilla: the output is in {folder}; remove this folder when you are done")
    return Answer(
        status=now.status if now else "failed",
        code=now.exit_code if now else FAILED,
        run_id=recorded.run_id,
        metrics=dict(now.metrics) if now else {},
        message=now.error if now else _KILLED,
        more={
            "step": recorded.step,
            "stages": {
                name: {
                    "recorded": _report_fields(before.get(name)),
                    "here": _report_fields(here.get(name)),
                }
                for name in {**before, **here}
            },
            "folder": folder,
            "remarks": list(result.remarks),
        },
    )


def _report_fields(result: StepResult | None) -> dict[str, Any]:
    fields = ("status", "error", "metrics") if result else ()
    return {each: getattr(result, each) for each in fields}


def _describe_result(result: StepResult | None) -> str:
    if result is None:
        return "no result"
    found = [result.error] if result.error else result.metrics.get("reasons")
    plain = {name: each for name, each in result.metrics.items() if isinstance(each, str | float)}
    words = found or [f"{name} {each}" for name, each in plain.items()]
    return ": ".join(filter(None, [result.status, "; ".join(map(str, words))]))


@answers
def init(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="The training data: a file, a folder, a URI or a pattern."
        ),
    ],
    label: opt.Label = None,
    assignments: opt.Assignments = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            parser=opt.local_path,
            help="The file to write. Default: a name derived from SOURCE.",
        ),
    ] = None,
) -> Answer:
    """Write the configuration that `run` would use for the data, without starting a run."""
    from flotilla.trainer.preflight.proposal import propose

    labels = label or _ask_label(source, assignments or [])
    proposal = propose(source, labels, assignments or ())
    # Resolve the configuration first, to report an error in --set early.
    config = proposal.config
    path = output or Path(proposal.file_name)
    text = proposal.text(path.parent)
    try:
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != text:
            raise ConfigError(f"{path} exists with different content; choose another file with -o")
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
    for note in proposal.notes:
        say(f"flotilla: {note}")
    say(f"wrote {path}; run it with: flotilla run {path}")
    return Answer(artifacts={"config": str(path)}, more={"config": config.model_dump(mode="json")})


def _ask_label(source: str, settings: list[str]) -> list[str]:
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or "--json" in sys.argv:
        return []
    from flotilla.trainer.preflight.proposal import list_columns
    from flotilla.trainer.runtime.masking import printable

    names, perhaps = list_columns(source, settings)
    if not names or any(each.startswith("data.label=") for each in settings):
        return []
    say(f"columns of {source}: {printable(', '.join(names))}")
    return [typer.prompt("column to predict", default=perhaps, err=True)]


@answers
def configs(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The name of an example to copy into the current folder.",
            autocompletion=complete_examples,
        ),
    ] = "",
) -> Answer:
    """List the example configurations, or copy one into the current folder."""
    from flotilla.pipelines.cli.display import Table
    from flotilla.pipelines.configs import copy_example, list_examples

    if name:
        path = copy_example(name)
        say(f"wrote {path}")
        return Answer(artifacts={"config": str(path)}, more={"path": str(path)})
    found = list_examples()
    rows = [{"name": each.name, "what it is": each.description} for each in found]
    show_lines(Table(rows=rows, words=("what it is",)))
    return Answer(more={"configs": [asdict(each) for each in found]})

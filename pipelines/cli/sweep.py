"""`flotilla sweep`, which trains trials of a configuration and promotes the best."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.pipelines.cli import options as opt
from flotilla.pipelines.cli.completion import complete_assignments, complete_sweeps
from flotilla.pipelines.cli.exit import Answer, answers, show_lines, warn
from flotilla.trainer.runtime.errors import INTERRUPTED, ConfigError
from flotilla.trainer.runtime.streams import say

if TYPE_CHECKING:
    from flotilla.pipelines.cli.display import Table
    from flotilla.pipelines.runs.outcome import RunResult
    from flotilla.pipelines.sweeps import SweepOptions
    from flotilla.pipelines.sweeps.local import SweepResult
    from flotilla.trainer.sweeps.sweep import Result, Sweep, Trial

# The options of a `SweepOptions`, then the others, in the order of the help.
_OPTIONS = {
    "config": opt.Config,
    "label": opt.Label,
    "assignments": Annotated[list[str] | None, typer.Option(
        "--set", metavar="SECTION.KEY=VALUES", autocompletion=complete_assignments,
        help="The values of a key, such as a,b,c. With --random, --tpe or --auto also a range: "
        "low..high or low..high:log. A single value applies to all trials. May be repeated.")],
    "random": Annotated[int | None, typer.Option(metavar="N",
        help="Draw the settings of N trials at random. Without --random, --tpe or --auto, the "
        "sweep tries all combinations of values.")],
    "tpe": Annotated[int | None, typer.Option(metavar="N",
        help="Run N trials with settings that TPE chooses from earlier results. Default with "
        "--auto: 20, or at most 200 with --minutes.")],
    "seed": Annotated[int | None, typer.Option(
        help="The seed for --random, --tpe and --auto. Default: 0.")],
    "halving": Annotated[bool, typer.Option("--asha",
        help="Train all trials for a few steps, continue with the best third, and repeat.")],
    "auto": Annotated[bool, typer.Option("--auto",
        help="Search predefined hyperparameter ranges with --tpe and, if possible, --asha.")],
    "minutes": Annotated[float | None, typer.Option(metavar="N",
        help="Stop all trials after N minutes, then evaluate the best one.")],
    "metric": Annotated[str, typer.Option(metavar="NAME",
        help="The validation metric that ranks the trials. Default: the main metric of the "
        "learning task.")],
    "better": Annotated[str, typer.Option(metavar="WORD",
        help="Whether higher or lower values of --metric are better. Default: inferred from the "
        "metric's name.")],
    "parallel": Annotated[int, typer.Option(metavar="N",
        help="The maximum number of trials that run at the same time.")],
    "workdir": opt.Workdir,
    "resume": Annotated[str | None, typer.Option("--resume", metavar="SWEEP",
        help="The id of a sweep to resume.", autocompletion=complete_sweeps)],
    "to_compile": Annotated[bool, typer.Option("--compile",
        help="Write a pipeline for a KFP instance instead of running the sweep.")],
    "output_file": Annotated[Path | None, typer.Option("-o", "--output", metavar="FILE",
        parser=opt.local_path, help="The file that --compile writes. Default: build/sweep.yaml.")],
    "image": opt.Image,
}  # fmt: skip
_OTHERS = ("workdir", "resume", "to_compile", "output_file", "image")


@answers
@opt.add_pod_options
@partial(opt.group_options, parameter="given", options=_OPTIONS)
def sweep(pods: Any, given: dict[str, Any]) -> Answer:
    """Train trials with different settings, and evaluate, export and register the best one."""
    from flotilla.pipelines.step_settings import NO_SETTINGS
    from flotilla.pipelines.sweeps import SweepOptions

    workdir, resume, to_compile, output_file, image = (given.pop(name) for name in _OTHERS)
    settings, label = (tuple(given.pop(name) or ()) for name in ("assignments", "label"))
    options = SweepOptions(**given, settings=settings, label=label)
    if resume is not None and to_compile:
        raise ConfigError(
            "--resume continues a sweep on this machine and cannot be combined with --compile"
        )
    if to_compile:
        return _compile(options, output_file or Path("build/sweep.yaml"), image, pods)
    if output_file or image or pods != NO_SETTINGS:
        option = "-o" if output_file else "--image" if image else "a setting of the pods"
        raise ConfigError(f"{option} applies only to --compile; omit the option or add --compile")
    return _run(options, workdir, resume)


def _compile(options: SweepOptions, file: Path, image: str, pods: Any) -> Answer:
    from flotilla.components.image import IMAGE
    from flotilla.pipelines.compile import image_remark
    from flotilla.pipelines.sweeps.pipeline import compile_sweep
    from flotilla.trainer.runtime.json_records import tree_of

    planned = compile_sweep(options, file, image, pods)
    say(f"wrote {file}: {len(planned.trials)} trials, {options.parallel} at a time")
    if remark := image_remark(image or IMAGE):
        warn(remark)
    words = ["flotilla", "submit", *filter(None, [planned.source])]
    words += [word for text in planned.fixed for word in ("--set", text)]
    say(f"start the sweep with: {shlex.join([*words, '--file', str(file)])}")
    trials = [tree_of(each) for each in planned.trials]
    return Answer(artifacts={"pipeline": str(file)}, more={"trials": trials})


def _run(options: SweepOptions, workdir: Path, resume: str | None) -> Answer:
    from flotilla.pipelines.cli.display import Terminal, show_verdict
    from flotilla.pipelines.cli.live import SweepDisplay
    from flotilla.pipelines.sweeps import local

    begun = local.begin(options, workdir, resume)
    errors = Terminal(stderr=True)

    errors.print(f"sweep {begun.sweep.sweep_id} of {_describe_plan(begun.sweep)} in {begun.folder}")
    try:
        with SweepDisplay(begun.sweep) as live:
            result = local.execute(
                begun,
                options.parallel,
                lambda sweep, trial: live.trial(trial, _line(sweep, trial)),
                live,
            )
    finally:
        begun.close()
    show_lines(_table(begun.sweep))
    for line in _closing_lines(begun.sweep, result, workdir):
        errors.print(f"flotilla: {line}")
    if result.measured:
        show_verdict(errors, result)
    return _answer(local.make_result(begun.sweep, result))


def _describe_plan(sweep: Sweep) -> str:
    minutes = f" by time ({sweep.minutes:g} min)" if sweep.minutes else ""
    return f"{'at most ' if minutes else ''}{len(sweep.trials)} trials{minutes}"


def _line(sweep: Sweep, trial: Trial) -> str:
    what = ", ".join(f"{k.rpartition('.')[2]}={value}" for k, value in trial.settings.items())
    of = "" if sweep.minutes else f"/{len(sweep.trials)}"
    begin = f"trial {trial.number}{of} ({what})"
    steps = f" to {sweep.rungs[trial.rung]} steps" if sweep.rungs[trial.rung] else ""
    if trial.status == "running":
        return f"{begin} ...{steps}"
    from flotilla.trainer.events.progress import duration

    if trial.status == "done" and trial.last:
        value = _value(sweep, trial.last)
        return f"{begin} done{steps}: {value} after {duration(trial.seconds)}"
    return f"{begin} {trial.status}{f': {trial.error}' if trial.error else ''}"


def _value(sweep: Sweep, result: Result) -> str:
    from flotilla.trainer.report.wording import round_value, spell_metric

    return f"{spell_metric(result.by.metric or sweep.objective.metric)} {round_value(result.value)}"


def _closing_lines(sweep: Sweep, result: RunResult, workdir: Path) -> list[str]:
    from flotilla.pipelines.sweeps.local import BEST
    from flotilla.trainer.sweeps.page import PAGE
    from flotilla.trainer.sweeps.sweep import find_best

    best = sweep.chosen or find_best(sweep.trials, sweep.objective)
    lines = [f"trial {each.number} failed: {each.error}" for each in sweep.trials if each.error]
    if best and best.last:
        so_far = "" if sweep.best else " so far"
        found = f"trial {best.number} ({_value(sweep, best.last)}), run {best.run_id}"
        lines.append(f"best{so_far}: {found}")
        lines.append(f"configuration of the best trial: {workdir / sweep.sweep_id / BEST}")
        lines.append(f"all trials: {workdir / sweep.sweep_id / PAGE}")
        lines += [f"repeat the best trial with: {again}"] if (again := sweep.command()) else []
    if result.status not in ("blessed", "done") and not result.reasons:
        message = result.message
        is_said = not message or message.startswith(result.status)
        lines.append(message or result.status if is_said else f"{result.status}: {message}")
    if result.exit_code == INTERRUPTED or result.status == "failed":
        words = ["flotilla", "sweep", "--workdir", str(workdir), "--resume", sweep.sweep_id]
        before = "" if result.exit_code == INTERRUPTED else "after fixing the error, "
        lines.append(f"{before}resume with: {shlex.join(words)}")
    return lines


def _answer(result: SweepResult) -> Answer:
    from flotilla.trainer.runtime.json_records import tree_of

    best = result.best
    return Answer(
        status=result.status,
        code=result.exit_code,
        run_id=best.run_id if best else "",
        metrics=result.metrics,
        artifacts=result.artifacts,
        message=result.message,
        more={
            "sweep": result.sweep_id,
            "best": best.number if best else 0,
            "command": result.sweep.command(),
            "trials": [tree_of(each) for each in result.sweep.trials],
        },
    )


def _table(sweep: Sweep) -> Table:
    from rich.text import Text

    from flotilla.pipelines.cli.display import Table
    from flotilla.trainer.sweeps.sweep import make_table

    heads, rows = make_table(sweep)
    colours = {"failed": "red", "interrupted": "yellow", "best": "bold green"}
    drawn = [
        {
            head: Text(cell, colours.get(row[-1], "default"))
            for head, cell in zip(heads, row, strict=True)
        }
        for row in rows
    ]
    numbers = (heads[0], *heads[len(sweep.keys) + 1 : -1])
    return Table(rows=drawn, spare=("duration", "steps"), right=numbers)

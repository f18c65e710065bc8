"""The command line `flotilla`: parses arguments and calls commands.

A command is a function in the file of its group, and an option is a parameter of the function.
Options that several commands share are in `options.py`.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.completion import (  # type: ignore[attr-defined]
    completion_init,
    get_completion_script,
)

from flotilla.pipelines.cli.doctor import check, doctor
from flotilla.pipelines.cli.exit import Answer, answers, fail, finish, output
from flotilla.pipelines.cli.kfp import reschedule, schedule, submit, unschedule, upload
from flotilla.pipelines.cli.models import checkpoint, models
from flotilla.pipelines.cli.options import (
    TRAINED,
    Assignments,
    Config,
    FormConfig,
    Label,
    Workdir,
    add_pod_options,
    local_path,
)
from flotilla.pipelines.cli.predict import predict
from flotilla.pipelines.cli.retention import COLLECTED, gc
from flotilla.pipelines.cli.run import RUNS, init, prepare, replay, run, train
from flotilla.pipelines.cli.runs import cancel, list_runs, logs, status
from flotilla.pipelines.cli.sweep import sweep
from flotilla.trainer.runtime.environment import check_variables
from flotilla.trainer.runtime.errors import DONE, FAILED, USAGE, UserError
from flotilla.trainer.runtime.masking import find_credentials, printable
from flotilla.trainer.runtime.output.streams import discard, mask_libraries, say

if TYPE_CHECKING:
    from flotilla.pipelines.cli.tables import Table
    from flotilla.pipelines.compare import Comparison

app = typer.Typer(
    name="flotilla",
    help="Declarative training pipelines on Kubeflow Pipelines: laptop and cluster alike.",
    # Typer's options guess the shell from the process tree; `completion` takes its name.
    add_completion=False,
    pretty_exceptions_enable=False,
)

ENDED = (
    "--json adds `steps` while the run is running, `global_step` and `handed_on_step` when it has "
    "ended, `main_metric` and `better` where a model was evaluated."
)
COMPLETION_VARIABLE = "_FLOTILLA_COMPLETE"
# A removed option.
PARAMETER = "--parameter"
# Removed commands and their replacements.
REMOVED = {
    "plan": "train for some steps with different numbers of tasks, and see `flotilla compare`"
}


def _print_version(context: typer.Context, is_wanted: bool) -> None:
    if not is_wanted:
        return
    from importlib.metadata import version

    from flotilla.trainer.promotion.lineage import commit

    number, at = version("kfp-flotilla"), commit()
    answer = Answer(
        text=f"flotilla {number}{f' (commit {at})' if at else ''}\n",
        more={"version": number, "commit": at},
    )
    finish(answer, as_json=bool(context.obj))
    raise typer.Exit


@app.callback()
def _flotilla(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version, and the commit where it is known.",
        ),
    ] = False,
) -> None:
    pass


app.add_typer(models, name="models")
app.add_typer(checkpoint, name="checkpoint")
app.command(epilog="--json adds `found`, what the model takes and gives, and `notes`.")(check)
app.command(epilog="--json adds `checks`, an object each.")(doctor)
app.command(epilog=TRAINED)(run)
app.command(epilog="--json adds `config`, what the file says.")(init)
app.command()(prepare)
app.command(epilog=TRAINED)(train)
app.command(epilog="--json adds `rows`, `skipped`, `unsound`, `rows_per_second` and `output`.")(
    predict
)
app.command(epilog="--json adds `trials`, `best` and `command`.")(sweep)


@app.command("compile")
@answers
@add_pod_options
def compile_(
    pods: Any,
    config: FormConfig = None,
    label: Label = None,
    assignments: Assignments = None,
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="FILE", parser=local_path, help="File to write."),
    ] = Path("build/pipeline.yaml"),
    image: Annotated[str, typer.Option(help="Image of all steps; the default when empty.")] = "",
    components: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", parser=local_path, help="Also write one YAML a component here."
        ),
    ] = None,
) -> Answer:
    """Compile the pipeline to the YAML that a KFP instance takes."""
    from flotilla.components.image import IMAGE
    from flotilla.pipelines.compile import compile_all, image_remark
    from flotilla.pipelines.runs.local import form_configuration
    from flotilla.trainer.preflight.check import remark_on_path

    defaults = form_configuration(config, assignments or (), label or ())
    written = compile_all(output, image, components, pods, defaults)
    for path in written.values():
        say(f"wrote {path}")
    for remark in filter(None, [image_remark(image or IMAGE), remark_on_path(defaults.data)]):
        say(f"flotilla: {remark}")
    return Answer(artifacts=written)


@app.command(epilog="--json adds `configs`, an object each, or `path`.")
@answers
def configs(
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="Copy this one into the current folder.")
    ] = "",
) -> Answer:
    """List the example configurations, or copy one into the current folder."""
    from flotilla.pipelines.cli.display import Terminal
    from flotilla.pipelines.cli.tables import Table
    from flotilla.pipelines.configs import copy_example, list_examples

    if name:
        path = copy_example(name)
        say(f"wrote {path}")
        return Answer(artifacts={"config": str(path)}, more={"path": str(path)})
    found = list_examples()
    rows = [{"name": each.name, "what it is": each.description} for each in found]
    with output():
        Terminal().print(Table(rows=rows, words=("what it is",)))
    return Answer(more={"configs": [asdict(each) for each in found]})


@app.command(
    epilog="--json adds `runs`, `comparison` (by group and name a value of each run), and "
    "`main_metric` with the `best` of them."
)
@answers
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Ids of the runs.")],
    workdir: Workdir = RUNS,
) -> Answer:
    """Compare runs side by side."""
    from flotilla.pipelines.cli.display import Terminal
    from flotilla.pipelines.compare import compare as compare_runs

    found = compare_runs(runs, workdir)
    with output():
        Terminal().print(_comparison_table(found))
    more = {"runs": found.runs, "comparison": found.groups}
    return Answer(more={**more, "main_metric": found.main_metric, "best": found.best})


def _comparison_table(found: Comparison) -> Table:
    from rich.text import Text

    from flotilla.pipelines.cli.tables import Table
    from flotilla.trainer.events.progress.durations import duration
    from flotilla.trainer.report.wording import format_value, round_value, spell_metric

    lines = []
    for group, rows in found.groups.items():
        # Loss is measured in training and on the test split.
        before = f"{group}: " if group in ("test", "training") else ""
        after = f": {spell_metric(found.main_metric)}" if group == "next to it" else ""
        for name, row in rows.items():
            texts = [(format_value if group == "settings" else round_value)(each) for each in row]
            if name.startswith("seconds"):
                texts = [duration(each) for each in row]
            if group == "test":
                texts = _format_row(row, found.intervals.get(name))
            cells = [Text(text) for text in texts]
            if group == "test" and name == found.main_metric:
                cells = [
                    Text(f"{cell} best", "bold green") if run in found.best else cell
                    for run, cell in zip(found.runs, cells, strict=True)
                ]
            spelled = re.sub("^seconds", "duration", name)
            head = Text(f"{before}{spelled}{after}")
            lines.append({"": head, **dict(zip(found.runs, cells, strict=True))})
    numbers = {run: f"run {number}" for number, run in enumerate(found.runs, start=1)}
    return Table(rows=lines, right=found.runs, short=numbers)


def _format_row(row: list[Any], intervals: list[Any] | None) -> list[str]:
    """Return the values of a metric, each with its difference from the first."""
    from flotilla.trainer.report.headline import difference
    from flotilla.trainer.report.wording import like, round_value

    cells = []
    for value, interval in zip(row, intervals or [None] * len(row), strict=True):
        places = interval or like(value if isinstance(value, float) else 0.0)
        size = ""
        if isinstance(value, float) and isinstance(row[0], float):
            size = difference(value - row[0], places)
        sign = "+" if size and value > row[0] else "-"
        cells.append(
            f"{round_value(value, places)} ({sign}{size})" if size else round_value(value, places)
        )
    return cells


app.command(epilog=COLLECTED)(gc)


@app.command(epilog="--json adds `manifest`, the job itself.")
@answers
def manifest(config: Config = None, label: Label = None, assignments: Assignments = None) -> Answer:
    """Print the job of a configuration as YAML: a TFJob, or a JobSet."""
    import yaml

    from flotilla.components.launchers import render_job
    from flotilla.pipelines.runs.local import configuration

    tree = render_job(configuration(config, assignments or (), label or ()))
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    if printable(text) != text:
        # With YAML escapes it is the same document.
        text = yaml.safe_dump(tree, sort_keys=False)
    return Answer(more={"manifest": tree}, text=text)


app.command(epilog="--json adds `version`; `newest` in it: whether `submit` takes it by itself.")(
    upload
)
app.command(epilog=f"{TRAINED} All only when the run was waited for.")(submit)
app.command(epilog="--json adds `schedule`.")(schedule)
app.command(epilog="--json adds `schedule`.")(reschedule)
app.command(epilog="--json adds `schedule`.")(unschedule)
app.command("runs", epilog="--json adds `runs`, an object each.")(list_runs)
app.command(epilog=ENDED)(status)
app.command()(logs)
app.command()(cancel)
app.command(epilog="--json adds `step`, `stages`, `folder`, `remarks`.")(replay)


@app.command(epilog="--json adds `script`.")
@answers
def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="SHELL", help="bash, zsh or fish.")
    ],
) -> Answer:
    """Print the script that lets a shell complete commands and options.

    For bash: `flotilla completion bash > ~/.local/share/bash-completion/completions/flotilla`.
    """
    script = get_completion_script(
        prog_name="flotilla", complete_var=COMPLETION_VARIABLE, shell=shell
    )
    return Answer(text=f"{script}\n", more={"script": script})


def call(arguments: list[str]) -> int:
    """Run the command line; return the exit code."""
    as_json = "--json" in arguments
    mask_libraries()
    if arguments[:1] == ["--version"] or arguments[:2] == ["--json", "--version"]:
        # An option of `flotilla` itself, which has no others.
        arguments = ["--version"]
    if wrong := _argument_with_credentials(arguments) or _refuse_removed(arguments):
        return fail(wrong, USAGE, as_json=as_json)
    if COMPLETION_VARIABLE in os.environ:
        completion_init()
    try:
        check_variables()
        code: Any = app(
            arguments or ["--help"], prog_name="flotilla", standalone_mode=False, obj=as_json
        )
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "flotilla")
        words = " ".join(error.format_message().split()).rstrip(".")
        words = words.replace(": Value error, ", ": ")
        return fail(f"{words}; see `{command} --help`", USAGE, as_json=as_json)
    except UserError as error:
        # Typer writes the version while it parses.
        return fail(str(error), error.exit_code, as_json=as_json)
    except OSError as error:
        # Typer prints help itself.
        if error.errno != errno.ENOSPC:
            raise
        discard(sys.stdout)
        return fail(f"cannot write to standard output: {error.strerror}", FAILED, as_json=as_json)
    except SystemExit:
        # Typer raises it when the reader of its help has closed the stream.
        discard(sys.stdout)
        return DONE
    return int(code or DONE)


def _argument_with_credentials(arguments: list[str]) -> str:
    """Return a line that refuses an argument with credentials, or an empty text."""
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        if why := find_credentials(argument):
            name, equals, _ = argument.partition("=")
            option = name if equals and "://" not in name else before
            where = f"{option}: " if option and "://" not in option else ""
            return (
                f"{where}{why}: every user of this machine can read a command line; leave it out, "
                "and give credentials by file or by the environment"
            )
    return ""


def _refuse_removed(arguments: list[str]) -> str:
    """Return a line that refuses a removed command or option, or an empty text."""
    command = next((each for each in arguments if not each.startswith("-")), "")
    if remedy := REMOVED.get(command):
        return f"{command}: removed in 0.2: {remedy}"
    if command in ("submit", "schedule"):
        for each, after in zip(arguments, [*arguments[1:], ""], strict=True):
            option, _, joined = each.partition("=")
            if option == PARAMETER:
                from flotilla.trainer.config.old_parameters import describe_replacement

                given = joined or after
                name = given.partition("=")[0] or given
                return f"{PARAMETER} {name}: {describe_replacement(name)}"
    return ""

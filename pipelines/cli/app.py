"""The command line `flotilla`: the table of commands, and the call of one of them.

A command is a function in the module of its topic. Its parameters are the options of the command.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import typer
from typer.completion import completion_init  # type: ignore[attr-defined]
from typer.core import TyperCommand, TyperGroup

from flotilla.pipelines.cli import kfp, models
from flotilla.pipelines.cli.completion import VARIABLE, completion, rejoin_words
from flotilla.pipelines.cli.exit import Answer, fail, finish, write
from flotilla.pipelines.cli.housekeeping import check, doctor, gc
from flotilla.pipelines.cli.run import configs, init, prepare, replay, run, train
from flotilla.pipelines.cli.runs import cancel, compare, list_runs, logs, open_, status
from flotilla.pipelines.cli.sweep import sweep
from flotilla.trainer.runtime.environment import check_variables
from flotilla.trainer.runtime.errors import DONE, FAILED, USAGE, UserError
from flotilla.trainer.runtime.masking import find_credentials
from flotilla.trainer.runtime.streams import discard, mask_libraries

# The panels of `flotilla --help`, in the order of their first commands.
RUN, CLUSTER, MODELS, DATA, HOUSEKEEPING = (
    "Run on this machine, and inspect runs",
    "Run on a cluster",
    "Models",
    "Data and configuration",
    "Housekeeping",
)
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
_GROUPS = {
    "models": "List, show and promote the registered models.",
    "checkpoint": "Inspect a checkpoint.",
}
_TRAINED = (
    "`headline`, `notes`, `global_step` (the number of updates) and `handed_on_step` (the step of "
    "the checkpoint that training.hand_on selects). If the model was evaluated, it also adds "
    "`main_metric` and `better` (higher or lower)."
)
_ENDED = (
    "`steps` while the run is running, and `global_step` and `handed_on_step` when it has ended. "
    "If a model was evaluated, it also adds `main_metric` and `better`."
)
_COLLECTED = (
    "`removed`, the removed URIs. With --keep-runs or --keep-versions it also adds `planned` (a "
    "list of objects), `bytes` (their total size), and `kept` (the reasons why some old items are "
    "kept)."
)
_COMPARED = (
    "`runs`, `comparison` (the values of all runs by group and name), `main_metric`, and `best`, "
    "the best run."
)
_UPLOADED = "`version`. Its field `newest` tells whether `submit` uses this version by default."


class Command(NamedTuple):
    """A command: its function, its help panel, and the keys that `--json` adds."""

    call: Callable[..., None]
    panel: str | None = None
    adds: str = ""


COMMANDS = {
    "run": Command(run, RUN, _TRAINED),
    "train": Command(train, RUN, _TRAINED),
    "sweep": Command(
        sweep, RUN, "`trials`, `best` (its number) and `command` (to repeat this trial)."
    ),
    "runs": Command(list_runs, RUN, "`runs`, a list of objects."),
    "status": Command(status, RUN, _ENDED),
    "logs": Command(logs, RUN),
    "open": Command(open_, RUN, "`opened`, which tells whether a browser was started."),
    "compare": Command(compare, RUN, _COMPARED),
    "cancel": Command(cancel, RUN),
    "replay": Command(replay, RUN, "`step`, `stages`, `folder` and `remarks`."),
    "compile": Command(kfp.compile_, CLUSTER),
    "upload": Command(kfp.upload, CLUSTER, _UPLOADED),
    "submit": Command(kfp.submit, CLUSTER, f"{_TRAINED} These keys are present only with --wait."),
    "schedule": Command(kfp.schedule, CLUSTER, "`schedule`."),
    "reschedule": Command(kfp.reschedule, CLUSTER, "`schedule`."),
    "unschedule": Command(kfp.unschedule, CLUSTER, "`schedule`."),
    "manifest": Command(kfp.manifest, CLUSTER, "`manifest`, the manifest of the job as an object."),
    "predict": Command(
        models.predict, MODELS, "`rows`, `skipped`, `unsound`, `rows_per_second` and `output`."
    ),
    "models list": Command(models.list_models, adds="`models`, a list of objects."),
    "models show": Command(models.show_model, adds="`model`, with its lineage and promotions."),
    "models promote": Command(models.promote_model, adds="the numbers `version` and `promotion`."),
    "models rollback": Command(models.roll_back, adds="the numbers `version` and `promotion`."),
    "checkpoint show": Command(
        models.show_checkpoint, adds="`checkpoint`, with its `variables` and `parts`."
    ),
    "init": Command(init, DATA, "`config`, the content of the file."),
    "check": Command(check, DATA, "`found` (the inputs and outputs of the model) and `notes`."),
    "prepare": Command(prepare, DATA),
    "configs": Command(configs, DATA, "`configs` (a list of objects), or `path`."),
    "doctor": Command(doctor, HOUSEKEEPING, "`checks`, a list of objects."),
    "gc": Command(gc, HOUSEKEEPING, _COLLECTED),
    "completion": Command(completion, HOUSEKEEPING, "`script`."),
}
# Two examples of each command, which begin with its name.
_EXAMPLES = """
flotilla run
flotilla run churn.csv --label churn --set training.steps=500
flotilla train churn.yaml --set training.strategy=single
flotilla train --resume digits-20260101-120000-1a2b
flotilla sweep churn.yaml --auto --minutes 30
flotilla sweep --set training.optimizer.learning_rate=1e-4..1e-2:log --tpe 20
flotilla runs --limit 50
flotilla runs --endpoint https://kfp.example.com --experiment flotilla
flotilla status digits-20260101-120000-1a2b
flotilla status digits-20260101-120000-1a2b --json
flotilla logs digits-20260101-120000-1a2b -f
flotilla logs digits-20260101-120000-1a2b --step train_model --task worker-0
flotilla open digits-20260101-120000-1a2b
flotilla open nightly-churn --endpoint https://kfp.example.com
flotilla compare digits-20260101-120000-1a2b digits-20260102-120000-3c4d
flotilla compare digits-20260101-120000-1a2b digits-20260102-120000-3c4d --json
flotilla cancel digits-20260101-120000-1a2b
flotilla cancel nightly-churn --endpoint https://kfp.example.com
flotilla replay digits-20260101-120000-1a2b train_model --pdb
flotilla replay nightly-churn evaluate_model --endpoint https://kfp.example.com
flotilla compile churn.yaml --image registry.example.com/flotilla:1
flotilla compile -o pipeline.yaml --components components --memory 16Gi
flotilla upload --endpoint https://kfp.example.com
flotilla upload churn.yaml --image registry.example.com/flotilla:1 --gpus 1
flotilla submit churn.yaml --endpoint https://kfp.example.com --wait
flotilla submit --set training.steps=5000 --experiment nightly
flotilla schedule churn.yaml --cron '0 3 * * *' --timezone Europe/Berlin
flotilla schedule churn.yaml --every 6h --name churn-often --latest
flotilla reschedule churn
flotilla reschedule churn --image registry.example.com/flotilla:2
flotilla unschedule churn
flotilla unschedule churn --cancel
flotilla manifest churn.yaml --set cluster.launcher=jobset
flotilla manifest churn.yaml --set cluster.workers=4 --json
flotilla predict churn new.csv -o answers.csv --columns customer
flotilla predict churn@3 's3://bucket/new/*.parquet' -o answers.parquet
flotilla models list
flotilla models list churn --root s3://bucket/ml
flotilla models show churn
flotilla models show churn 3 --json
flotilla models promote churn 3
flotilla models promote churn 3 --root s3://bucket/ml
flotilla models rollback churn
flotilla models rollback churn --root s3://bucket/ml
flotilla checkpoint show digits-20260101-120000-1a2b
flotilla checkpoint show s3://bucket/ml/digits-20260101-120000-1a2b/checkpoints
flotilla init churn.csv --label churn
flotilla init 's3://bucket/clicks/{DATE}' --label clicked -o clicks.yaml
flotilla check churn.yaml
flotilla check churn.csv --label churn --set model.name=mlp
flotilla prepare churn.yaml
flotilla prepare churn.csv --label churn --set data.shards=16
flotilla configs
flotilla configs digits.yaml
flotilla doctor churn.yaml
flotilla doctor --kubernetes --endpoint https://kfp.example.com -n team-a
flotilla gc
flotilla gc --keep-runs 30d --keep-versions 5 --dry-run
flotilla completion bash > ~/.local/share/bash-completion/completions/flotilla
flotilla completion fish > ~/.config/fish/completions/flotilla.fish
"""


def find_examples(words: str) -> list[str]:
    """Return the examples of a command."""
    return [each for each in _EXAMPLES.splitlines() if f"{each} ".startswith(f"flotilla {words} ")]


class _PlainFlags:
    """A command or group whose help shows no type for flags, because they take no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters, including the help option."""
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found


class Group(_PlainFlags, TyperGroup):
    """A group of commands."""


class _Explained(_PlainFlags, TyperCommand):
    """A command whose help ends with examples."""

    examples: Sequence[str] = ()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, then the examples without a frame or line wrapping."""
        super().format_help(ctx, formatter)
        write("".join([" Examples:\n\n", *(f"   {each}\n" for each in self.examples)]))


def add_commands(app: typer.Typer) -> None:
    """Add all commands of the table to the command line."""
    groups = {name: typer.Typer(help=text, cls=Group) for name, text in _GROUPS.items()}
    for words, row in COMMANDS.items():
        group, _, name = words.rpartition(" ")
        explained = type("Explained", (_Explained,), {"examples": find_examples(words)})
        epilog = f"--json adds {row.adds}" if row.adds else None
        parent = groups[group] if group else app
        parent.command(name, cls=explained, epilog=epilog, rich_help_panel=row.panel)(row.call)
    for name, each in groups.items():
        app.add_typer(each, name=name, rich_help_panel=MODELS)


app = typer.Typer(
    name="flotilla",
    help="Declarative training pipelines on Kubeflow Pipelines, on a laptop or a cluster.",
    cls=Group,
    context_settings=HELP_OPTIONS,
    # Typer's own completion options guess the shell from the process tree. The command `completion`
    # takes the shell's name instead.
    add_completion=False,
    pretty_exceptions_enable=False,
)

# A removed option of `submit` and `schedule`. The error message names its replacement.
PARAMETER = "--parameter"
REMOVED = {
    "plan": (
        "instead, train for some steps with different numbers of tasks, and compare the runs with "
        "`flotilla compare`"
    )
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
            help="Print the version, and the commit if it is known.",
        ),
    ] = False,
) -> None:
    pass


add_commands(app)


def call(arguments: list[str]) -> int:
    """Run the command line, and return the exit code."""
    as_json = "--json" in arguments
    mask_libraries()
    if arguments[:1] == ["--version"] or arguments[:2] == ["--json", "--version"]:
        # Remove `--json`, which typer would reject, because only the commands have this option.
        arguments = ["--version"]
    if wrong := _argument_with_credentials(arguments) or _refuse_removed(arguments):
        return fail(wrong, USAGE, as_json=as_json)
    if VARIABLE in os.environ:
        rejoin_words(os.environ)
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
        # An environment variable is invalid, or `--version` cannot write to standard output.
        return fail(str(error), error.exit_code, as_json=as_json)
    except OSError as error:
        # Typer prints help texts itself, so report here that it cannot write to standard output.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        discard(sys.stdout)
        return fail(f"cannot write to standard output: {error.strerror}", FAILED, as_json=as_json)
    except SystemExit as ended:
        # For a completion, the exit code tells fish whether to complete file names.
        code = ended.code if VARIABLE in os.environ else DONE
        # Outside completion, typer exits only when the reader of a help text has closed the stream.
        if VARIABLE not in os.environ:
            discard(sys.stdout)
    return int(code or DONE)


def _argument_with_credentials(arguments: list[str]) -> str:
    for argument, before in zip(arguments, ["", *arguments], strict=False):
        if why := find_credentials(argument):
            name, equals, _ = argument.partition("=")
            option = name if equals and "://" not in name else before
            where = f"{option}: " if option and "://" not in option else ""
            return (
                f"{where}{why}: every user of this machine can read a command line; pass "
                "credentials in a file or in the environment instead"
            )
    return ""


def _refuse_removed(arguments: list[str]) -> str:
    command = next((each for each in arguments if not each.startswith("-")), "")
    if remedy := REMOVED.get(command):
        return f"{command}: removed in 0.2; {remedy}"
    if command in ("submit", "schedule"):
        for each, after in zip(arguments, [*arguments[1:], ""], strict=True):
            option, _, joined = each.partition("=")
            if option == PARAMETER:
                from flotilla.pipelines.settings import describe_replacement

                given = joined or after
                name = given.partition("=")[0] or given
                return f"{PARAMETER} {name}: no longer supported; {describe_replacement(name)}"
    return ""

"""The table of commands: each command's function, help panel, examples and JSON keys.

A command is a function in the module of its topic. Its parameters are the command's options.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from flotilla.pipelines.cli.completion.shell import completion
from flotilla.pipelines.cli.doctor import check, doctor
from flotilla.pipelines.cli.exit import write
from flotilla.pipelines.cli.kfp import (
    compile_,
    manifest,
    reschedule,
    schedule,
    submit,
    unschedule,
    upload,
)
from flotilla.pipelines.cli.models import (
    list_models,
    predict,
    promote_model,
    roll_back,
    show_checkpoint,
    show_model,
)
from flotilla.pipelines.cli.retention import gc
from flotilla.pipelines.cli.run import configs, init, prepare, replay, run, train
from flotilla.pipelines.cli.runs import cancel, compare, list_runs, logs, open_, status
from flotilla.pipelines.cli.sweep import sweep

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
    "--json adds `headline`, `notes`, `global_step` (the number of updates) and `handed_on_step` "
    "(the step of the checkpoint that training.hand_on selects). If the model was evaluated, it "
    "also adds `main_metric` and `better` (higher or lower)."
)
_ENDED = (
    "--json adds `steps` while the run is running, and `global_step` and `handed_on_step` when it "
    "has ended. If a model was evaluated, it also adds `main_metric` and `better`."
)
_COLLECTED = (
    "--json adds `removed`, the removed URIs. With --keep-runs or --keep-versions it also adds "
    "`planned` (a list of objects), `bytes` (their total size), and `kept` (the reasons why some "
    "old items are kept)."
)
_UPLOADED = (
    "--json adds `version`. Its field `newest` tells whether `submit` uses this version by default."
)
_PROMOTED = "--json adds the numbers `version` and `promotion`."
_SCHEDULED = "--json adds `schedule`."


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: its function, its help panel, its examples and its keys in `--json`."""

    call: Callable[..., None]
    examples: tuple[str, str]
    panel: str | None = None
    adds: str | None = None


COMMANDS = {
    "run": Command(
        call=run,
        panel=RUN,
        adds=_TRAINED,
        examples=(
            "flotilla run",
            "flotilla run churn.csv --label churn --set training.steps=500",
        ),
    ),
    "train": Command(
        call=train,
        panel=RUN,
        adds=_TRAINED,
        examples=(
            "flotilla train churn.yaml --set training.strategy=single",
            "flotilla train --resume digits-20260101-120000-1a2b",
        ),
    ),
    "sweep": Command(
        call=sweep,
        panel=RUN,
        adds="--json adds `trials`, `best` (its number) and `command` (to repeat this trial).",
        examples=(
            "flotilla sweep churn.yaml --auto --minutes 30",
            "flotilla sweep --set training.optimizer.learning_rate=1e-4..1e-2:log --tpe 20",
        ),
    ),
    "runs": Command(
        call=list_runs,
        panel=RUN,
        adds="--json adds `runs`, a list of objects.",
        examples=(
            "flotilla runs --limit 50",
            "flotilla runs --endpoint https://kfp.example.com --experiment flotilla",
        ),
    ),
    "status": Command(
        call=status,
        panel=RUN,
        adds=_ENDED,
        examples=(
            "flotilla status digits-20260101-120000-1a2b",
            "flotilla status digits-20260101-120000-1a2b --json",
        ),
    ),
    "logs": Command(
        call=logs,
        panel=RUN,
        examples=(
            "flotilla logs digits-20260101-120000-1a2b -f",
            "flotilla logs digits-20260101-120000-1a2b --step train_model --task worker-0",
        ),
    ),
    "open": Command(
        call=open_,
        panel=RUN,
        adds="--json adds `opened`, which tells whether a browser was started.",
        examples=(
            "flotilla open digits-20260101-120000-1a2b",
            "flotilla open nightly-churn --endpoint https://kfp.example.com",
        ),
    ),
    "compare": Command(
        call=compare,
        panel=RUN,
        adds="--json adds `runs`, `comparison` (the values of all runs by group and name), "
        "`main_metric`, and `best`, the best run.",
        examples=(
            "flotilla compare digits-20260101-120000-1a2b digits-20260102-120000-3c4d",
            "flotilla compare digits-20260101-120000-1a2b digits-20260102-120000-3c4d --json",
        ),
    ),
    "cancel": Command(
        call=cancel,
        panel=RUN,
        examples=(
            "flotilla cancel digits-20260101-120000-1a2b",
            "flotilla cancel nightly-churn --endpoint https://kfp.example.com",
        ),
    ),
    "replay": Command(
        call=replay,
        panel=RUN,
        adds="--json adds `step`, `stages`, `folder` and `remarks`.",
        examples=(
            "flotilla replay digits-20260101-120000-1a2b train_model --pdb",
            "flotilla replay nightly-churn evaluate_model --endpoint https://kfp.example.com",
        ),
    ),
    "compile": Command(
        call=compile_,
        panel=CLUSTER,
        examples=(
            "flotilla compile churn.yaml --image registry.example.com/flotilla:1",
            "flotilla compile -o pipeline.yaml --components components --memory 16Gi",
        ),
    ),
    "upload": Command(
        call=upload,
        panel=CLUSTER,
        adds=_UPLOADED,
        examples=(
            "flotilla upload --endpoint https://kfp.example.com",
            "flotilla upload churn.yaml --image registry.example.com/flotilla:1 --gpus 1",
        ),
    ),
    "submit": Command(
        call=submit,
        panel=CLUSTER,
        adds=f"{_TRAINED} These keys are present only with --wait.",
        examples=(
            "flotilla submit churn.yaml --endpoint https://kfp.example.com --wait",
            "flotilla submit --set training.steps=5000 --experiment nightly",
        ),
    ),
    "schedule": Command(
        call=schedule,
        panel=CLUSTER,
        adds=_SCHEDULED,
        examples=(
            "flotilla schedule churn.yaml --cron '0 3 * * *' --timezone Europe/Berlin",
            "flotilla schedule churn.yaml --every 6h --name churn-often --latest",
        ),
    ),
    "reschedule": Command(
        call=reschedule,
        panel=CLUSTER,
        adds=_SCHEDULED,
        examples=(
            "flotilla reschedule churn",
            "flotilla reschedule churn --image registry.example.com/flotilla:2",
        ),
    ),
    "unschedule": Command(
        call=unschedule,
        panel=CLUSTER,
        adds=_SCHEDULED,
        examples=("flotilla unschedule churn", "flotilla unschedule churn --cancel"),
    ),
    "manifest": Command(
        call=manifest,
        panel=CLUSTER,
        adds="--json adds `manifest`, the manifest of the job as an object.",
        examples=(
            "flotilla manifest churn.yaml --set cluster.launcher=jobset",
            "flotilla manifest churn.yaml --set cluster.workers=4 --json",
        ),
    ),
    "predict": Command(
        call=predict,
        panel=MODELS,
        adds="--json adds `rows`, `skipped`, `unsound`, `rows_per_second` and `output`.",
        examples=(
            "flotilla predict churn new.csv -o answers.csv --columns customer",
            "flotilla predict churn@3 's3://bucket/new/*.parquet' -o answers.parquet",
        ),
    ),
    "models list": Command(
        call=list_models,
        adds="--json adds `models`, a list of objects.",
        examples=("flotilla models list", "flotilla models list churn --root s3://bucket/ml"),
    ),
    "models show": Command(
        call=show_model,
        adds="--json adds `model`, with its lineage and promotions.",
        examples=("flotilla models show churn", "flotilla models show churn 3 --json"),
    ),
    "models promote": Command(
        call=promote_model,
        adds=_PROMOTED,
        examples=(
            "flotilla models promote churn 3",
            "flotilla models promote churn 3 --root s3://bucket/ml",
        ),
    ),
    "models rollback": Command(
        call=roll_back,
        adds=_PROMOTED,
        examples=(
            "flotilla models rollback churn",
            "flotilla models rollback churn --root s3://bucket/ml",
        ),
    ),
    "checkpoint show": Command(
        call=show_checkpoint,
        adds="--json adds `checkpoint`, with its `variables` and `parts`.",
        examples=(
            "flotilla checkpoint show digits-20260101-120000-1a2b",
            "flotilla checkpoint show s3://bucket/ml/digits-20260101-120000-1a2b/checkpoints",
        ),
    ),
    "init": Command(
        call=init,
        panel=DATA,
        adds="--json adds `config`, the content of the file.",
        examples=(
            "flotilla init churn.csv --label churn",
            "flotilla init 's3://bucket/clicks/{DATE}' --label clicked -o clicks.yaml",
        ),
    ),
    "check": Command(
        call=check,
        panel=DATA,
        adds="--json adds `found` (the inputs and outputs of the model) and `notes`.",
        examples=(
            "flotilla check churn.yaml",
            "flotilla check churn.csv --label churn --set model.name=mlp",
        ),
    ),
    "prepare": Command(
        call=prepare,
        panel=DATA,
        examples=(
            "flotilla prepare churn.yaml",
            "flotilla prepare churn.csv --label churn --set data.shards=16",
        ),
    ),
    "configs": Command(
        call=configs,
        panel=DATA,
        adds="--json adds `configs` (a list of objects), or `path`.",
        examples=("flotilla configs", "flotilla configs digits.yaml"),
    ),
    "doctor": Command(
        call=doctor,
        panel=HOUSEKEEPING,
        adds="--json adds `checks`, a list of objects.",
        examples=(
            "flotilla doctor churn.yaml",
            "flotilla doctor --kubernetes --endpoint https://kfp.example.com -n team-a",
        ),
    ),
    "gc": Command(
        call=gc,
        panel=HOUSEKEEPING,
        adds=_COLLECTED,
        examples=("flotilla gc", "flotilla gc --keep-runs 30d --keep-versions 5 --dry-run"),
    ),
    "completion": Command(
        call=completion,
        panel=HOUSEKEEPING,
        adds="--json adds `script`.",
        examples=(
            "flotilla completion bash > ~/.local/share/bash-completion/completions/flotilla",
            "flotilla completion fish > ~/.config/fish/completions/flotilla.fish",
        ),
    ),
}


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

    examples: tuple[str, ...] = ()

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help, then the examples without a frame or line wrapping."""
        super().format_help(ctx, formatter)
        write("".join([" Examples:\n\n", *(f"   {each}\n" for each in self.examples)]))


def add_commands(app: typer.Typer) -> None:
    """Add all commands of the table to the command line."""
    groups = {name: typer.Typer(help=text, cls=Group) for name, text in _GROUPS.items()}
    for words, row in COMMANDS.items():
        group, _, name = words.rpartition(" ")
        explained = type("Explained", (_Explained,), {"examples": row.examples})
        parent = groups[group] if group else app
        parent.command(name, cls=explained, epilog=row.adds, rich_help_panel=row.panel)(row.call)
    for name, each in groups.items():
        app.add_typer(each, name=name, rich_help_panel=MODELS)

"""`flotilla models`, `checkpoint` and `predict`, the commands for trained and registered models."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flotilla.pipelines.cli.completion import (
    complete_model_versions,
    complete_models,
    complete_runs,
    complete_versions,
)
from flotilla.pipelines.cli.exit import Answer, answers, show_lines
from flotilla.pipelines.cli.housekeeping import format_bytes
from flotilla.pipelines.cli.options import RUNS, Root, Workdir, group_options
from flotilla.trainer.runtime.errors import DONE, FAILED, ConfigError
from flotilla.trainer.runtime.streams import say

if TYPE_CHECKING:
    from pathlib import Path

    from flotilla.trainer.checkpoints.index import Contents
    from flotilla.trainer.promotion.registry import Promotion

# The columns that a narrow terminal drops first. The metric matters most, so it stays.
_SPARE = ("constant", "global step", "run", "verdict", "registered")
_TO_THE_MINUTE = len("2026-11-24T02:05")
Name = Annotated[str, typer.Argument(metavar="NAME", help="The name of the model.",
    autocompletion=complete_models)]  # fmt: skip
VersionOrChampion = Annotated[int, typer.Argument(metavar="VERSION", min=0,
    help="The version number. Default: the version of the champion.",
    autocompletion=complete_versions)]  # fmt: skip


@answers
def list_models(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The name of one model. Default: all models.",
            autocompletion=complete_models,
        ),
    ] = "",
    workdir: Workdir = RUNS,
    root: Root = "",
) -> Answer:
    """List the versions of one model or of all models."""
    from flotilla.pipelines import models as registered
    from flotilla.pipelines.cli.display import Table
    from flotilla.trainer.report.headline import describe_constant, main_value

    place = registered.choose_root(root, workdir)
    found = registered.list_models(name, workdir=workdir, root=root)
    rows = [
        {
            "model": each.name,
            "version": str(each.version),
            "champion": "champion" if each.champion else "",
            "verdict": each.verdict,
            "metric": main_value(each.measured),
            "constant": describe_constant(each.measured),
            "registered": each.created[:_TO_THE_MINUTE].replace("T", " "),
            "global step": str(each.global_step),
            "run": each.run_id,
        }
        for each in found
    ]
    right = ("version", "constant", "global step")
    table = Table(rows=rows, spare=_SPARE, right=right, words=("metric",))
    show_lines(table if rows else f"no model is registered below {place}")
    problems = list(dict.fromkeys(each.problem for each in found if each.problem))
    for each in problems:
        say(f"flotilla: {each}")
    return Answer(
        status="failed" if problems else "done",
        code=FAILED if problems else DONE,
        message=problems[0] if problems else "",
        more={"models": [asdict(each) for each in found]},
    )


@answers
def show_model(
    name: Name, version: VersionOrChampion = 0, workdir: Workdir = RUNS, root: Root = ""
) -> Answer:
    """Show a version of a model with its lineage. The default version is the champion."""
    from flotilla.pipelines import models as registered
    from flotilla.pipelines.cli.display import Table, display_path
    from flotilla.trainer import storage
    from flotilla.trainer.report.heading import programs
    from flotilla.trainer.report.headline import headline
    from flotilla.trainer.report.wording import format_value, round_value

    found = registered.show(name, version, workdir=workdir, root=root)
    row = asdict(found.version)
    verdict = "champion" if row["champion"] else "registered"
    facts = {key: row[key] for key in ("name", "version", "measured")} | {"verdict": verdict}
    cells = {
        key.replace("_", " "): round_value(value) if key == "metrics" else format_value(value)
        for key, value in {**row, **found.lineage, "where": display_path(found.uri)}.items()
        if key != "measured"
    }
    table = Table(
        rows=[{"": key, "value": text} for key, text in cells.items()],
        words=("value",),
        has_heads=False,
    )
    made = [
        {"promotion": each.number, "version": each.version, "by": each.by, "created": each.created}
        for each in found.promotions
    ]
    path = storage.local_path(found.uri)
    python = programs(str(path or "model"), found.fields)
    lines = [
        f"promotion {each.number}: version {each.version} by {each.by}, {each.created}"
        for each in found.promotions
    ]
    # Print each line separately, because the console would join the lines of a text.
    for program in [*python.values()][:1]:
        lines += ["", "In Python:", "", *program.split("\n")]
    show_lines(headline(facts), table, *lines)
    model = {**row, "lineage": found.lineage, "promotions": made, "python": python}
    return Answer(artifacts={"model": found.uri}, more={"model": model})


@answers
def promote_model(
    name: Name,
    version: Annotated[
        int,
        typer.Argument(
            metavar="VERSION", min=1, help="The version number.", autocompletion=complete_versions
        ),
    ],
    workdir: Workdir = RUNS,
    root: Root = "",
) -> Answer:
    """Make a version the champion."""
    from flotilla.pipelines import models as registered

    return _answer_promotion(name, registered.promote(name, version, workdir=workdir, root=root))


@answers
def roll_back(name: Name, workdir: Workdir = RUNS, root: Root = "") -> Answer:
    """Make the previous champion the champion again."""
    from flotilla.pipelines import models as registered

    return _answer_promotion(name, registered.rollback(name, workdir=workdir, root=root))


def _answer_promotion(name: str, made: Promotion) -> Answer:
    show_lines(f"{name}: version {made.version} is champion (promotion {made.number})")
    return Answer(more={"version": made.version, "promotion": made.number})


@answers
def show_checkpoint(
    which: Annotated[
        str,
        typer.Argument(
            metavar="URI|RUN",
            help="The URI of a checkpoint or of a folder of checkpoints, or the id of a run.",
            autocompletion=complete_runs,
        ),
    ],
    workdir: Workdir = RUNS,
) -> Answer:
    """Show the variables of a checkpoint, with their row counts, sizes and parts."""
    from flotilla.trainer.checkpoints.index import contents

    found = contents(_checkpoint_uri(which, workdir))
    _draw(found)
    variables = {
        path: {**asdict(each), "rows": each.rows, "bytes": each.bytes}
        for path, each in found.variables.items()
    }
    facts = {**asdict(found), "variables": variables, "parts": list(found.parts)}
    return Answer(artifacts={"checkpoint": found.uri}, more={"checkpoint": facts})


def _checkpoint_uri(which: str, workdir: Path) -> str:
    from flotilla.pipelines.runs.local import config_file, find_root
    from flotilla.trainer import storage
    from flotilla.trainer.config.load import load_config
    from flotilla.trainer.storage.uri import require_uri

    if "://" in which:
        require_uri("URI|RUN", which)
        return which
    root = find_root(load_config(config_file(workdir, which)), workdir)
    return storage.join(root, which, "checkpoints")


def _draw(found: Contents) -> None:
    from flotilla.pipelines.cli.display import Table

    rows = [
        {
            "variable": path,
            "type": f"{each.dtype} [{', '.join(str(size) for size in each.shape)}]",
            "rows": f"{each.rows:,}",
            "size": format_bytes(each.bytes),
            "part": str(each.part),
        }
        for path, each in sorted(found.variables.items())
    ]
    table = Table(rows=rows, spare=("part", "rows", "type"), right=("rows", "size", "part"))
    size = format_bytes(found.bytes)
    older = "the manifest lists no variables, because an older version of Flotilla wrote it"
    show_lines(
        found.uri,
        f"global step {found.global_step}, {size}, published {found.created}",
        f"{len(found.parts)} parts: {', '.join(map(format_bytes, found.parts))}",
        table if rows else older,
    )


_PREDICT = {
    "model": Annotated[str, typer.Argument(metavar="MODEL",
        help="The model: NAME (for its champion), NAME@VERSION or a URI.",
        autocompletion=complete_model_versions)],
    "inputs": Annotated[list[str] | None, typer.Argument(metavar="INPUT...",
        help="The rows: files, folders, patterns or URIs of CSV, JSONL, Parquet, npz or images, or "
        "the URI of a dataset.")],
    "output": Annotated[str, typer.Option("-o", "--output", metavar="FILE",
        help="The file to write (.csv, .jsonl or .parquet), or - for standard output.")],
    "to": Annotated[Literal["csv", "jsonl", "parquet"] | None, typer.Option(
        help="The format of the output. Default: inferred from the file name, or jsonl for "
        "standard output.")],
    "format": Annotated[Literal["csv", "jsonl", "parquet", "tfrecord", "images"] | None,
        typer.Option(help="The format of the input. Default: inferred from the file name.")],
    "split": Annotated[str, typer.Option(metavar="SPLIT",
        help="The split to predict, of the dataset INPUT or, without INPUT, of the dataset that "
        "the model was trained on.")],
    "columns": Annotated[list[str] | None, typer.Option(metavar="NAME,...",
        help="The input columns to copy to the output; '*' copies all.")],
    "batch_size": Annotated[int, typer.Option(min=0,
        help="The number of examples per batch. Default: evaluation.batch_size.")],
    "skip_bad": Annotated[bool, typer.Option("--skip-bad", help="Skip rows that cannot be read.")],
    "workdir": Workdir,
    "root": Root,
}  # fmt: skip


@answers
@partial(group_options, parameter="given", options=_PREDICT, output="-")
def predict(context: typer.Context, given: dict[str, Any]) -> Answer:
    """Predict classes, probabilities or numbers for data of any size."""
    from flotilla.pipelines import predict as predicting
    from flotilla.pipelines.cli.live import Display

    output = given.pop("output") or predicting.STANDARD_OUTPUT
    if output == predicting.STANDARD_OUTPUT and context.obj:
        raise ConfigError("-o: with --json, the rows need an output file; add -o FILE")
    given |= {"columns": ",".join(given["columns"] or ()), "inputs": given["inputs"] or ()}
    given |= {name: given[name] or "" for name in ("to", "format")}
    with Display(f"predict {given['model']}") as show:
        found = predicting.predict(**given, output=output, on_event=show)
    if not found.closed:
        left_out = f", {found.skipped} skipped" if found.skipped else ""
        where = "standard output" if found.output == predicting.STANDARD_OUTPUT else found.output
        say(f"{found.rows} rows{left_out} ({found.rows_per_second:,.0f} rows/s) in {where}")
    more = {name: getattr(found, name) for name in ("rows", "skipped", "unsound", "output")}
    more["rows_per_second"] = round(found.rows_per_second, 1)
    return Answer(artifacts={"model": found.model}, more=more)

"""`flotilla predict`: an exported model on files, or on a split of a dataset."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import typer

from flotilla.pipelines.cli.exit import Answer, answers
from flotilla.pipelines.cli.options import Root, Workdir
from flotilla.pipelines.cli.run import RUNS
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.runtime.output.streams import say

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="NAME (its champion), NAME@VERSION or a URI.")
]
Inputs = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[INPUT...]",
        help="Files, folders, patterns or URIs: CSV, JSONL, Parquet, images; or of a dataset.",
    ),
]
Output = Annotated[
    str,
    typer.Option("-o", "--output", metavar="FILE", help="File to write: .csv, .jsonl or .parquet."),
]
To = Annotated[
    Literal["csv", "jsonl", "parquet"] | None,
    typer.Option(help="Form of the output, where its name does not say it."),
]
From = Annotated[
    Literal["csv", "jsonl", "parquet", "tfrecord", "images"] | None,
    typer.Option("--format", help="Form of the input, where its name does not say it."),
]
Split = Annotated[
    str,
    typer.Option(
        metavar="SPLIT", help="Split of a dataset; that of the model where INPUT is left out."
    ),
]
Columns = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME,...", help="Columns of the input to copy to the rows; '*' for all."),
]
BatchSize = Annotated[
    int, typer.Option(min=0, help="Examples in a batch; as in the evaluation when 0.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out rows that cannot be read.")]


@answers
def predict(
    context: typer.Context,
    model: Model,
    inputs: Inputs = None,
    output: Output = "-",
    to: To = None,
    format_: From = None,
    split: Split = "",
    columns: Columns = None,
    batch_size: BatchSize = 0,
    skip_bad: SkipBad = False,
    workdir: Workdir = RUNS,
    root: Root = "",
) -> Answer:
    """Ask a model about data of any size: classes, probabilities, numbers."""
    from flotilla.pipelines import models
    from flotilla.pipelines import predict as predicting
    from flotilla.pipelines.cli.live import Display

    given = _inputs(inputs, split)
    form = predicting.form_of(output, to or "")
    if output == predicting.STANDARD_OUTPUT and context.obj:
        raise ConfigError("-o: with --json rows need a file: name it by -o")
    if output != predicting.STANDARD_OUTPUT:
        predicting.check_output(output, given)
        output = os.path.abspath(output)
    uri = predicting.model_uri(model, models.root_of(root, workdir))
    request = {
        "model": uri,
        "inputs": given,
        "output": output,
        "form": form,
        "split": split,
        "format": format_ or "",
        "columns": [name for each in columns or () for name in each.split(",") if name],
        "batch_size": batch_size,
        "skip_bad": skip_bad,
    }
    with Display(f"predict {model}") as show:
        found = predicting.predict(request, show)
    if not found.closed:
        left_out = f", {found.skipped} left out" if found.skipped else ""
        where = "standard output" if output == predicting.STANDARD_OUTPUT else output
        say(f"{found.rows} rows{left_out} ({found.rows_per_second:,.0f} rows/s) in {where}")
    summary = ("rows", "skipped", "unsound", "output")
    more: dict[str, Any] = {name: getattr(found, name) for name in summary}
    more["rows_per_second"] = round(found.rows_per_second, 1)
    return Answer(artifacts={"model": uri}, more=more)


def _inputs(inputs: list[str] | None, split: str) -> tuple[str, ...]:
    given = tuple(inputs or ())
    if any(not each.strip() for each in given):
        raise ConfigError("INPUT: one is empty: name a file, a folder or a URI")
    if not given and not split:
        raise ConfigError("INPUT: name files, or a split of the model's own dataset by --split")
    if split and given and (len(given) > 1 or "://" not in given[0]):
        raise ConfigError("INPUT: with --split, name the URI of one dataset, or none")
    return given

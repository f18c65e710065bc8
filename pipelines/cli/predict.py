"""`flotilla predict`: applies an exported model to files, or to a split of a dataset."""

from __future__ import annotations

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
    typer.Option(help="Format of the output, where its name does not show it."),
]
From = Annotated[
    Literal["csv", "jsonl", "parquet", "tfrecord", "images"] | None,
    typer.Option("--format", help="Format of the input, where its name does not show it."),
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
    from flotilla.pipelines import predict as predicting
    from flotilla.pipelines.cli.live import Display

    if output == predicting.STANDARD_OUTPUT and context.obj:
        raise ConfigError("-o: with --json rows need a file: name it by -o")
    with Display(f"predict {model}") as show:
        found = predicting.predict(
            model,
            inputs or (),
            output=output or predicting.STANDARD_OUTPUT,
            to=to or "",
            format=format_ or "",
            split=split,
            columns=",".join(columns or ()),
            batch_size=batch_size,
            skip_bad=skip_bad,
            workdir=workdir,
            root=root,
            on_event=show,
        )
    if not found.closed:
        left_out = f", {found.skipped} left out" if found.skipped else ""
        where = "standard output" if found.output == predicting.STANDARD_OUTPUT else found.output
        say(f"{found.rows} rows{left_out} ({found.rows_per_second:,.0f} rows/s) in {where}")
    summary = ("rows", "skipped", "unsound", "output")
    more: dict[str, Any] = {name: getattr(found, name) for name in summary}
    more["rows_per_second"] = round(found.rows_per_second, 1)
    return Answer(artifacts={"model": found.model}, more=more)

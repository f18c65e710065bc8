"""Arguments and options that more than one command takes."""

from pathlib import Path
from typing import Annotated

import typer

# In the help of a command that trains.
TRAINED = "--json adds `global_step`, the updates that were applied."

Config = Annotated[
    Path | None, typer.Argument(help="YAML file of the run; configs/digits.yaml when left out.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated."),
]
Workdir = Annotated[
    Path, typer.Option(metavar="DIR", help="Folder below which everything is written.")
]
Resume = Annotated[str, typer.Option(metavar="RUN", help="Go on with this run.")]
Dataset = Annotated[str, typer.Option(metavar="URI", help="Train on this published dataset.")]
Root = Annotated[
    str, typer.Option(metavar="URI", help="Where all is stored; the workdir when left out.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]

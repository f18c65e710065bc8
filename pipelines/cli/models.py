"""The commands `flotilla models ...`: parse and call."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.exit import ended
from pipelines.cli.options import AsJson, Root, Workdir

models = typer.Typer(help="The registry: which models there are, and who is champion.")

PROMOTED = "--json adds `version` and `promotion`, the numbers of both."
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")]


@models.command("list", epilog="--json adds `models`, an object each.")
def list_models(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One model; all without.")] = "",
    workdir: Workdir = Path("runs"),
    root: Root = "",
    as_json: AsJson = False,
) -> None:
    """List the versions of one model, or of all."""
    from pipelines import models as registered

    place = registered.root_of(root, workdir)
    ended(lambda: registered.list_(place, name, as_json=as_json), as_json)


@models.command("show", epilog="--json adds `model`, with its lineage and promotions.")
def show_model(
    name: Name,
    version: Annotated[int, typer.Argument(metavar="[VERSION]", min=0, help="Its number.")] = 0,
    workdir: Workdir = Path("runs"),
    root: Root = "",
    as_json: AsJson = False,
) -> None:
    """Show one version with its lineage; the champion when left out."""
    from pipelines import models as registered

    place = registered.root_of(root, workdir)
    ended(lambda: registered.show(place, name, version, as_json=as_json), as_json)


@models.command("promote", epilog=PROMOTED)
def promote_model(
    name: Name,
    version: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="Its number.")],
    workdir: Workdir = Path("runs"),
    root: Root = "",
    as_json: AsJson = False,
) -> None:
    """Make a version the champion."""
    from pipelines import models as registered

    place = registered.root_of(root, workdir)
    ended(lambda: registered.promote(place, name, version, as_json=as_json), as_json)


@models.command("rollback", epilog=PROMOTED)
def roll_back(
    name: Name,
    workdir: Workdir = Path("runs"),
    root: Root = "",
    as_json: AsJson = False,
) -> None:
    """Make the champion of before the champion again."""
    from pipelines import models as registered

    place = registered.root_of(root, workdir)
    ended(lambda: registered.rollback(place, name, as_json=as_json), as_json)

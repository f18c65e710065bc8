"""The command line `flotilla`: parse and call."""

import errno
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from trainer.errors import DONE, FAILED, USAGE, UserError

app = typer.Typer(
    name="flotilla",
    help="Declarative training pipelines on Kubeflow Pipelines: laptop and cluster alike.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

models = typer.Typer(help="The registry: which models there are, and who is champion.")
app.add_typer(models, name="models")

Config = Annotated[
    Path | None, typer.Argument(help="YAML file of the run; configs/digits.yaml when left out.")
]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one key; may be repeated."),
]
Workdir = Annotated[Path, typer.Option(help="Folder below which everything is written.")]
Resume = Annotated[str, typer.Option(metavar="RUN", help="Go on with this run.")]
Dataset = Annotated[str, typer.Option(metavar="URI", help="Train on this published dataset.")]
Root = Annotated[
    str, typer.Option(metavar="URI", help="Where all is stored; the workdir when left out.")
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the model.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")]


@app.command()
def run(
    config: Config = None,
    assignments: Assignments = None,
    workdir: Workdir = Path("runs"),
    resume: Resume = "",
    as_json: AsJson = False,
) -> None:
    """Run the whole pipeline on this machine."""
    _run("run", config, assignments, workdir, resume, "", as_json)


@app.command()
def prepare(
    config: Config = None,
    assignments: Assignments = None,
    workdir: Workdir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Download, split, shard and publish the dataset."""
    _run("prepare", config, assignments, workdir, "", "", as_json)


@app.command()
def train(
    config: Config = None,
    assignments: Assignments = None,
    workdir: Workdir = Path("runs"),
    dataset: Dataset = "",
    resume: Resume = "",
    as_json: AsJson = False,
) -> None:
    """Train on the dataset, which is prepared when it is not published yet."""
    _run("train", config, assignments, workdir, resume, dataset, as_json)


@app.command("compile")
def compile_(
    output: Annotated[Path, typer.Option("-o", "--output", help="File to write.")] = Path(
        "build/pipeline.yaml"
    ),
    image: Annotated[str, typer.Option(help="Image of all steps; the default when empty.")] = "",
    components: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write one YAML a component here.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile the pipeline to the YAML that a KFP instance takes."""
    from pipelines.commands import print_json
    from pipelines.compile import compile_all

    def compiled() -> int:
        written = compile_all(output, image, components)
        sys.stderr.writelines(f"wrote {path}\n" for path in written.values())
        if as_json:
            print_json({"status": "done", "artifacts": written})
        return DONE

    _ended(compiled, as_json)


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Ids of the runs.")],
    workdir: Workdir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Put runs side by side."""
    from pipelines import compare as comparing

    _ended(lambda: comparing.compare(runs, workdir, as_json=as_json), as_json)


@models.command("list")
def list_models(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One model; all without.")] = "",
    workdir: Workdir = Path("runs"),
    root: Root = "",
    as_json: AsJson = False,
) -> None:
    """List the versions of one model, or of all."""
    from pipelines import models as registered

    place = registered.root_of(root, workdir)
    _ended(lambda: registered.list_(place, name, as_json=as_json), as_json)


@models.command("show")
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
    _ended(lambda: registered.show(place, name, version, as_json=as_json), as_json)


@models.command("promote")
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
    _ended(lambda: registered.promote(place, name, version, as_json=as_json), as_json)


@models.command("rollback")
def roll_back(
    name: Name,
    workdir: Workdir = Path("runs"),
    root: Root = "",
    as_json: AsJson = False,
) -> None:
    """Make the champion of before the champion again."""
    from pipelines import models as registered

    place = registered.root_of(root, workdir)
    _ended(lambda: registered.rollback(place, name, as_json=as_json), as_json)


@app.command()
def gc(
    config: Config = None,
    assignments: Assignments = None,
    workdir: Workdir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Remove what dead writers left below the storage root."""
    from pipelines import collect

    assigned = tuple(assignments or ())
    _ended(lambda: collect.collect(config, assigned, workdir, as_json=as_json), as_json)


@app.command()
def manifest(
    config: Config = None, assignments: Assignments = None, as_json: AsJson = False
) -> None:
    """Print the TFJob of a configuration as YAML."""
    from pipelines import commands
    from pipelines.manifest import print_manifest

    def printed() -> int:
        loaded = commands.load_file(config, tuple(assignments or ()))
        print_manifest(loaded, as_json=as_json)
        return DONE

    _ended(printed, as_json)


def called(arguments: list[str]) -> int:
    """Do what the command line says; return the exit code."""
    as_json = "--json" in arguments
    try:
        code = app(arguments or ["--help"], prog_name="flotilla", standalone_mode=False)
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "flotilla")
        words = " ".join(error.format_message().split()).rstrip(".")
        return _told(f"{words}; see `{command} --help`", USAGE, as_json=as_json)
    except OSError as error:
        # Help is printed by others.
        if error.errno != errno.ENOSPC:
            raise
        from pipelines.display import write_nowhere

        write_nowhere(sys.stdout)
        return _told(f"cannot write to standard output: {error.strerror}", FAILED, as_json=as_json)
    return int(code or DONE)


def _run(
    pipeline: str,
    config: Path | None,
    assignments: list[str] | None,
    workdir: Path,
    resume: str,
    dataset: str,
    as_json: bool,
) -> None:
    from pipelines import commands

    request = commands.Request(
        pipeline=pipeline,
        config=config,
        assignments=tuple(assignments or ()),
        workdir=workdir,
        resume=resume,
        dataset=dataset,
        as_json=as_json,
    )
    _ended(lambda: commands.run(request), as_json)


def _ended(command: Callable[[], int], as_json: bool) -> NoReturn:
    """End the process with the code of `command`; an error of the user is one line."""
    try:
        code = command()
    except UserError as error:
        code = _told(str(error), error.exit_code, as_json=as_json)
    raise typer.Exit(code)


def _told(message: str, code: int, *, as_json: bool) -> int:
    from pipelines import commands

    # Who cannot hear the words still gets the exit code.
    with suppress(OSError):
        sys.stderr.write(f"flotilla: {message}\n")
        sys.stderr.flush()
    if as_json:
        with suppress(UserError):
            commands.print_json({"status": "failed", "message": message})
    return code

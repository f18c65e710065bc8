"""The command line `flotilla`: parse and call."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from trainer.errors import DONE, USAGE, UserError

app = typer.Typer(
    name="flotilla",
    help="Declarative training pipelines on Kubeflow Pipelines: laptop and cluster alike.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

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


def main() -> None:
    """Be the console script."""
    arguments = sys.argv[1:]
    try:
        code = app(arguments or ["--help"], prog_name="flotilla", standalone_mode=False)
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "flotilla")
        words = " ".join(error.format_message().split()).rstrip(".")
        code = _told(f"{words}; see `{command} --help`", USAGE, as_json="--json" in arguments)
    sys.exit(code)


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

    sys.stderr.write(f"flotilla: {message}\n")
    if as_json:
        commands.print_json({"status": "failed", "message": message})
    return code

"""The command line `flotilla`: parse and call."""

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelines.cli.doctor import doctor
from pipelines.cli.exit import ended, told
from pipelines.cli.kfp import remote
from pipelines.cli.models import models
from pipelines.cli.options import TRAINED, AsJson, Assignments, Config, Dataset, Resume, Workdir
from trainer.errors import DONE, FAILED, USAGE

app = typer.Typer(
    name="flotilla",
    help="Declarative training pipelines on Kubeflow Pipelines: laptop and cluster alike.",
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(models, name="models")
app.command(epilog="--json adds `checks`, an object each.")(doctor)
app.add_typer(remote)


@app.command(epilog=TRAINED)
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


@app.command(epilog=TRAINED)
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
    from components.image import IMAGE
    from pipelines.cli.commands import print_json
    from pipelines.compile import compile_all, image_remark

    def compiled() -> int:
        written = compile_all(output, image, components)
        sys.stderr.writelines(f"wrote {path}\n" for path in written.values())
        sys.stderr.write(image_remark(image or IMAGE))
        if as_json:
            print_json({"status": "done", "artifacts": written})
        return DONE

    ended(compiled, as_json)


@app.command(epilog="--json adds `runs`, and `comparison`: by group and name a value of each run.")
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Ids of the runs.")],
    workdir: Workdir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Put runs side by side."""
    from pipelines import compare as comparing

    ended(lambda: comparing.compare(runs, workdir, as_json=as_json), as_json)


@app.command(epilog="--json adds `removed`, the URIs of what was removed.")
def gc(
    config: Config = None,
    assignments: Assignments = None,
    workdir: Workdir = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Remove what dead writers left below the storage root."""
    from pipelines import garbage

    assigned = tuple(assignments or ())
    ended(lambda: garbage.collect(config, assigned, workdir, as_json=as_json), as_json)


@app.command(epilog="--json adds `manifest`, the TFJob itself.")
def manifest(
    config: Config = None, assignments: Assignments = None, as_json: AsJson = False
) -> None:
    """Print the TFJob of a configuration as YAML."""
    import yaml

    from components.tfjob.manifest import document
    from pipelines.cli import commands

    def printed() -> int:
        loaded = commands.load_file(config, tuple(assignments or ()))
        tree = document(loaded)
        if as_json:
            commands.print_json({"status": "done", "manifest": tree})
            return DONE
        with commands.output():
            sys.stdout.write(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True))
        return DONE

    ended(printed, as_json)


def called(arguments: list[str]) -> int:
    """Do what the command line says; return the exit code."""
    as_json = "--json" in arguments
    try:
        code = app(arguments or ["--help"], prog_name="flotilla", standalone_mode=False)
    except typer.TyperException as error:
        command = getattr(getattr(error, "ctx", None), "command_path", "flotilla")
        words = " ".join(error.format_message().split()).rstrip(".")
        return told(f"{words}; see `{command} --help`", USAGE, as_json=as_json)
    except OSError as error:
        # Help is printed by others.
        if error.errno != errno.ENOSPC:
            raise
        from pipelines.cli.display import write_nowhere

        write_nowhere(sys.stdout)
        return told(f"cannot write to standard output: {error.strerror}", FAILED, as_json=as_json)
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
    from pipelines.cli import commands

    request = commands.Request(
        pipeline=pipeline,
        config=config,
        assignments=tuple(assignments or ()),
        workdir=workdir,
        resume=resume,
        dataset=dataset,
        as_json=as_json,
    )
    ended(lambda: commands.run(request), as_json)

"""The commands that talk to a KFP instance, or to a run that goes on: parse and call."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.cli.exit import ended
from pipelines.cli.options import (
    AsJson,
    Assignments,
    AtOnce,
    CatchUp,
    Config,
    Cron,
    Every,
    Experiment,
    Given,
    Image,
    Latest,
    Parameters,
    Pipeline,
    PipelineRoot,
    Run,
    RunsDir,
    ServiceAccount,
    Timezone,
    Version,
    of_instance,
)

if TYPE_CHECKING:
    from trainer.config.schema import Config as RunConfig

remote = typer.Typer()

PIPELINE, EXPERIMENT, RUNS = "flotilla-training", "flotilla", Path("runs")


@remote.command(
    epilog="--json adds `version`; `newest` in it: whether `submit` takes it by itself."
)
@of_instance
def upload(
    given: Given,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Compiled pipeline; ours when left out.")
    ] = None,
    image: Image = "",
    name: Annotated[str, typer.Option(help="Of the pipeline; its own when left out.")] = "",
    as_json: AsJson = False,
) -> None:
    """Upload the pipeline; the same content is uploaded once."""

    def done() -> int:
        from pipelines.compile import package_of
        from pipelines.runs import upload as uploading

        access = given.access()
        return uploading.upload(access, package_of(file, image), name, as_json=as_json)

    ended(done, as_json)


@remote.command(epilog="--json adds `global_step` when the run was waited for.")
@of_instance
def submit(
    given: Given,
    config: Config = None,
    assignments: Assignments = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the run to its end.")] = False,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Run this compiled pipeline.")
    ] = None,
    pipeline: Pipeline = PIPELINE,
    version: Version = "",
    experiment: Experiment = EXPERIMENT,
    name: Annotated[str, typer.Option(help="Of the run; made up when left out.")] = "",
    pipeline_root: PipelineRoot = "",
    service_account: ServiceAccount = "",
    parameters: Parameters = None,
    as_json: AsJson = False,
) -> None:
    """Start a run on a KFP instance."""

    def done() -> int:
        from pipelines.compile import package_of
        from pipelines.runs import submit as submitting
        from trainer.errors import ConfigError

        if file and version:
            raise ConfigError("--file and --version name two pipelines: leave one out")
        access = given.access()
        request = submitting.Request(
            config=_loaded(config, assignments),
            package=package_of(file, "") if file else None,
            pipeline=pipeline,
            version=version,
            experiment=experiment,
            name=name,
            pipeline_root=pipeline_root,
            service_account=service_account,
            parameters=tuple(parameters or ()),
        )
        return submitting.submit(access, request, wait=wait, as_json=as_json)

    ended(done, as_json)


@remote.command(epilog="--json adds `schedule`.")
@of_instance
def schedule(
    given: Given,
    config: Config = None,
    assignments: Assignments = None,
    cron: Cron = "",
    every: Every = "",
    timezone: Timezone = "UTC",
    name: Annotated[str, typer.Option(help="Of the schedule; the model's when left out.")] = "",
    pipeline: Pipeline = PIPELINE,
    version: Version = "",
    latest: Latest = False,
    catch_up: CatchUp = False,
    at_once: AtOnce = 1,
    experiment: Experiment = EXPERIMENT,
    pipeline_root: PipelineRoot = "",
    service_account: ServiceAccount = "",
    parameters: Parameters = None,
    as_json: AsJson = False,
) -> None:
    """Start runs on a KFP instance again and again: one schedule of each name."""

    def done() -> int:
        from pipelines.runs import schedule as scheduling
        from pipelines.runs.submit import Request

        timing = scheduling.timing(
            cron,
            every,
            zone=timezone,
            catch_up=catch_up,
            at_once=at_once,
            latest=latest,
            version=version,
        )
        access, loaded = given.access(), _loaded(config, assignments)
        request = Request(
            config=loaded,
            package=None,
            pipeline=pipeline,
            version=version,
            experiment=experiment,
            name=name or loaded.name,
            pipeline_root=pipeline_root,
            service_account=service_account,
            parameters=tuple(parameters or ()),
        )
        return scheduling.schedule(access, request, timing, as_json=as_json)

    ended(done, as_json)


@remote.command(epilog="--json adds `schedule`.")
@of_instance
def unschedule(
    given: Given,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the schedule.")],
    as_json: AsJson = False,
) -> None:
    """Remove a schedule from a KFP instance; its runs stay."""

    def done() -> int:
        from pipelines.runs import schedule as scheduling

        return scheduling.unschedule(given.access(), name, as_json=as_json)

    ended(done, as_json)


@remote.command(epilog="--json adds `runs`, an object each.")
@of_instance
def runs(
    given: Given,
    experiment: Annotated[str, typer.Option(metavar="NAME", help="Of this group alone.")] = "",
    limit: Annotated[int, typer.Option(help="How many.", min=1)] = 20,
    workdir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """List runs, newest first: those of the KFP instance that is named, else of this machine."""

    def done() -> int:
        from pipelines.cli import runs
        from pipelines.runs.kfp_access import is_named

        if experiment or is_named(given.endpoint):
            return runs.list_remote(given.access(), experiment, limit, as_json=as_json)
        return runs.list_local(workdir, limit, as_json=as_json)

    ended(done, as_json)


@remote.command(
    epilog="--json adds `steps` while the run goes on, and `global_step` when it has ended."
)
@of_instance
def status(given: Given, run: Run, workdir: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Show how a run stands, on a KFP instance or on this machine."""

    def done() -> int:
        from pipelines.cli import runs

        return runs.status(run, workdir, given.access, as_json=as_json)

    ended(done, as_json)


@remote.command()
@of_instance
def logs(
    given: Given,
    run: Run,
    step: Annotated[str, typer.Option(metavar="STEP", help="Of this step alone.")] = "",
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Go on until the run has ended.")
    ] = True,
    workdir: RunsDir = RUNS,
    as_json: AsJson = False,
) -> None:
    """Show the logs of a run, on a KFP instance or on this machine."""

    def done() -> int:
        from pipelines.cli import runs

        return runs.logs(run, workdir, given.access, step, follow=follow, as_json=as_json)

    ended(done, as_json)


@remote.command()
@of_instance
def cancel(given: Given, run: Run, workdir: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Ask a run to end, on a KFP instance or on this machine."""

    def done() -> int:
        from pipelines.cli import runs

        return runs.cancel(run, workdir, given.access, as_json=as_json)

    ended(done, as_json)


def _loaded(config: Path | None, assignments: list[str] | None) -> RunConfig:
    from pipelines.cli import commands

    return commands.load_file(config, tuple(assignments or ()))

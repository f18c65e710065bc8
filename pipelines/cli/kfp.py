"""Commands for a KFP instance, such as `flotilla compile`, `upload`, `submit` and `schedule`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.pipelines.cli import options as opt
from flotilla.pipelines.cli.exit import Answer, answers, detaching, output, warn
from flotilla.pipelines.cli.run import bundle_lines, make_answer
from flotilla.pipelines.cli.runs import continues
from flotilla.pipelines.runs.kfp_access import Access, Instance, describe_no_page
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.runtime.masking import printable
from flotilla.trainer.runtime.streams import say

if TYPE_CHECKING:
    from flotilla.pipelines.compile import Package
    from flotilla.pipelines.runs.schedule import Scheduled
    from flotilla.pipelines.runs.submission import Submission, Version


@answers
@opt.add_instance_options
@opt.add_pod_options
def upload(
    instance: Instance,
    pods: Any,
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="CONFIG|SOURCE|FILE",
            help="The compiled pipeline to upload, or the YAML configuration file or training data "
            "to compile it from.",
        ),
    ] = None,
    label: opt.Label = None,
    assignments: opt.Assignments = None,
    image: opt.Image = "",
    name: Annotated[
        str, typer.Option(help="The name of the pipeline. Default: the name in the compiled file.")
    ] = "",
) -> Answer:
    """Upload the pipeline. Identical content is uploaded only once."""
    from flotilla.pipelines.compile import image_remark
    from flotilla.pipelines.runs.submission import find_default
    from flotilla.pipelines.runs.submission import upload as upload_package

    access = instance.access()
    package = _package_to_upload(file, assignments or [], image, pods, label or [])
    made = upload_package(access, package, name)
    version = made.version
    action = "uploaded" if made.created else "identical content was already uploaded"
    say(f"{action}: {version.pipeline} version {version.name}")
    say(made.page or describe_no_page(access.endpoint))
    newest = find_default(access, version)
    is_newest = newest.version_id == version.version_id
    if not is_newest:
        say(
            f"this version is not the newest: `submit` and `schedule` use {newest.name}; to use "
            f"this version, add --version {version.name}"
        )
    if newest.remark:
        warn(newest.remark)
    if remark := image_remark(package.image):
        warn(remark)
    found = {**_version_fields(version), "created": made.created, "newest": is_newest}
    return Answer(artifacts=_pages(pipeline=made.page), more={"version": found})


def _package_to_upload(
    file: str | None, settings: list[str], image: str, pods: Any, label: list[str]
) -> Package:
    from flotilla.pipelines.compile import is_compiled, load_package, own_package
    from flotilla.pipelines.runs.local import form_configuration

    if file is None or not is_compiled(Path(file)):
        return own_package(image, pods, form_configuration(file, settings, label))
    if settings or label:
        option = "--set" if settings else "--label"
        raise ConfigError(
            f"{option} applies to compilation, but {file} is already compiled; omit the option"
        )
    return load_package(Path(file), image, pods)


def _version_fields(version: Version) -> dict[str, Any]:
    return {
        "id": version.version_id,
        "name": version.name,
        "pipeline": version.pipeline,
        "pipeline_id": version.pipeline_id,
    }


def _say(version: Version) -> None:
    say(f"version {version.name} ({version.version_id}) of {version.pipeline}")
    if version.remark:
        warn(version.remark)


def _pages(**pages: str) -> dict[str, str]:
    return {name: page for name, page in pages.items() if page}


@answers
@opt.add_instance_options
@opt.add_submission_options
def submit(
    instance: Instance,
    target: dict[str, Any],
    config: opt.Config = None,
    label: opt.Label = None,
    assignments: opt.Assignments = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the run ends, and show its progress.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Run this compiled pipeline instead of an uploaded one."),
    ] = None,
    name: Annotated[str, typer.Option(help="The name of the run. Default: a generated name.")] = "",
    code: opt.Code = None,
) -> Answer:
    """Start a run on a KFP instance."""
    from flotilla.pipelines.runs.local import configuration
    from flotilla.pipelines.runs.submission import Submission, package_to_send
    from flotilla.trainer.storage.uri import plain_http_remark

    access = instance.access()
    submission = Submission(
        config=configuration(config, assignments or (), label or ()),
        package=package_to_send(file, target["version"]),
        name=name,
        **target,
    )
    if remark := plain_http_remark(submission.config.storage.root):
        warn(remark)
    return _submit(access, _publish_code(submission, code), wait=wait)


def _publish_code(submission: Submission, folder: Path | None) -> Submission:
    from flotilla.pipelines.runs.submission import add_code

    if folder is None:
        return submission
    submission, bundle = add_code(submission, folder)
    for line in bundle_lines(bundle):
        say(line)
    return submission


def _submit(access: Access, submission: Submission, *, wait: bool) -> Answer:
    from flotilla.pipelines.cli.display import Terminal, show_result, show_verdict
    from flotilla.pipelines.cli.live import Steps
    from flotilla.pipelines.runs.kfp_client import connect
    from flotilla.pipelines.runs.kfp_outcome import judge_run
    from flotilla.pipelines.runs.kfp_watch import command, watch
    from flotilla.pipelines.runs.submission import start

    client = connect(access)
    run_id = ""

    def describe_detached() -> tuple[str, str]:
        if run_id:
            return continues(run_id, command(access, "cancel", run_id))
        return "interrupted, but the run may have started; check with `flotilla runs`", ""

    with detaching(describe_detached):
        started = start(client, submission)
        run_id = started.run_id
        say(f"run {run_id}")
        say(started.page or describe_no_page(access.endpoint))
        if started.version:
            _say(started.version)
        used = {"version": _version_fields(started.version)} if started.version else {}
        if not wait:
            if not started.page:
                say(f"check the run with: {command(access, 'status', run_id)}")
            pages = _pages(run=started.page)
            return Answer(status="submitted", run_id=run_id, artifacts=pages, more=used)
        with Steps() as steps:
            last = watch(client, run_id, steps.show, steps.say)
        result = judge_run(client, last)
    with output():
        show_result(Terminal(), result)
    is_said = bool(result.message) and result.status != "refused"
    if is_said:
        say(f"flotilla: {result.status}: {result.message}")
    show_verdict(Terminal(stderr=True), result, is_said=is_said)
    answer = make_answer(result)
    return replace(answer, more={**answer.more, **used})


@answers
@opt.add_instance_options
@opt.add_submission_options
def schedule(
    instance: Instance,
    target: dict[str, Any],
    config: opt.Config = None,
    label: opt.Label = None,
    assignments: opt.Assignments = None,
    cron: opt.Cron = "",
    every: opt.Every = "",
    timezone: opt.Timezone = "UTC",
    name: Annotated[
        str, typer.Option(help="The name of the schedule. Default: the name of the model.")
    ] = "",
    latest: opt.Latest = False,
    catch_up: opt.CatchUp = False,
    at_once: opt.AtOnce = 1,
    code: opt.Code = None,
) -> Answer:
    """Create or replace a schedule of recurring runs on a KFP instance."""
    from flotilla.pipelines.runs import schedule as scheduling
    from flotilla.pipelines.runs.local import configuration
    from flotilla.pipelines.runs.submission import Submission
    from flotilla.pipelines.schedule_times import make_timing

    timing = make_timing(
        cron,
        every,
        zone=timezone,
        catch_up=catch_up,
        at_once=at_once,
        latest=latest,
        version=target["version"],
    )
    access, loaded = instance.access(), configuration(config, assignments or (), label or ())
    submission = Submission(config=loaded, name=name or loaded.name, **target)
    return _answer_schedule(
        scheduling.put_schedule(access, _publish_code(submission, code), timing)
    )


ScheduleName = Annotated[str, typer.Argument(metavar="NAME", help="The name of the schedule.")]


def _answer_schedule(made: Scheduled) -> Answer:
    say(f"schedule {made.name} {made.action}: {made.timing}")
    _say(made.version)
    for remark in made.remarks:
        warn(remark)
    if made.existed and made.removed:
        say(f"removed {made.removed} other schedules with this name")
    found = {
        "id": made.schedule_id,
        "name": made.name,
        "next": made.next,
        "removed": made.removed,
        "done": made.action,
        "version": _version_fields(made.version),
    }
    return Answer(more={"schedule": found})


@answers
@opt.add_instance_options
@lambda command: opt.add_submission_options(command, "pipeline", "image")
def reschedule(instance: Instance, target: dict[str, Any], name: ScheduleName) -> Answer:
    """Recreate a schedule with the newest pipeline version. Keep its times and configuration."""
    from flotilla.pipelines.runs import schedule as scheduling

    made = scheduling.reschedule(instance.access(), name, target["pipeline"], target["image"])
    return _answer_schedule(made)


@answers
@opt.add_instance_options
def unschedule(
    instance: Instance,
    name: ScheduleName,
    cancel: Annotated[
        bool,
        typer.Option(
            "--cancel", help="Cancel the active runs of the schedule, and wait until they end."
        ),
    ] = False,
    now: Annotated[
        bool,
        typer.Option(
            "--now", help="Do not wait for the active runs of the schedule. They may be lost."
        ),
    ] = False,
) -> Answer:
    """Remove a schedule from a KFP instance after its active runs have ended."""
    from flotilla.pipelines.runs import schedule as scheduling

    if cancel and now:
        raise ConfigError(
            "--now and --cancel cannot be combined: --cancel waits until the runs have ended, but "
            "--now does not wait; omit one of the two"
        )

    left = "was not removed, but may be disabled; repeat the command to remove it"
    with detaching(lambda: (f"interrupted; the schedule {name} {left}", "")):
        removed = scheduling.unschedule(instance.access(), name, say, cancel=cancel, now=now)
    say(f"schedule {name} was removed")
    return Answer(more={"schedule": {"name": name, "removed": removed}})


@answers
@opt.add_pod_options
def compile_(
    pods: Any,
    config: opt.FormConfig = None,
    label: opt.Label = None,
    assignments: opt.Assignments = None,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FILE", parser=opt.local_path, help="The file to write."
        ),
    ] = Path("build/pipeline.yaml"),
    image: opt.Image = "",
    components: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=opt.local_path,
            help="Also write one YAML file for each component into this folder.",
        ),
    ] = None,
) -> Answer:
    """Compile the pipeline to YAML for a KFP instance."""
    from flotilla.components.image import IMAGE
    from flotilla.pipelines.compile import compile_all, image_remark
    from flotilla.pipelines.runs.local import form_configuration
    from flotilla.trainer.preflight.check import remark_on_path

    defaults = form_configuration(config, assignments or (), label or ())
    written = compile_all(output, image, components, pods, defaults)
    for path in written.values():
        say(f"wrote {path}")
    for remark in filter(None, [image_remark(image or IMAGE), remark_on_path(defaults.data)]):
        warn(remark)
    return Answer(artifacts=written)


@answers
def manifest(
    config: opt.Config = None, label: opt.Label = None, assignments: opt.Assignments = None
) -> Answer:
    """Print the TFJob or JobSet of a configuration as YAML."""
    import yaml

    from flotilla.components.launchers import render_job
    from flotilla.pipelines.runs.local import configuration

    tree = render_job(configuration(config, assignments or (), label or ()))
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    if printable(text) != text:
        # Escape unprintable characters. YAML escapes do not change the document.
        text = yaml.safe_dump(tree, sort_keys=False)
    return Answer(more={"manifest": tree}, text=text)

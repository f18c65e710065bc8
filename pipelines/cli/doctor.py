"""`flotilla check` and `flotilla doctor`, which find mistakes before a run starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flotilla.pipelines.cli.exit import Answer, answers, output
from flotilla.pipelines.cli.options import (
    Assignments,
    Code,
    Config,
    Image,
    Label,
    Workdir,
    add_instance_options,
    add_pod_options,
)
from flotilla.pipelines.cli.run import RUNS
from flotilla.pipelines.runs.kfp_access import Instance
from flotilla.trainer.runtime import user_code
from flotilla.trainer.runtime.errors import DONE, FAILED, ConfigError, UserError
from flotilla.trainer.runtime.masking import join_lines

if TYPE_CHECKING:
    from flotilla.pipelines.doctor.checks import DoctorOptions
    from flotilla.pipelines.doctor.examination import Check, Finding
    from flotilla.trainer.config.schema import Config as RunConfig

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}
_WIDTH = len("skipped")

_Namespace = Annotated[
    str,
    typer.Option(
        "-n",
        "--namespace",
        help="The namespace of the steps, and of the job unless cluster.kubernetes sets one. "
        "Default: KFP_NAMESPACE, or else the namespace of the kubeconfig.",
    ),
]
_ServiceAccount = Annotated[
    str,
    typer.Option(
        metavar="[NAMESPACE:]NAME",
        help="The service account of runs started from the KFP UI. Default: pipeline-runner.",
    ),
]


@answers
def check(
    config: Config = None,
    label: Label = None,
    assignments: Assignments = None,
    code: Code = None,
) -> Answer:
    """Check a configuration, its data source and your code in seconds, without starting a run."""
    from flotilla.pipelines.doctor.configuration import describe_model
    from flotilla.pipelines.runs.local import configuration, require_current_folder
    from flotilla.trainer.preflight.check import check as checked

    require_current_folder()
    loaded = configuration(config, assignments or (), label or ())
    if code:
        if not code.is_dir():
            raise ConfigError(f"--code: the folder {code} does not exist")
        os.environ[user_code.FOLDER_VARIABLE] = str(code.absolute())
    result = checked(loaded)
    notes = "".join(f"note: {join_lines(each)}\n" for each in result.notes)
    said = (
        describe_model(loaded, result.found) if result.found else "the configuration and the source"
    )
    more = {"found": dict(result.found), "notes": list(result.notes)}
    return Answer(text=f"{notes}ok: {join_lines(said)}\n", more=more)


@answers
@partial(add_instance_options, namespace=_Namespace)
@lambda command: add_pod_options(command, "pull_secrets", "mounts")
def doctor(
    instance: Instance,
    pods: Any,
    config: Config = None,
    label: Label = None,
    assignments: Assignments = None,
    workdir: Workdir = RUNS,
    kubernetes: Annotated[
        bool,
        typer.Option("--kubernetes", help="Check the cluster even if cluster.launcher is local."),
    ] = False,
    service_account: _ServiceAccount = "",
    image: Image = "",
) -> Answer:
    """Check whether this machine or the cluster is ready for a run, without starting one."""
    from flotilla.pipelines.doctor.checks import DoctorOptions
    from flotilla.pipelines.doctor.permissions import check_name
    from flotilla.pipelines.runs.kfp_access import check_namespace, find_namespace
    from flotilla.pipelines.runs.local import configuration, require_current_folder
    from flotilla.pipelines.step_settings import check_image

    require_current_folder()
    check_name(service_account)
    check_image(image)
    check_namespace(find_namespace(instance.namespace))
    try:
        loaded: RunConfig | UserError = configuration(config, assignments or (), label or ())
    except UserError as error:
        loaded = error
    options = DoctorOptions(
        config=loaded,
        workdir=workdir,
        instance=instance,
        kubernetes=kubernetes,
        service_account=service_account,
        image=image,
        pods=pods,
    )
    answer = _examine(options)
    return replace(answer, code=loaded.exit_code) if isinstance(loaded, UserError) else answer


def _examine(options: DoctorOptions) -> Answer:
    from flotilla.pipelines.cli.display import Terminal
    from flotilla.pipelines.doctor.checks import checks
    from flotilla.pipelines.doctor.examination import examine

    terminal = Terminal()
    listed = checks(options)

    def show(check: Check, finding: Finding) -> None:
        with output():
            terminal.print(f"{finding.state:{_WIDTH}}", style=_COLOURS[finding.state], end="  ")
            terminal.print(_line(check, finding))

    return _answer(list(zip(listed, examine(listed, show), strict=True)))


def _line(check: Check, finding: Finding) -> str:
    remedy = f"; fix or inspect it with: {finding.remedy}" if finding.remedy else ""
    return f"{check.name}: {finding.message}{remedy}"


def _answer(found: Sequence[tuple[Check, Finding]]) -> Answer:
    rows = [{"name": check.name, **asdict(finding)} for check, finding in found]
    failed = [check.name for check, finding in found if finding.state == "fail"]
    return Answer(
        status="failed" if failed else "done",
        code=FAILED if failed else DONE,
        message=f"failed: {', '.join(failed)}" if failed else "",
        more={"checks": rows},
    )

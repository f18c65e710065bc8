"""What `flotilla doctor` does: look, tell, and end with the code that says how it stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.cli import commands
from pipelines.cli.display import Terminal
from pipelines.doctor.check import Check, Finding
from pipelines.doctor.checks import Asked, checks
from pipelines.doctor.examination import examine
from pipelines.doctor.kfp_instance import Instance
from pipelines.doctor.permissions import check_name, check_namespace
from pipelines.step_settings import check_image
from trainer.config.schema import Config
from trainer.errors import DONE, FAILED, UserError

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skipped": "dim"}
_WIDTH = len("skipped")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a person asked for on the command line; see `catalogue.Asked`."""

    config: Path | None
    assignments: tuple[str, ...]
    workdir: Path
    instance: Instance
    kubernetes: bool
    service_account: str
    image: str
    as_json: bool


def run(request: Request) -> int:
    """Look at everything, tell each finding in a line, and return the exit code.

    It is 0 where nothing failed, that of a wrong configuration where it is wrong, and 1 otherwise.
    """
    commands.require_current_folder()
    check_name(request.service_account)
    check_image(request.image)
    check_namespace(request.instance.namespace)
    config = _config(request)
    asked = Asked(
        config=config,
        workdir=request.workdir,
        instance=request.instance,
        kubernetes=request.kubernetes,
        service_account=request.service_account,
        image=request.image,
    )
    terminal = Terminal()
    listed = checks(asked)

    def tell(check: Check, finding: Finding) -> None:
        with commands.output():
            colour = _COLOURS[finding.state]
            terminal.print(f"{finding.state:{_WIDTH}}", style=colour, end="  ")
            terminal.print(_line(check, finding), markup=False, soft_wrap=True)

    found = examine(listed, tell)
    failed = [check.name for check, each in zip(listed, found, strict=True) if each.state == "fail"]
    if request.as_json:
        commands.print_json(_summary(listed, found, failed))
    if isinstance(config, UserError):
        return config.exit_code
    return FAILED if failed else DONE


def _config(request: Request) -> Config | UserError:
    try:
        return commands.load_file(request.config, request.assignments)
    except UserError as error:
        return error


def _line(check: Check, finding: Finding) -> str:
    remedy = f"; mend or look: {finding.remedy}" if finding.remedy else ""
    return f"{check.name}: {finding.message}{remedy}"


def _summary(
    listed: Sequence[Check], found: Sequence[Finding], failed: Sequence[str]
) -> dict[str, object]:
    rows = [
        {
            "name": check.name,
            "state": finding.state,
            "message": finding.message,
            "remedy": finding.remedy,
        }
        for check, finding in zip(listed, found, strict=True)
    ]
    message = f"failed: {', '.join(failed)}" if failed else ""
    return {"status": "failed" if failed else "done", "message": message, "checks": rows}

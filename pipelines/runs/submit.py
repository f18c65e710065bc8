"""`flotilla submit`: start a run on a KFP instance, and wait for its end if that is asked for."""

from __future__ import annotations

import secrets
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipelines.cli import display
from pipelines.cli.commands import output, print_json
from pipelines.cli.display import Steps
from pipelines.compile import Package, parameters_of
from pipelines.runs.follow import goes_on, leaving, watch
from pipelines.runs.kfp_client import Access, Client, InstanceError, ask, connect
from pipelines.runs.kfp_outcome import outcome_of
from pipelines.runs.outcome import Outcome
from pipelines.runs.upload import Version, page_of, version_of
from pipelines.step_settings import assigned
from trainer.config.run_parameters import to_parameters
from trainer.config.schema import Config
from trainer.errors import DONE, ConfigError, UserError

EXPERIMENT = "flotilla"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be run.

    Attributes:
        config: the configuration.
        package: a compiled pipeline to be sent along, or None for an uploaded version.
        pipeline: name of the uploaded pipeline.
        version: of it; the newest when empty.
        experiment: the group of runs, which is made where it is not there.
        name: of the run; from the configuration and the time when empty.
        pipeline_root: where KFP keeps artifacts; the instance's default when empty.
        service_account: of the pods; the instance's default when empty.
        parameters: run parameters of the steps, as `NAME=VALUE`; their defaults when left out.
    """

    config: Config
    package: Package | None
    pipeline: str
    version: str = ""
    experiment: str = EXPERIMENT
    name: str = ""
    pipeline_root: str = ""
    service_account: str = ""
    parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse wrong parameters before anything is asked; raises `ConfigError`."""
        assigned(self.parameters)


def submit(access: Access, request: Request, *, wait: bool, as_json: bool) -> int:
    """Start a run; return its exit code where it is waited for. Raises `UserError`."""
    client = connect(access)
    started: list[str] = []

    def left() -> tuple[str, str]:
        if started:
            return goes_on(client, started[0])
        return "interrupted; whether the run was started is not known: see `flotilla runs`", ""

    with leaving(left):
        run_id = _started(client, request)
        started.append(run_id)
        place = page_of(access, f"runs/details/{run_id}")
        sys.stderr.write(f"run {run_id}\n{place}\n")
        sys.stderr.flush()
        if not wait:
            if as_json:
                print_json({"status": "submitted", "run_id": run_id, "artifacts": {"run": place}})
            return DONE
        with Steps() as steps:
            run = watch(client, run_id, steps.show, steps.say)
        outcome = outcome_of(client, run)
    return told(run_id, outcome, as_json=as_json)


def told(run_id: str, outcome: Outcome, *, as_json: bool) -> int:
    """Show how a run ended; return the exit code."""
    with output():
        display.Terminal().print(display.closing_table(outcome))
    if outcome.message:
        sys.stderr.write(f"flotilla: {outcome.status}: {outcome.message}\n")
    if as_json:
        print_json(summary(run_id, outcome))
    return outcome.exit_code


def summary(run_id: str, outcome: Outcome) -> dict[str, object]:
    """Return the JSON object of a run that has ended."""
    whole: dict[str, object] = {
        "status": outcome.status,
        "run_id": run_id,
        "metrics": outcome.metrics("evaluate_model"),
        "artifacts": outcome.artifacts(),
        "message": outcome.message,
    }
    trained = outcome.metrics("train_model")
    if "global_step" in trained:
        whole["global_step"] = trained["global_step"]
    return whole


def run_parameters(
    config: Config, given: Mapping[str, Any], spec: Mapping[str, Any] | None, what: str
) -> dict[str, Any]:
    """Return the typed run parameters of `config`, and those of the steps, that a pipeline knows.

    Raises:
        ConfigError: the configuration asks for something that the pipeline does not know.
    """
    values, known = {**to_parameters(config), **given}, parameters_of(spec)
    if known is None:
        return values
    default = to_parameters(Config())
    unknown = [name for name in values if name not in known]
    asked = [name for name in unknown if name in given or values[name] != default[name]]
    if asked:
        raise ConfigError(
            f"{what} does not know {', '.join(asked)}: upload this pipeline with `flotilla upload`"
        )
    return {name: value for name, value in values.items() if name in known}


def experiment_id(client: Client, name: str) -> str:
    """Return the id of an experiment, which is made where it is not there."""
    made = ask(client.create_experiment, name=name, namespace=client.access.namespace or None)
    return str(made.experiment_id)


def _started(client: Client, request: Request) -> str:
    version: Version | None = None
    if request.package is None:
        version = version_of(client, request.pipeline, request.version)
        what, spec = f"version {version.name} of {version.pipeline}", version.spec
    else:
        what, spec = f"the pipeline {request.package.name}", dict(request.package.spec)
    named: dict[str, Any] = {
        "params": run_parameters(request.config, assigned(request.parameters), spec, what),
        "job_name": request.name or _run_name(request.config),
        "experiment_id": experiment_id(client, request.experiment),
        "pipeline_root": request.pipeline_root or None,
        "service_account": request.service_account or None,
    }
    try:
        return _created(client, named, version, request.package)
    except InstanceError as error:
        if error.status:
            raise
        unsure = "whether the run was started is not known, see `flotilla runs`"
        raise UserError(f"{error}; {unsure}") from None


def _created(
    client: Client, named: dict[str, Any], version: Version | None, package: Package | None
) -> str:
    if version is not None:
        ids = {"pipeline_id": version.pipeline_id, "version_id": version.version_id}
        return str(ask(client.run_pipeline, **named, **ids).run_id)
    assert package is not None
    with tempfile.TemporaryDirectory(prefix="flotilla-") as folder:
        path = Path(folder, "pipeline.yaml")
        path.write_text(package.text, encoding="utf-8")
        return str(ask(client.run_pipeline, **named, pipeline_package_path=str(path)).run_id)


def _run_name(config: Config) -> str:
    return f"{config.name}-{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"

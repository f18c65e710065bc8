"""The result of a run: its status, exit code, metrics, artifacts and steps."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from flotilla.components import table
from flotilla.components.records.step_record import StepRecord, lost_stage, step_records
from flotilla.pipelines import notebook
from flotilla.trainer.config.main_metric import MainMetric
from flotilla.trainer.events import RunEnd
from flotilla.trainer.events.progress import time_at_work
from flotilla.trainer.events.run_state import RunState
from flotilla.trainer.report import headline
from flotilla.trainer.report.wording import spell_metric
from flotilla.trainer.runtime.errors import DONE, FAILED, INTERRUPTED, REFUSED, USAGE
from flotilla.trainer.runtime.json_records import is_number, make_time

# A disk with fewer free bytes counts as full.
LEAST_ROOM = 1 << 16

# The id of a run: its model, the time of its start, and four hexadecimal digits.
_RUN_NAME = re.compile(r"(?P<model>.+)-\d{8}-\d{6}-[0-9a-f]{4}")


@dataclass(frozen=True, kw_only=True, repr=False)
class RunResult:
    """The result of a run, or its progress.

    Attributes:
        run_id: id of the run.
        status: `done`, `blessed`, `refused`, `unchanged`, `trained`, `failed` or `interrupted`;
            `running` before the end of the run; `unknown` if it cannot be read; on a KFP instance
            also `canceled`.
        exit_code: exit code of the command line.
        message: the reason for a failure or refusal in one line, or empty.
        steps: the last record of every stage, in the order of their start.
        folder: the folder of a local run.
        state: KFP's state of a remote run, or empty.
        states: KFP's state of each step, by step name.
        page: URL of a remote run in the KFP user interface, or empty.
    """

    run_id: str = ""
    status: str
    exit_code: int
    message: str
    steps: tuple[StepRecord, ...]
    folder: Path | None = None
    state: str = ""
    states: Mapping[str, str] = field(default_factory=dict)
    page: str = ""

    def __repr__(self) -> str:
        """Return the run, its status and its main metric."""
        main = self.main_metric
        value = {main.name: self.metrics.get(main.name)} if main else {}
        return notebook.short("RunResult", self.run_id, self.status, **value)

    def _repr_html_(self) -> str:
        metrics = {
            f"test {spell_metric(name)}": value for name, value in self._plain_metrics.items()
        }
        facts = {"status": self.status, "why": "; ".join(self.reasons) or self.message, **metrics}
        facts |= {name: uri for name, uri in self.artifacts.items() if name != "report"}
        return notebook.card(self.headline, {**facts, "report": self.report, "page": self.page})

    @property
    def _plain_metrics(self) -> dict[str, float]:
        return {name: value for name, value in self.metrics.items() if is_number(value)}

    def find_metrics(self, output: table.Output) -> dict[str, Any]:
        """Return the metrics of the step that makes this output; empty if it has not started."""
        step = self.find_step(output)
        return dict(step.metrics) if step else {}

    def find_step(self, output: table.Output) -> StepRecord | None:
        """Return the step that makes this output, or None if it has not started."""
        name = table.find_maker(output).name
        return next((each for each in self.steps if each.step == name), None)

    @property
    def main_metric(self) -> MainMetric | None:
        """The metric that models are compared by; None if no model was evaluated."""
        step = self.find_step("evaluation")
        if not step or not step.metrics:
            return None
        return step.main or MainMetric.of({"metrics": step.metrics})

    @property
    def measured(self) -> dict[str, Any]:
        """The main metric with all comparisons; see `headline.describe_metric`."""
        said, main = self.find_metrics("decision").get("measured"), self.main_metric
        if isinstance(said, dict) and said:
            return said
        value = self.metrics.get(main.name) if main else None
        return {"metric": main.name, "value": value, "better": main.better} if main else {}

    @property
    def headline(self) -> str:
        """The result of the run in one sentence."""
        said = [each.metrics.get("headline") for each in self.steps]
        if self.status in ("blessed", "refused") and any(said):
            return str([each for each in said if each][-1])
        facts = {"name": find_model(self) or self.run_id, "verdict": self.status}
        ill = [each for each in self.steps if each.status == self.status != "done"]
        step = ill[0] if ill else self._judge
        return headline.headline(
            {**facts, "measured": self.measured, "step": step.step if step else ""}
        )

    @property
    def notes(self) -> list[str]:
        """Remarks about an evaluated model, as sentences."""
        return list(map(str, self.find_metrics("decision").get("notes") or ()))

    @property
    def reasons(self) -> list[str]:
        """The reasons for a refusal, one line each."""
        if self.status != "refused":
            return []
        said = self._judge.metrics.get("reasons") if self._judge else None
        return list(map(str, said)) if said and isinstance(said, list) else [self.message]

    @property
    def _judge(self) -> StepRecord | None:
        """The step that refused the data or the model."""
        return next(
            (each for each in self.steps if each.metrics.get("decision") == "refused"), None
        )

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the model on the test split; empty if it was not evaluated."""
        return self.find_metrics("evaluation")

    @property
    def artifacts(self) -> dict[str, str]:
        """The URI of each step's output, keyed by artifact name."""
        uris = {table.output_kind(each.step): each.uri for each in self.steps if each.uri}
        return {output: uri for output, uri in uris.items() if output}

    @property
    def report(self) -> str:
        """The URI of the report page; empty if there is none."""
        return self.artifacts.get("report", "")

    @property
    def global_step(self) -> int | None:
        """The number of updates that training applied; None if there was no training."""
        return self.find_metrics("checkpoint").get("global_step")

    @property
    def handed_on_step(self) -> int | None:
        """The global step of the evaluated model; None if there was no training."""
        return self.find_metrics("checkpoint").get("handed_on_step")


def judge_outcome(state: RunState, returncode: int | None, *, interrupted: bool) -> RunResult:
    """Determine the result of a run from its newest start and the local runner's exit code.

    `returncode` is None if it is unknown, because the runner was killed.
    """
    interrupted = interrupted or state.interrupted
    steps = step_records(state)
    for step in steps:
        if step.status == "failed" and not interrupted:
            code = USAGE if step.exit_code == USAGE else FAILED
            message = f"{step.step}: {step.error}"
            return RunResult(status="failed", exit_code=code, message=message, steps=steps)
    stopped = [step for step in steps if step.status in ("interrupted", "failed")]
    if interrupted or stopped:
        message = stopped[0].error if stopped else "interrupted"
        return RunResult(status="interrupted", exit_code=INTERRUPTED, message=message, steps=steps)
    if returncode != 0:
        message = f"{_why_it_ended(steps, returncode)}; see pipeline.log"
        return RunResult(status="failed", exit_code=FAILED, message=message, steps=steps)
    return _judge_steps(steps)


def judge_ended(state: RunState) -> RunResult:
    """Determine the result of a run that has ended, from its events alone."""
    # If a runner is killed between two steps, neither an event nor a failed step shows it.
    return judge_outcome(state, DONE if state.newest(RunEnd) else None, interrupted=False)


def _why_it_ended(steps: tuple[StepRecord, ...], returncode: int | None) -> str:
    """Return why a run ended although no step failed."""
    if lost := lost_stage(steps):
        return f"the run did not finish: its process ended before {lost} started"
    if returncode is None:
        return "the run did not finish: its process was killed, or the machine stopped"
    return f"the local runner ended with exit code {returncode}"


def _judge_steps(steps: tuple[StepRecord, ...]) -> RunResult:
    """Determine the result of a run without failures from the decisions of its steps."""
    by_name = {step.step: step for step in steps}
    of_model = (table.find_maker("decision"), table.find_maker("registration"))
    is_whole = table.EXIT_STEP.name in by_name
    accepted, is_blessed = "", False
    for row in table.STAGES:
        step = by_name.get(row.name)
        if step is None and accepted and row in table.WORKING:
            message = f"{accepted}, but {row.name} did not run; see pipeline.log"
            return RunResult(status="failed", exit_code=FAILED, message=message, steps=steps)
        if step and is_whole and table.ends_well(row.name, step.metrics.get("decision")):
            message = join_reasons(step.metrics.get("reasons", []))
            return RunResult(status=row.completes, exit_code=DONE, message=message, steps=steps)
        if step is None or not row.accepts:
            continue
        if step.metrics.get("decision") != row.accepts:
            message = join_reasons(step.metrics.get("reasons", f"{row.name} reported no decision"))
            return RunResult(status="refused", exit_code=REFUSED, message=message, steps=steps)
        is_blessed = row in of_model
        if is_blessed or is_whole:
            accepted = f"the {'model' if is_blessed else 'data'} was {row.accepts}"
    status = "blessed" if is_blessed else "done"
    return RunResult(status=status, exit_code=DONE, message="", steps=steps)


def join_reasons(reasons: object) -> str:
    """Join the reasons for a decision into one line."""
    lines = reasons if isinstance(reasons, list | tuple) else [reasons]
    return "; ".join(str(each).removesuffix(".") for each in lines)


def add_full_disk(result: RunResult, folder: Path) -> RunResult:
    """Add a remark to the message of a failed run if the disk is full."""
    if result.status != "failed" or shutil.disk_usage(folder).free >= LEAST_ROOM:
        return result
    message = f"{result.message}; there is no space left at {folder}"
    return replace(result, message=message)


def measure_duration(run: RunResult) -> tuple[datetime | None, float | None]:
    """Return when a run began, and the seconds until its last step ended, without idle time.

    The exit step does not count, because it writes the report, which contains this duration.
    """
    steps = [each for each in run.steps if each.step != table.EXIT_STEP.name]
    tries = [(step.step, step.began, step.ended or step.began + step.seconds) for step in steps]
    for step in steps:
        tries += [(step.step, each.began, each.began + each.seconds) for each in step.earlier]
    if not tries:
        return None, None
    began = make_time(min(each for _, each, _ in tries))
    return began, time_at_work(tries) if began else None


def find_model(run: RunResult) -> str:
    """Return the model name in the id of a local run, or an empty string if there is none."""
    found = _RUN_NAME.fullmatch(run.run_id)
    return found["model"] if found else ""

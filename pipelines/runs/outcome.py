"""How a run ended, by its events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from components.step_record import StepRecord, step_records
from trainer.errors import DONE, FAILED, INTERRUPTED, REFUSED, USAGE
from trainer.events import Event


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run.

    Attributes:
        status: `done`, `blessed`, `refused`, `failed` or `interrupted`.
        exit_code: of the command line.
        message: one line that says why, empty when all went well.
        steps: the last record of every step, in the order in which they began.
    """

    status: str
    exit_code: int
    message: str
    steps: tuple[StepRecord, ...]

    def metrics(self, step: str) -> dict[str, Any]:
        """Return the metrics of a step, or none if it was not done."""
        return next((dict(each.metrics) for each in self.steps if each.step == step), {})

    def artifacts(self) -> dict[str, str]:
        """Return the URI of what each step has published."""
        return {ARTIFACTS[each.step]: each.uri for each in self.steps if each.uri}


ARTIFACTS = {
    "prepare_data": "dataset",
    "train_model": "checkpoint",
    "evaluate_model": "evaluation",
    "check_gate": "decision",
    "export_model": "model",
    "register_model": "registration",
    "finish": "report",
}


def outcome_of(events: Iterable[Event], returncode: int, *, interrupted: bool) -> Outcome:
    """Judge a run by the events of its newest start and by the exit code of the local runner."""
    steps = step_records(events)
    for step in steps:
        if step.status == "failed" and not interrupted:
            code = USAGE if step.exit_code == USAGE else FAILED
            message = f"{step.step}: {step.error}"
            return Outcome(status="failed", exit_code=code, message=message, steps=steps)
    stopped = [step for step in steps if step.status in ("interrupted", "failed")]
    if interrupted or stopped:
        message = stopped[0].error if stopped else "interrupted"
        return Outcome(status="interrupted", exit_code=INTERRUPTED, message=message, steps=steps)
    if returncode:
        message = f"the local runner ended with exit code {returncode}; see pipeline.log"
        return Outcome(status="failed", exit_code=FAILED, message=message, steps=steps)
    return _judged(steps)


def _judged(steps: tuple[StepRecord, ...]) -> Outcome:
    by_name = {step.step: step for step in steps}
    gate = by_name.get("check_gate")
    if gate is None:
        return Outcome(status="done", exit_code=DONE, message="", steps=steps)
    judge = gate
    if gate.metrics["decision"] == "blessed":
        for name in ("export_model", "register_model"):
            if name not in by_name:
                message = f"the model was blessed, but {name} was not run; see pipeline.log"
                return Outcome(status="failed", exit_code=FAILED, message=message, steps=steps)
        judge = by_name["register_model"]
        if judge.metrics["decision"] == "promoted":
            return Outcome(status="blessed", exit_code=DONE, message="", steps=steps)
    message = "; ".join(judge.metrics["reasons"])
    return Outcome(status="refused", exit_code=REFUSED, message=message, steps=steps)

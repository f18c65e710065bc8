"""The result of a run on a KFP instance, from the states of its steps and from their logs.

States show a gate that refused: no step after it ran. Whether the registry promoted the model is
only in the log of its step.

A step that KFP took from its cache wrote no log in this run, and the instance returns no outputs:
what it published is known from the steps after it, which write their inputs into their own logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from components.step_record import StepRecord, record_of
from components.table import maker_of, published_by
from pipelines.runs.kfp_client import Client, InstanceError
from pipelines.runs.kfp_run import RemoteRun, Step, events_in, log_of
from pipelines.runs.outcome import RunResult
from trainer.errors import DONE, FAILED, REFUSED
from trainer.events import StepBegin, StepEnd

GATE, REGISTRY = maker_of("decision"), maker_of("registration")
_STATUS = {
    "SUCCEEDED": "done",
    "CANCELED": "interrupted",
    "FAILED": "failed",
    "RUNNING": "running",
    "PENDING": "waiting",
    "CANCELING": "ending",
    "PAUSED": "paused",
}


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What the instance and the log of a step say about it; `inputs` are URIs by name."""

    record: StepRecord
    state: str
    inputs: Mapping[str, str] = field(default_factory=dict)


def result_of(client: Client, run: RemoteRun) -> RunResult:
    """Return the result of a run, or how far it has come."""
    if not run.has_ended:
        status, code, message = "running", DONE, ""
        records = tuple(map(_record, run.steps))
    else:
        seen = {step.name: _seen(client, run, step) for step in run.steps}
        status, code, message = _ended(run, seen)
        records = tuple(_with_uri(each.record, seen) for each in seen.values())
    return RunResult(
        run_id=run.run_id,
        status=status,
        exit_code=code,
        message=message,
        steps=records,
        state=run.state,
        states={step.name: step.state for step in run.steps},
        page=client.page(f"runs/details/{run.run_id}"),
    )


def _with_uri(record: StepRecord, seen: Mapping[str, _Seen]) -> StepRecord:
    """Return the record; of a cached step with the URI that a later step took, where known."""
    if record.status != "cached":
        return record
    artifact = published_by(record.step) or ""
    uris = (each.inputs.get(artifact) for each in seen.values())
    return replace(record, uri=next((uri for uri in uris if uri), ""))


def _ended(run: RemoteRun, seen: Mapping[str, _Seen]) -> tuple[str, int, str]:
    if run.state == "CANCELED":
        return "canceled", FAILED, "the run was cancelled"
    if run.state != "SUCCEEDED":
        return "failed", FAILED, _failure(run, seen)
    gate, registry = seen.get(GATE.name), seen.get(REGISTRY.name)
    if gate is None:
        return "done", DONE, ""
    if registry and registry.state == "SUCCEEDED":
        return _judged(registry.record)
    if gate.record.metrics.get("decision") == GATE.accepts:
        return "failed", FAILED, f"the model was {GATE.accepts}, but {REGISTRY.name} was not run"
    return "refused", REFUSED, _reasons(gate.record) or "the gate refused the model"


def _judged(registry: StepRecord) -> tuple[str, int, str]:
    decision = registry.metrics.get("decision")
    if decision == REGISTRY.accepts:
        return "blessed", DONE, ""
    if decision == "refused":
        return "refused", REFUSED, _reasons(registry) or "the registry refused the model"
    message = f"the run is done, but what the registry decided cannot be read: {registry.error}"
    return "unknown", FAILED, message


def _reasons(record: StepRecord) -> str:
    return "; ".join(record.metrics.get("reasons") or ())


def _record(step: Step) -> StepRecord:
    """Return the record of a step as far as its state tells it."""
    return StepRecord(
        step=step.name,
        status="cached" if step.cached else _STATUS.get(step.state, "skipped"),
        began=step.began.timestamp() if step.began else 0.0,
        seconds=step.seconds,
    )


def _seen(client: Client, run: RemoteRun, step: Step) -> _Seen:
    """Return what is known of a step, from its log where there is one."""
    record = _record(step)
    if not _has_log(step):
        return _Seen(record=record, state=step.state)
    if not step.pods:
        error = "the instance names no pod of this step"
        return _Seen(record=replace(record, error=error), state=step.state)
    try:
        log = log_of(client, run, step)
    except InstanceError as error:
        return _Seen(record=replace(record, error=str(error)), state=step.state)
    # The log also has what the user's own code prints.
    events = [
        event
        for event in events_in(log)
        if isinstance(event, StepBegin | StepEnd) and event.step == step.name
    ]
    inputs = next((event.inputs for event in events if isinstance(event, StepBegin)), {})
    if ended := [event for event in events if isinstance(event, StepEnd)]:
        # KFP decides how the step ended.
        record = replace(record_of(ended[-1], began=record.began), status=record.status)
    else:
        record = replace(record, error=f"the log of {step.name} does not say how it ended")
    return _Seen(record=record, state=step.state, inputs=inputs)


def _has_log(step: Step) -> bool:
    """Return whether the log of a step has more than its state."""
    is_worth_reading = step.state == "FAILED" or (
        step.state == "SUCCEEDED" and published_by(step.name) is not None
    )
    return is_worth_reading and not step.cached


def _failure(run: RemoteRun, seen: Mapping[str, _Seen]) -> str:
    # The exit step runs after the failure and may fail because of it.
    first = next((each.record for each in seen.values() if each.state == "FAILED"), None)
    if first:
        return f"{first.step}: {first.error or run.error or 'failed'}"
    return run.error or f"the run ended as {run.state}"

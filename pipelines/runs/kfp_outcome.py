"""How a run on a KFP instance ended: by the states of its steps, and by what they say themselves.

States tell a gate that refused: nothing behind it was done. Whether the registry promoted the model
stands in the log of its step alone.

A step that KFP took from its cache wrote no log in this run, and the instance tells no outputs:
what it gave is known from the steps after it, which write what they take into their own logs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from components.step_record import StepRecord, record_of
from pipelines.runs.kfp_client import Client, InstanceError
from pipelines.runs.kfp_run import RemoteRun, Step, events_in, log_of
from pipelines.runs.outcome import ARTIFACTS, Outcome
from trainer.errors import DONE, FAILED, REFUSED
from trainer.events import StepBegin, StepEnd

GATE, REGISTRY, EXPORT = "check_gate", "register_model", "export_model"
# Of these steps the record says more than the state.
_TELLING = ("prepare_data", "train_model", "evaluate_model", GATE, EXPORT, REGISTRY, "finish")
_STATUS = {"SUCCEEDED": "done", "CANCELED": "interrupted", "FAILED": "failed"}


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """What the instance and the log of a step say of it.

    Attributes:
        record: of the step.
        state: as KFP says it.
        inputs: URI by name of what it took.
    """

    record: StepRecord
    state: str
    inputs: Mapping[str, str] = field(default_factory=dict)


def outcome_of(client: Client, run: RemoteRun) -> Outcome:
    """Return how a run that has ended did end."""
    seen = {step.name: _seen(client, run, step) for step in run.steps}
    status, code, message = _ended(run, seen)
    records = tuple(_with_uri(each.record, seen) for each in seen.values())
    return Outcome(status=status, exit_code=code, message=message, steps=records)


def _with_uri(record: StepRecord, seen: Mapping[str, _Seen]) -> StepRecord:
    """Return the record; of a cached step with the URI that a later step took, where known."""
    if record.status != "cached":
        return record
    artifact = ARTIFACTS.get(record.step, "")
    uris = (each.inputs.get(artifact) for each in seen.values())
    return replace(record, uri=next((uri for uri in uris if uri), ""))


def _ended(run: RemoteRun, seen: Mapping[str, _Seen]) -> tuple[str, int, str]:
    if run.state == "CANCELED":
        return "canceled", FAILED, "the run was cancelled"
    if run.state != "SUCCEEDED":
        return "failed", FAILED, _failure(run, seen)
    gate, registry = seen.get(GATE), seen.get(REGISTRY)
    if gate is None:
        return "done", DONE, ""
    if registry and registry.state == "SUCCEEDED":
        return _judged(registry.record)
    if gate.record.metrics.get("decision") == "blessed":
        return "failed", FAILED, f"the model was blessed, but {REGISTRY} was not run"
    return "refused", REFUSED, _reasons(gate.record) or "the gate refused the model"


def _judged(registry: StepRecord) -> tuple[str, int, str]:
    decision = registry.metrics.get("decision")
    if decision == "promoted":
        return "blessed", DONE, ""
    if decision == "refused":
        return "refused", REFUSED, _reasons(registry) or "the registry refused the model"
    message = f"the run is done, but what the registry decided cannot be read: {registry.error}"
    return "unknown", FAILED, message


def _reasons(record: StepRecord) -> str:
    return "; ".join(record.metrics.get("reasons") or ())


def _seen(client: Client, run: RemoteRun, step: Step) -> _Seen:
    """Return what is known of a step, from its log where there is one."""
    record = StepRecord(
        step=step.name,
        status="cached" if step.cached else _STATUS.get(step.state, "skipped"),
        began=step.began.timestamp() if step.began else 0.0,
        seconds=step.seconds,
    )
    if not _tells(step):
        return _Seen(record=record, state=step.state)
    if not step.pods:
        error = "the instance names no pod of it"
        return _Seen(record=replace(record, error=error), state=step.state)
    try:
        log = log_of(client, run, step)
    except InstanceError as error:
        return _Seen(record=replace(record, error=str(error)), state=step.state)
    # A log holds what a user's own code prints, too.
    begun: list[StepBegin] = []
    ended: list[StepEnd] = []
    for event in events_in(log):
        if isinstance(event, StepBegin) and event.step == step.name:
            begun.append(event)
        elif isinstance(event, StepEnd) and event.step == step.name:
            ended.append(event)
    inputs = begun[0].inputs if begun else {}
    if ended:
        # KFP's word on how it ended counts.
        own = record_of(ended[-1], began=record.began)
        record = replace(own, status=record.status)
    else:
        record = replace(record, error=f"the log of {step.name} says nothing of its end")
    return _Seen(record=record, state=step.state, inputs=inputs)


def _tells(step: Step) -> bool:
    """Say whether the log of a step is worth reading."""
    telling = step.state == "FAILED" or (step.state == "SUCCEEDED" and step.name in _TELLING)
    return telling and not step.cached


def _failure(run: RemoteRun, seen: Mapping[str, _Seen]) -> str:
    failed = [each.record for each in seen.values() if each.state == "FAILED"]
    if failed:
        # The exit step runs after the failure and may fail of it.
        first = failed[0]
        return f"{first.step}: {first.error or run.error or 'failed'}"
    return run.error or f"the run ended as {run.state}"

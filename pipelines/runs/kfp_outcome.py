"""How a run on a KFP instance ended: by the states of its steps, and by what they say themselves.

States tell a gate that refused: nothing behind it was done. Whether the registry promoted the model
stands in the log of its step alone.

A step that KFP took from its cache wrote no log in this run, and the instance tells no outputs:
what it gave is known from the steps after it, which write what they take into their own logs.
"""

from __future__ import annotations

from typing import Any

from components.record import step_records
from pipelines.runs.kfp_client import Client, InstanceError
from pipelines.runs.kfp_run import RemoteRun, Step, events_in, log_of
from pipelines.runs.outcome import ARTIFACTS, Outcome
from trainer.errors import DONE, FAILED, REFUSED

GATE, REGISTRY, EXPORT = "check_gate", "register_model", "export_model"
# Of these steps the record says more than the state.
_TELLING = ("prepare_data", "train_model", "evaluate_model", GATE, EXPORT, REGISTRY, "finish")
_STATUS = {"SUCCEEDED": "done", "CANCELED": "interrupted", "FAILED": "failed"}


def outcome_of(client: Client, run: RemoteRun) -> Outcome:
    """Return how a run that has ended did end."""
    records = {step.name: _record(client, run, step) for step in run.steps}
    for record in records.values():
        if record["status"] == "cached":
            record["uri"] = _taken(records, ARTIFACTS.get(record["step"], ""))
    status, code, message = _ended(run, records)
    return Outcome(status=status, exit_code=code, message=message, steps=tuple(records.values()))


def _taken(records: dict[str, dict[str, Any]], artifact: str) -> str:
    """Return the URI that steps took as `artifact`, empty where none of them says it."""
    uris = (record.get("inputs", {}).get(artifact) for record in records.values())
    return next((str(uri) for uri in uris if uri), "")


def _ended(run: RemoteRun, records: dict[str, dict[str, Any]]) -> tuple[str, int, str]:
    if run.state == "CANCELED":
        return "canceled", FAILED, "the run was cancelled"
    if run.state != "SUCCEEDED":
        return "failed", FAILED, _failure(run, records)
    gate, registry = records.get(GATE), records.get(REGISTRY)
    if gate is None:
        return "done", DONE, ""
    if registry and registry["state"] == "SUCCEEDED":
        return _judged(registry)
    if gate["figures"].get("decision") == "blessed":
        return "failed", FAILED, f"the model was blessed, but {REGISTRY} was not run"
    return "refused", REFUSED, _reasons(gate) or "the gate refused the model"


def _judged(registry: dict[str, Any]) -> tuple[str, int, str]:
    decision = registry["figures"].get("decision")
    if decision == "promoted":
        return "blessed", DONE, ""
    if decision == "refused":
        return "refused", REFUSED, _reasons(registry) or "the registry refused the model"
    message = f"the run is done, but what the registry decided cannot be read: {registry['error']}"
    return "unknown", FAILED, message


def _reasons(record: dict[str, Any]) -> str:
    return "; ".join(record["figures"].get("reasons") or ())


def _record(client: Client, run: RemoteRun, step: Step) -> dict[str, Any]:
    """Return the record of a step, from its log where that is to be had."""
    record = {
        "step": step.name,
        "status": "cached" if step.cached else _STATUS.get(step.state, "skipped"),
        "state": step.state,
        "seconds": step.seconds,
        "figures": {},
        "uri": "",
        "error": "",
    }
    if not _tells(step):
        return record
    if not step.pods:
        return {**record, "error": "the instance names no pod of it"}
    try:
        log = log_of(client, run, step)
    except InstanceError as error:
        return {**record, "error": str(error)}
    # A log holds what a user's own code prints, too.
    happened = [each for each in events_in(log) if each.get("step") == step.name]
    begun = [each.get("inputs") for each in happened if each["event"] == "step_begin"]
    record["inputs"] = next((each for each in begun if isinstance(each, dict)), {})
    mine = [each for each in step_records(happened) if "event" in each]
    if not mine:
        return {**record, "error": f"the log of {step.name} says nothing of its end"}
    kept = {name: record[name] for name in ("status", "state", "inputs")}
    return {**record, **mine[-1], **kept}


def _tells(step: Step) -> bool:
    """Say whether the log of a step is worth reading."""
    told = step.state == "FAILED" or (step.state == "SUCCEEDED" and step.name in _TELLING)
    return told and not step.cached


def _failure(run: RemoteRun, records: dict[str, dict[str, Any]]) -> str:
    failed = [each for each in records.values() if each["state"] == "FAILED"]
    if failed:
        # The exit step runs after the failure and may fail of it.
        first = failed[0]
        return f"{first['step']}: {first['error'] or run.error or 'failed'}"
    return run.error or f"the run ended as {run.state}"

"""The facts of a run for its report: gathered from what is published and from the run's events."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.step_record import step_records
from trainer import events, history, report, storage, validations
from trainer.errors import UserError
from trainer.topology import topology_of

log = logging.getLogger(__name__)
_INCIDENTS = ("restart", "stalled", "task_failed", "evaluator_left", "checkpoint_passed_over")
_LINEAGE = (
    "run_id", "commit", "image", "config", "dataset", "fingerprint", "checkpoint", "evaluation",
    "decision",
)  # fmt: skip


def write(state: str, root: str, run_id: str, folder: Path, path: Path) -> dict[str, Any]:
    """Write `report.html` to `path` from whatever the run has left so far; return the facts.

    Args:
        state: the final state that KFP gives the pipeline, such as `SUCCEEDED`.
        root: URI below which the run has published.
        run_id: the run.
        folder: the run's folder on this machine, which may hold its events.
        path: the file to be written.
    """
    facts = gathered(state, root, run_id, folder)
    report.write(facts, path)
    return facts


def gathered(state: str, root: str, run_id: str, folder: Path) -> dict[str, Any]:
    """Return the facts of a run, as far as they are there; see `trainer.report`."""
    happened = _events(folder)
    # The exit step is the one that writes this.
    steps = [each for each in step_records(happened) if each["step"] != "finish"]
    made = _Made(steps, root, run_id)
    decision = made.read("check_gate", "decision", "decision.json")
    evaluation = made.read("evaluate_model", "evaluation", "metrics.json")
    registered = made.read("register_model", "registration", "registration.json")
    config = _config(folder)
    return {
        "run_id": run_id,
        "verdict": _verdict(state, decision, registered, steps),
        "config": config,
        "steps": steps,
        "metrics": evaluation.get("metrics", {}),
        "rules": decision.get("rules", []),
        "reasons": decision.get("reasons", []),
        "history": _history(root, run_id),
        "incidents": [each for each in happened if _is_incident(each)],
        "checkpoints": [each for each in happened if each["event"] == "checkpoint"],
        "evaluation": evaluation,
        "curves": made.curves(),
        "pictures": made.pictures(evaluation),
        "registered": registered,
        "lineage": _lineage(registered),
        "cost": _cost(config, steps),
    }


def _is_incident(event: dict[str, Any]) -> bool:
    return event["event"] in _INCIDENTS or (event["event"] == "life" and event["resumed"])


def _verdict(
    state: str,
    decision: dict[str, Any],
    registered: dict[str, Any],
    steps: list[dict[str, Any]],
) -> str:
    for step in steps:
        if step["status"] != "done":
            return str(step["status"])
    if state and state not in ("SUCCEEDED", "SUCCESS"):
        return "failed"
    if registered.get("decision") == "refused":
        return "refused"
    return str(decision.get("decision", "done"))


class _Made:
    """What the steps of this run have published, and not what an earlier try of one had.

    Where no step has left a record, as on a cluster, the newest of its kind has to do.
    """

    def __init__(self, steps: list[dict[str, Any]], root: str, run_id: str) -> None:
        self._steps, self._root, self._run_id = steps, root, run_id

    def uri(self, step: str, kind: str) -> str:
        if self._steps:
            return next((each["uri"] for each in self._steps if each["step"] == step), "")
        found = storage.published(storage.join(self._root, self._run_id, kind))
        uri, _ = max(found, key=lambda pair: pair[1].created, default=("", None))
        return uri

    def read(self, step: str, kind: str, name: str) -> dict[str, Any]:
        with _left_out_if_unreadable():
            uri = self.uri(step, kind)
            return dict(json.loads(storage.read_file(uri, name))) if uri else {}
        return {}

    def curves(self) -> list[dict[str, Any]]:
        with _left_out_if_unreadable():
            uri = self.uri("evaluate_model", "evaluation")
            return list(json.loads(storage.read_file(uri, "curves.json"))) if uri else []
        return []

    def pictures(self, evaluation: dict[str, Any]) -> dict[str, str]:
        found = {}
        with _left_out_if_unreadable():
            uri = self.uri("evaluate_model", "evaluation")
            for row in evaluation.get("worst", []):
                if path := row.get("picture"):
                    content = storage.read_file(uri, path)
                    found[path] = base64.b64encode(content).decode()
        return found


def _lineage(registered: dict[str, Any]) -> dict[str, Any]:
    told = registered.get("lineage") or {}
    return {key: told[key] for key in _LINEAGE if key in told}


def _cost(config: dict[str, Any], steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what training took of the machines: tasks and GPUs by the time they were held."""
    seconds = next((step["seconds"] for step in steps if step["step"] == "train_model"), 0.0)
    if not (config and seconds):
        return {}
    cluster = config["cluster"]
    counts = topology_of(config["training"]["strategy"]).tasks(
        servers=cluster["parameter_servers"], workers=cluster["workers"]
    )
    gpus = cluster["gpus_per_worker"] * counts.get("worker", 1)
    return {
        "tasks": counts,
        "task_hours": sum(counts.values()) * seconds / 3600,
        "gpu_hours": gpus * seconds / 3600,
        "seconds_of_all_steps": round(sum(step["seconds"] for step in steps), 1),
    }


def _events(folder: Path) -> list[dict[str, Any]]:
    with _left_out_if_unreadable():
        return list(events.read(folder / "events.jsonl"))
    return []


def _history(root: str, run_id: str) -> list[dict[str, Any]]:
    with _left_out_if_unreadable():
        uri = storage.join(root, run_id, "checkpoints")
        return validations.merged(history.read(uri), validations.read(uri))
    return []


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    with _left_out_if_unreadable():
        if path.exists():
            return dict(json.loads(path.read_text(encoding="utf-8")))
    return {}


@contextmanager
def _left_out_if_unreadable() -> Iterator[None]:
    # A report with a gap tells more of a run that failed than no report.
    try:
        yield
    except (UserError, ValueError, OSError) as error:
        log.warning("left out of the report: %s", error)

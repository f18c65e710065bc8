"""The facts of a run for its report: gathered from what is published and from the run's events."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.step_record import step_records
from trainer import events, history, report, storage
from trainer.errors import UserError

log = logging.getLogger(__name__)


def write(state: str, root: str, run_id: str, folder: Path, path: Path) -> None:
    """Write `report.html` to `path` from whatever the run has left so far.

    Args:
        state: the final state that KFP gives the pipeline, such as `SUCCEEDED`.
        root: URI below which the run has published.
        run_id: the run.
        folder: the run's folder on this machine, which may hold its events.
        path: the file to be written.
    """
    happened = _events(folder)
    # The exit step is the one that writes this.
    steps = [each for each in step_records(happened) if each["step"] != "finish"]
    decision = _made(steps, "check_gate", root, run_id, "decision", "decision.json")
    evaluation = _made(steps, "evaluate_model", root, run_id, "evaluation", "metrics.json")
    facts = {
        "run_id": run_id,
        "verdict": _verdict(state, decision, steps),
        "config": _config(folder),
        "steps": steps,
        "metrics": evaluation.get("metrics", {}),
        "rules": decision.get("rules", []),
        "history": _history(root, run_id),
        "incidents": [each for each in happened if _is_incident(each)],
    }
    report.write(facts, path)


def _is_incident(event: dict[str, Any]) -> bool:
    return event["event"] == "restart" or (event["event"] == "life" and event["resumed"])


def _verdict(state: str, decision: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    for step in steps:
        if step["status"] != "done":
            return str(step["status"])
    if state and state not in ("SUCCEEDED", "SUCCESS"):
        return "failed"
    return str(decision.get("decision", "done"))


def _made(
    steps: list[dict[str, Any]], step: str, root: str, run_id: str, kind: str, name: str
) -> dict[str, Any]:
    """Return what `step` has published in this run, not what an earlier try of it had.

    Where no step has left a record, as on a cluster, the newest of its kind has to do.
    """
    with _left_out_if_unreadable():
        if steps:
            uri = next((each["uri"] for each in steps if each["step"] == step), "")
        else:
            found = storage.published(storage.join(root, run_id, kind))
            uri, _ = max(found, key=lambda pair: pair[1].created, default=("", None))
        return dict(json.loads(storage.read_file(uri, name))) if uri else {}
    return {}


def _events(folder: Path) -> list[dict[str, Any]]:
    with _left_out_if_unreadable():
        return list(events.read(folder / "events.jsonl"))
    return []


def _history(root: str, run_id: str) -> list[dict[str, Any]]:
    with _left_out_if_unreadable():
        return history.read(storage.join(root, run_id, "checkpoints"))
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

"""The facts of a run for its report: gathered from what is published and from the run's events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer import events, history, report, storage


def write(state: str, root: str, run_id: str, folder: Path, path: Path) -> None:
    """Write `report.html` to `path` from whatever the run has left so far.

    Args:
        state: the final state that KFP gives the pipeline, such as `SUCCEEDED`.
        root: URI below which the run has published.
        run_id: the run.
        folder: the run's folder on this machine, which may hold its events.
        path: the file to be written.
    """
    happened = list(events.read(folder / "events.jsonl"))
    steps = [each for each in happened if each["event"] == "step_end"]
    decision = _newest(root, run_id, "decision", "decision.json")
    facts = {
        "run_id": run_id,
        "verdict": _verdict(state, decision, steps),
        "config": _config(folder),
        "steps": steps,
        "metrics": _newest(root, run_id, "evaluation", "metrics.json").get("metrics", {}),
        "rules": decision.get("rules", []),
        "history": history.read(storage.join(root, run_id, "checkpoints")),
        "incidents": [each for each in happened if each["event"] in ("restart", "life")],
    }
    report.write(facts, path)


def _verdict(state: str, decision: dict[str, Any], steps: list[dict[str, Any]]) -> str:
    for step in steps:
        if step["status"] != "done":
            return str(step["status"])
    if state and state not in ("SUCCEEDED", "SUCCESS"):
        return "failed"
    return str(decision.get("decision", "done"))


def _newest(root: str, run_id: str, kind: str, name: str) -> dict[str, Any]:
    found = storage.published(storage.join(root, run_id, kind))
    if not found:
        return {}
    uri, _ = max(found, key=lambda pair: pair[1].created)
    loaded: dict[str, Any] = json.loads(storage.read_file(uri, name))
    return loaded


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.exists():
        return {}
    loaded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return loaded

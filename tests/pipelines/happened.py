"""Events of a run as its steps write them."""

from __future__ import annotations

from typing import Any

Event = dict[str, Any]
STEPS = ("resolve_config", "prepare_data", "train_model", "evaluate_model", "check_gate")


def begun(step: str) -> Event:
    """Return the event of a step that begins."""
    return {"event": "step_begin", "time": 1.0, "step": step}


def ended(step: str, status: str = "done", code: int = 0, **fields: Any) -> Event:
    """Return the event of a step that ends."""
    return {
        "event": "step_end",
        "time": 2.0,
        "step": step,
        "status": status,
        "exit_code": code,
        "error": "",
        "seconds": 1.5,
        "figures": {},
        "uri": "",
        **fields,
    }


def done(step: str, **fields: Any) -> list[Event]:
    """Return the events of a step that was done."""
    return [begun(step), ended(step, **fields)]


def judged(word: str, *reasons: str) -> list[Event]:
    """Return the events of a run up to the gate and its decision."""
    before = [event for step in STEPS[:-1] for event in done(step)]
    return [*before, *done("check_gate", figures={"decision": word, "reasons": list(reasons)})]


def promoted() -> list[Event]:
    """Return the events of a model that was exported and became champion."""
    figures = {"decision": "promoted", "version": 1, "promotion": 1, "reasons": []}
    return [*done("export_model"), *done("register_model", figures=figures)]

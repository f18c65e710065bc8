"""Events of a run, in the form in which its steps write them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flotilla.trainer.events import Event, StepBegin, StepEnd, to_tree

STEPS = ("resolve_config", "prepare_data", "train_model", "evaluate_model", "check_gate")


def begun(step: str, time: float = 1.0) -> StepBegin:
    return StepBegin(time=time, step=step)


def ended(
    step: str, status: str = "done", code: int = 0, time: float = 2.0, **fields: Any
) -> StepEnd:
    whole = {"seconds": 1.5, **fields}
    return StepEnd(time=time, step=step, status=status, exit_code=code, **whole)


def done(step: str, time: float = 2.0, **fields: Any) -> list[Event]:
    end = ended(step, time=time, **fields)
    return [begun(step, time=time - end.seconds), end]


def judged(word: str, *reasons: str) -> list[Event]:
    before = [event for step in STEPS[:-1] for event in done(step)]
    return [*before, *done("check_gate", metrics={"decision": word, "reasons": list(reasons)})]


def promoted(**more: Any) -> list[Event]:
    metrics = {"decision": "promoted", "version": 1, "promotion": 1, "reasons": [], **more}
    return [*done("export_model"), *done("register_model", metrics=metrics)]


def write(folder: Path, events: Iterable[Event]) -> None:
    lines = [json.dumps(to_tree(event)) + "\n" for event in events]
    (folder / "events.jsonl").write_text("".join(lines), encoding="utf-8")

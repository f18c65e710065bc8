"""The exit step of a sweep: ends the jobs of all trials, writes their table and the report."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kfp import dsl

from flotilla.components import finish, launchers
from flotilla.components.image import component
from flotilla.components.records.record import Step, run
from flotilla.components.records.run_store import find_root, find_run_id
from flotilla.components.records.step_record import read_records
from flotilla.components.sweeps import run_trial
from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.sweeps import page
from flotilla.trainer.sweeps.sweep import Sweep, to_markdown

TABLE = "sweep.md"


@component
def finish_sweep(
    status: dsl.PipelineTaskFinalStatus,
    root: str,
    settings: dict,  # type: ignore[type-arg]
    kfp_run_id: str,
    sweep: str,
    report: dsl.Output[dsl.HTML],
    summary: dsl.Output[dsl.Markdown],
    trials: dsl.Output[dsl.Markdown],
) -> None:
    """End the training jobs that still exist; write the table of trials and the report."""
    from flotilla.components.sweeps.finish_sweep import run_step

    run_step(locals())


def run_step(call: Mapping[str, Any]) -> None:
    """End the jobs of all trials, write their table, and then run the body of `finish`."""
    step = Step(**call)
    run_id = find_run_id(step.kfp_run_id)
    # A failure here must not prevent the report.
    with suppress(UserError):
        plan = run_trial.parse_sweep(step.sweep)
        for trial in plan.trials:
            with suppress(UserError):
                launchers.end(step.settings, run_trial.trial_run_id(run_id, trial.number))
        found = find_root(step.root, step.report.uri, step.kfp_run_id)
        swept = _read_sweep(plan, found, run_id)
        text = to_markdown(swept)
        Path(step.trials.path).parent.mkdir(parents=True, exist_ok=True)
        Path(step.trials.path).write_bytes(text)
        storage.write_bytes(storage.join(found, run_id, TABLE), text)
        storage.write_bytes(storage.join(found, run_id, page.PAGE), page.render(swept))
    run(finish.work, {name: each for name, each in call.items() if name not in ("sweep", "trials")})


def _read_sweep(plan: Sweep, root: str, run_id: str) -> Sweep:
    records = read_records(storage.join(root, run_id))
    best = next((each.metrics.get("best") for each in records if each.step == "choose_trial"), 0)
    return replace(
        plan,
        sweep_id=f"{plan.sweep_id} ({run_id})",
        trials=tuple(run_trial.read_trial(root, run_id, each) for each in plan.trials),
        best=int(best or 0),
    )

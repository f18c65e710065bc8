"""Chooses the trials of a sweep that survive a rung, and the best trial."""

from typing import NamedTuple

from flotilla.components.image import component
from flotilla.components.records.record import Step
from flotilla.components.sweeps import run_trial
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import read_record
from flotilla.trainer.sweeps.sweep import (
    DONE,
    REDUCTION,
    Trial,
    find_best,
    find_objective,
    rank_trials,
)


@component
def choose_trial(
    config: str,
    root: str,
    run_id: str,
    sweep: str,
    ended: list,  # type: ignore[type-arg]
    rung: int,
) -> NamedTuple("Chosen", [("config", str), ("checkpoint", str)]):
    """Publish which trials continue; return the configuration and checkpoint of the best one."""
    from flotilla.components.records.record import run
    from flotilla.components.sweeps.choose_trial import work

    return run(work, locals())


class Chosen(NamedTuple):
    """The configuration of the best trial, as JSON, and the URI of its checkpoint."""

    config: str
    checkpoint: str


def work(step: Step) -> Chosen:
    """Run the only stage of the step."""
    return step.stage("choose_trial", choose)


def choose(step: Step) -> Chosen:
    """Rank the trials by their validation metric, and publish the survivors of a rung.

    `ended` lists the trials that finished this rung, each as JSON.
    """
    plan = run_trial.parse_sweep(step.sweep)
    ended_here = [each for text in step.ended if (each := read_record(Trial, text))]
    here = {each.number: each for each in ended_here}
    every = [
        here.get(each.number) or run_trial.read_trial(step.root, step.run_id, each)
        for each in plan.trials
    ]
    # If all trials of this rung failed, use the results of earlier rungs.
    best = find_best(every, plan.objective)
    if best is None:
        error = next((each.error for each in every if each.error), "none was reported")
        raise UserError(f"all {len(every)} trials failed; the first error: {error}")
    objective = find_objective(every, plan.objective)
    order = [each for each in rank_trials(every, step.rung, objective) if each.status == DONE]
    going = max(1, len(order) // REDUCTION)
    run_trial.publish_survivors(
        step.root, step.run_id, step.rung + 1, [each.number for each in order[:going]]
    )
    step.output.metrics = {
        "best": best.number,
        objective.metric: best.last.value if best.last else None,
        "trials": len(here),
        "failed": sum(bool(each.error) for each in here.values()),
        **best.settings,
    }
    settings = plan.configure(best, best.rung, Config.model_validate_json(step.config))
    return Chosen(config=settings.model_dump_json(), checkpoint=best.checkpoint)

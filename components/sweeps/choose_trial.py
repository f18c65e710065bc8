"""Choose which trials of a sweep go on: those of the next rung, or the best of all."""

from typing import NamedTuple

from components.image import component
from components.locations import run_at
from components.records.record import StepOutput, tried
from components.sweeps import run_trial
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.json_records import from_tree, parse
from trainer.sweeps.sweep import DONE, REDUCTION, Trial, best_of, ranked


@component
def choose_trial(
    config: str,
    root: str,
    run_id: str,
    sweep: str,
    ended: list,  # type: ignore[type-arg]
    rung: int,
) -> NamedTuple("Chosen", [("config", str), ("checkpoint", str)]):
    """Publish which trials go on; return configuration and checkpoint of the best one."""
    from components.sweeps.choose_trial import run_step

    return run_step(config, root, run_id, sweep, ended, rung)


class Chosen(NamedTuple):
    """What the best trial has."""

    config: str
    checkpoint: str


def run_step(
    config: str, root: str, run_id: str, sweep: str, ended: list[str], rung: int
) -> Chosen:
    """Choose by the metric of validation among the trials that `ended` a rung, as JSON texts."""

    def work(record: StepOutput) -> Chosen:
        plan = run_trial.sweep_of(sweep)
        ended_here = [each for text in ended if (each := from_tree(Trial, parse(text)))]
        here = {each.number: each for each in ended_here}
        every = [
            here.get(each.number) or run_trial.known(root, run_id, each) for each in plan.trials
        ]
        # Where all of a rung failed, what an earlier one has reached still counts.
        best = best_of(every, plan.objective)
        if best is None:
            error = next((each.error for each in every if each.error), "none has ended")
            raise UserError(f"all {len(every)} trials failed; the first: {error}")
        order = [each for each in ranked(every, rung, plan.objective) if each.status == DONE]
        going = max(1, len(order) // REDUCTION)
        run_trial.go_on(root, run_id, rung + 1, [each.number for each in order[:going]])
        record.metrics = {
            "best": best.number,
            plan.objective.metric: best.last.value if best.last else None,
            "trials": len(here),
            "failed": sum(bool(each.error) for each in here.values()),
            **best.settings,
        }
        settings = plan.config_on(best, best.rung, Config.model_validate_json(config))
        return Chosen(config=settings.model_dump_json(), checkpoint=best.checkpoint)

    return tried("choose_trial", run_at(root, run_id), work)

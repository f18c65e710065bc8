"""Choose which trials of a sweep go on: those of the next rung, or the best of all."""

from typing import NamedTuple

from components.image import component
from components.locations import run_at
from components.records.record import StepOutput, tried
from components.sweeps import run_trial
from trainer.config.schema import Config
from trainer.errors import UserError
from trainer.json_records import from_tree, parse
from trainer.sweeps.trial import REDUCTION, Trial, ranked


@component
def choose_trial(
    config: str,
    root: str,
    run_id: str,
    sweep: str,
    ended: list,  # type: ignore[type-arg]
    rung: int,
) -> NamedTuple("Chosen", [("numbers", list), ("config", str), ("checkpoint", str)]):
    """Return the numbers of the trials that go on, and configuration and checkpoint of the best."""
    from components.sweeps.choose_trial import run_step

    return run_step(config, root, run_id, sweep, ended, rung)


class Chosen(NamedTuple):
    """The trials that go on, the best first; and what the best has."""

    numbers: list[str]
    config: str
    checkpoint: str


def run_step(
    config: str, root: str, run_id: str, sweep: str, ended: list[str], rung: int
) -> Chosen:
    """Choose by the metric of validation among the trials that `ended` a rung, as JSON texts."""

    def work(record: StepOutput) -> Chosen:
        plan = run_trial.sweep_of(sweep)
        found = [each for text in ended if (each := from_tree(Trial, parse(text)))]
        order = [each for each in ranked(found, rung, plan.objective) if not each.error]
        if not order:
            error = next((each.error for each in found if each.error), "none has ended")
            raise UserError(f"all {len(found)} trials failed; the first: {error}")
        best = order[0]
        numbers = [str(each.number) for each in order[: max(1, len(order) // REDUCTION)]]
        value = best.last.value if best.last else None
        record.metrics = {
            "best": best.number,
            plan.objective.metric: value,
            "trials": len(found),
            "failed": sum(bool(each.error) for each in found),
            **best.settings,
        }
        settings = plan.config_on(best, rung, Config.model_validate_json(config))
        return Chosen(
            numbers=numbers, config=settings.model_dump_json(), checkpoint=best.checkpoint
        )

    return tried("choose_trial", run_at(root, run_id), work)

"""The steps of a sweep: they train its trials, choose the best one, and end the run."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kfp import dsl

from flotilla.components import finish, launchers, train_model
from flotilla.components.image import component
from flotilla.components.records.record import Step, run
from flotilla.components.records.run_store import TRIALS, find_root, find_run_id, record_uri
from flotilla.components.records.step_record import StepRecord, read_records
from flotilla.components.table import find_maker
from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.features import length
from flotilla.trainer.runtime.errors import INTERRUPTED, ConfigError, UserError
from flotilla.trainer.runtime.json_records import parse, read_record, tree_of
from flotilla.trainer.sweeps import page
from flotilla.trainer.sweeps.sweep import (
    DONE,
    FAILED,
    REDUCTION,
    Sweep,
    Trial,
    find_best,
    find_objective,
    rank_trials,
    to_markdown,
)

#: The result of the step if the rung has no trial at `place`.
EMPTY = "{}"
TABLE = "sweep.md"
# Arguments that the training step does not accept.
_OWN = ("sweep", "place", "rung")


@component
def run_trial(
    config: str,
    root: str,
    run_id: str,
    sweep: str,
    place: str,
    rung: int,
    dataset: str,
    image: str,
    store_secret: str,
    checkpoint: dsl.Output[dsl.Model],
    mlpipeline_ui_metadata: dsl.Output[dsl.Artifact],
    dataset_descriptor: dsl.Input[dsl.Dataset] = None,
) -> str:
    """Train the trial at this place up to the steps of the rung; return its result as JSON."""
    from flotilla.components.sweeps import train_trial

    return train_trial(locals())


def train_trial(call: Mapping[str, Any]) -> str:
    """Train a trial as a separate run. A retry of the step resumes this run.

    A failed trial counts as a result and does not fail the sweep.

    `config` is common to all trials; `place` is the zero-based index of the trial in the `rung`.
    """
    root, run_id, rung = call["root"], call["run_id"], call["rung"]
    plan, began = parse_sweep(call["sweep"]), time.monotonic()
    planned = _find_trial(plan, root, run_id, int(call["place"]), rung)
    if planned is None:
        return EMPTY
    trial = read_trial(root, run_id, planned)
    trial = replace(trial, run_id=trial_run_id(run_id, planned.number), rung=rung)
    try:
        settings = plan.configure(trial, rung, Config.model_validate_json(call["config"]))
        settings = length.resolve_for_dataset(settings, call["dataset"])
        training = {name: each for name, each in call.items() if name not in _OWN}
        of_trial = {"config": settings.model_dump_json(), "run_id": trial.run_id}
        uri = run(train_model.work, {**training, **of_trial})
        record = _find_record(root, trial.run_id)
        trial = replace(trial, metrics=dict(record.metrics) if record else {}, checkpoint=uri)
        main = record.main if record else None
        trial = plan.add_result(trial, rung, main)
    except ConfigError as error:
        trial = replace(trial, status=FAILED, error=str(error))
    except SystemExit as ended:
        # Any other failure is a result of the trial, so only an interrupt may end the step.
        if ended.code == INTERRUPTED:
            raise
        record = _find_record(root, trial.run_id)
        why = record.error if record else ""
        trial = replace(trial, status=FAILED, error=why or "see the log of its step")
    trial = replace(trial, seconds=trial.seconds + time.monotonic() - began)
    text = json.dumps(tree_of(trial))
    storage.write_bytes(_uri(root, run_id, trial.number), text.encode())
    return text


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
    from flotilla.components.sweeps import choose

    return run(choose, locals(), "choose_trial")


class Chosen(NamedTuple):
    """The configuration of the best trial, as JSON, and the URI of its checkpoint."""

    config: str
    checkpoint: str


def choose(step: Step) -> Chosen:
    """Run the only stage of the step."""
    return step.stage("choose_trial", choose_best)


def choose_best(step: Step) -> Chosen:
    """Rank the trials by their validation metric, and publish the survivors of a rung.

    `ended` lists the trials that finished this rung, each as JSON.
    """
    plan = parse_sweep(step.sweep)
    ended_here = [each for text in step.ended if (each := read_record(Trial, text))]
    here = {each.number: each for each in ended_here}
    every = [
        here.get(each.number) or read_trial(step.root, step.run_id, each) for each in plan.trials
    ]
    # If all trials of this rung failed, use the results of earlier rungs.
    best = find_best(every, plan.objective)
    if best is None:
        error = next((each.error for each in every if each.error), "none was reported")
        raise UserError(f"all {len(every)} trials failed; the first error: {error}")
    objective = find_objective(every, plan.objective)
    order = [each for each in rank_trials(every, step.rung, objective) if each.status == DONE]
    going = max(1, len(order) // REDUCTION)
    publish_survivors(
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
    from flotilla.components.sweeps import end_sweep

    end_sweep(locals())


def end_sweep(call: Mapping[str, Any]) -> None:
    """End the jobs of all trials, write their table, and then run the body of `finish`."""
    step = Step(**call)
    run_id = find_run_id(step.kfp_run_id)
    # A failure here must not prevent the report.
    with suppress(UserError):
        plan = parse_sweep(step.sweep)
        for trial in plan.trials:
            with suppress(UserError):
                launchers.end(step.settings, trial_run_id(run_id, trial.number))
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
        trials=tuple(read_trial(root, run_id, each) for each in plan.trials),
        best=int(best or 0),
    )


def publish_survivors(root: str, run_id: str, rung: int, numbers: Sequence[int]) -> None:
    """Publish the numbers of the trials that continue to a rung. Raises `UserError`."""
    storage.write_bytes(_rung(root, run_id, rung), json.dumps(list(numbers)).encode())


def _find_trial(plan: Sweep, root: str, run_id: str, place: int, rung: int) -> Trial | None:
    every = [each.number for each in plan.trials]
    numbers = parse(storage.read_bytes(_rung(root, run_id, rung))) if rung else every
    taken = numbers[place : place + 1]
    return next((each for each in plan.trials if each.number in taken), None)


def parse_sweep(text: str) -> Sweep:
    """Parse the run parameter `sweep`. Raises `ConfigError`."""
    if found := read_record(Sweep, text):
        return found
    raise ConfigError("sweep: invalid value; compile the pipeline with `flotilla sweep --compile`")


def trial_run_id(run_id: str, number: int) -> str:
    """Return the run id of a trial."""
    return f"{run_id}-t{number:02}"


def read_trial(root: str, run_id: str, planned: Trial) -> Trial:
    """Return the published trial, or the planned one if it has not ended yet."""
    with suppress(storage.Missing):
        text = storage.read_bytes(_uri(root, run_id, planned.number))
        return read_record(Trial, text) or planned
    return planned


def _uri(root: str, run_id: str, number: int) -> str:
    return record_uri(storage.join(root, run_id), TRIALS, f"{number:04}")


def _rung(root: str, run_id: str, rung: int) -> str:
    return record_uri(storage.join(root, run_id), TRIALS, f"rung-{rung}")


def _find_record(root: str, run_id: str) -> StepRecord | None:
    records = read_records(storage.join(root, run_id))
    return next((each for each in records if each.step == find_maker("checkpoint").name), None)

"""Trains one trial of a sweep. A failed trial counts as a result and does not fail the sweep."""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kfp import dsl

from flotilla.components import train_model
from flotilla.components.image import component
from flotilla.components.records.record import run
from flotilla.components.records.run_store import TRIALS, record_uri
from flotilla.components.records.step_record import StepRecord, read_records
from flotilla.components.table import find_maker
from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.features import length
from flotilla.trainer.runtime.errors import INTERRUPTED, ConfigError
from flotilla.trainer.runtime.json_records import parse, read_record, tree_of
from flotilla.trainer.sweeps.sweep import FAILED, Sweep, Trial

#: The result of the step if the rung has no trial at `place`.
EMPTY = "{}"
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
    from flotilla.components.sweeps.run_trial import run_step

    return run_step(locals())


def run_step(call: Mapping[str, Any]) -> str:
    """Train a trial as a separate run. A retry of the step resumes this run.

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

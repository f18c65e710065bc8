"""What a run has cost: by what it held, for how long, whatever became of it."""

from dataclasses import replace

import pytest

from components.records.gather_report import cost, held_by
from components.records.step_record import StepRecord, Try
from trainer.config.load import parse_config

TRAIN = StepRecord(step="train_model", status="failed", began=200.0, seconds=1800.0)
PREPARE = StepRecord(step="prepare_data", status="done", began=0.0, seconds=200.0)


def config(**sections):
    return parse_config(sections).model_dump()


@pytest.mark.parametrize(
    ("strategy", "gpus", "held"),
    [
        ("async_parameter_server", 2, {"tasks": {"ps": 1, "worker": 3, "chief": 1}, "gpus": 6}),
        ("multi_worker_mirrored", 1, {"tasks": {"worker": 3}, "gpus": 3}),
        # One process, which has the GPUs of one worker.
        ("single", 4, {"tasks": {"chief": 1}, "gpus": 4}),
    ],
)
def test_what_a_cluster_holds(strategy, gpus, held):
    cluster = {"workers": 3, "gpus_per_worker": gpus}
    assert held_by(config(training={"strategy": strategy}, cluster=cluster)) == held


def test_a_failed_training_costs_what_it_held():
    found = cost(config(cluster={"workers": 2, "gpus_per_worker": 1}), [PREPARE, TRAIN])
    assert found == {
        "tasks": {"ps": 1, "worker": 2, "chief": 1},
        "task_hours": 2.0,
        "gpu_hours": 1.0,
        "seconds_of_all_steps": 2000.0,
    }


def test_earlier_tries_count():
    found = cost(
        config(),
        [PREPARE, replace(TRAIN, earlier=(Try(began=0.0, seconds=1800.0, status="failed"),))],
    )
    assert (found["task_hours"], found["seconds_of_all_steps"]) == (4.0, 3800.0)


def test_without_a_configuration_the_record_of_training_says_what_it_held():
    held = {"tasks": {"chief": 1, "worker": 1}, "gpus": 8}
    found = cost({}, [replace(TRAIN, held=held)])
    assert (found["task_hours"], found["gpu_hours"]) == (1.0, 4.0)


@pytest.mark.parametrize("steps", [[], [PREPARE]])
def test_a_run_that_never_trained_has_no_cost_to_tell(steps):
    assert cost(config(), steps) == {}
    assert cost({}, [PREPARE, TRAIN]) == {}

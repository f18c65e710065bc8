"""Tests that a cluster survives tasks that stall."""

import signal

import pytest

from flotilla.trainer.cluster import termination
from flotilla.trainer.cluster.local import reserve_cluster
from flotilla.trainer.config.topology import Task
from flotilla.trainer.events import AttemptBegin, Restart
from flotilla.trainer.runtime.errors import BEGIN_AGAIN
from tests.cluster.by_hand import by_hand
from tests.cluster.launched import launched

pytestmark = pytest.mark.cluster

EVERY = 200

STALLED_STEPS = 1500
STALL_SECONDS = 8


def settings(strategy: str, **cluster: object) -> dict[str, object]:
    training = {
        "strategy": strategy,
        "steps": STALLED_STEPS,
        "checkpoint_every": EVERY,
        "validate_every": 0,
        "stall_timeout": STALL_SECONDS,
    }
    return {"training": training, "cluster": {"workers": 2, "max_restarts": 2, **cluster}}


def stopped(dataset, folder, config, task, waiting=()):
    """Stop a task with SIGSTOP during training; return the run after it has succeeded."""
    with launched(config, dataset, folder) as run:
        run.wait_for_step(EVERY + 1)
        run.task(task).send_signal(signal.SIGSTOP)
        code, said = run.end()
        assert code == 0, said
    assert STALLED_STEPS <= run.newest() <= STALLED_STEPS + 1
    first = run.events(Restart)[0]
    seconds = 2 * STALL_SECONDS if task == "chief-0" else STALL_SECONDS
    assert (first.task, first.cause) in [
        (task, f"no heartbeat for {seconds} s"),
        *((each, f"exit code {BEGIN_AGAIN}") for each in waiting),
    ]
    assert {event.restarts for event in run.events(Restart)} == {1}
    for attempt in run.events(AttemptBegin)[1:]:
        assert attempt.global_step >= EVERY
        assert attempt.global_step % EVERY == 0
    return run


@pytest.mark.slow
@pytest.mark.long
def test_asynchronous_training_goes_on_without_a_stopped_worker(dataset, tmp_path):
    run = stopped(dataset, tmp_path, settings("async_parameter_server"), "worker-1")
    assert len(run.events(AttemptBegin)) == 1


@pytest.mark.slow
@pytest.mark.long
def test_synchronous_updates_do_not_wait_for_a_stopped_worker(dataset, tmp_path):
    run = stopped(dataset, tmp_path, settings("sync_parameter_server"), "worker-1")
    assert len(run.events(AttemptBegin)) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("task", [pytest.param("ps-0", marks=pytest.mark.long), "chief-0"])
def test_a_stopped_server_or_chief_costs_an_attempt(dataset, tmp_path, task):
    run = stopped(dataset, tmp_path, settings("async_parameter_server"), task)
    assert len(run.events(AttemptBegin)) == 2


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.long
@pytest.mark.parametrize("task", ["worker-0", "worker-1"])
def test_mirrored_workers_begin_again_together(dataset, tmp_path, task):
    config = settings("multi_worker_mirrored", communication="ring")
    run = stopped(dataset, tmp_path, config, task, waiting={"worker-0", "worker-1"} - {task})
    assert len(run.events(AttemptBegin)) == 2
    assert {event.task for event in run.events(Restart)} == {"worker-0", "worker-1"}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_towers_begin_again_when_one_of_them_is_stopped(dataset, tmp_path):
    run = stopped(dataset, tmp_path, settings("in_graph"), "worker-0")
    assert len(run.events(AttemptBegin)) == 2


@pytest.mark.slow
@pytest.mark.long
def test_without_a_supervisor_a_waiting_task_names_the_silent_one(dataset, tmp_path):
    waits, stops = (Task(role="worker", index=index) for index in range(2))
    config = settings("multi_worker_mirrored", communication="ring")
    config["training"]["steps"] = 100_000
    with (
        reserve_cluster({"worker": 2}) as cluster,
        by_hand(tmp_path, dataset, cluster, config) as tasks,
    ):
        for task in (waits, stops):
            tasks.start(task)
        tasks.wait_for(waits, '"event": "progress"')
        tasks.processes[stops].send_signal(signal.SIGSTOP)
        assert tasks.end_of(waits) == BEGIN_AGAIN, tasks.log(waits)
    message = termination.read(tmp_path / str(waits))
    # A heartbeat of TensorFlow may have timed out first.
    assert message.startswith(
        (
            f"no progress for {STALL_SECONDS} s: worker-1 does not answer",
            "a task of the cluster is gone",
        )
    )
    assert "worker-1" in message

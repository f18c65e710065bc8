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

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

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


ASYNC, SYNC, MIRRORED = "async_parameter_server", "sync_parameter_server", "multi_worker_mirrored"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("strategy", "task", "attempts"),
    [
        (ASYNC, "chief-0", 2),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in (
                (ASYNC, "ps-0", 2),
                (ASYNC, "worker-1", 1),
                (SYNC, "worker-1", 1),
                (MIRRORED, "worker-0", 2),
                (MIRRORED, "worker-1", 2),
                ("in_graph", "worker-0", 2),
            )
        ),
    ],
)
def test_a_stopped_task_costs_at_most_an_attempt(dataset, tmp_path, strategy, task, attempts):
    ring = {"communication": "ring"} if strategy == MIRRORED else {}
    with launched(settings(strategy, **ring), dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 1)
        run.task(task).send_signal(signal.SIGSTOP)
        code, said = run.end()
        assert code == 0, said
    assert STALLED_STEPS <= run.newest() <= STALLED_STEPS + 1
    restarts, begun = run.events(Restart), run.events(AttemptBegin)
    # Mirrored workers begin again together, and the waiting one may be the first.
    together = {"worker-0", "worker-1"} if strategy == MIRRORED else {task}
    seconds = 2 * STALL_SECONDS if task == "chief-0" else STALL_SECONDS
    assert (restarts[0].task, restarts[0].cause) in [
        (task, f"no heartbeat for {seconds} s"),
        *((each, f"exit code {BEGIN_AGAIN}") for each in together - {task}),
    ]
    assert strategy != MIRRORED or {event.task for event in restarts} == together
    assert {event.restarts for event in restarts} == {1}
    assert len(begun) == attempts
    for attempt in begun[1:]:
        assert attempt.global_step >= EVERY
        assert attempt.global_step % EVERY == 0


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

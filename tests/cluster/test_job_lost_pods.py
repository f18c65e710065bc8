"""Training on Kubernetes whose pods and tasks are taken away, one of each role."""

from __future__ import annotations

import pytest

from tests.cluster.job_training import on_engines
from trainer.events import AttemptBegin, Progress, Restart

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]
# Synchronous training waits for a worker, so that it is there again before the end.
STRATEGIES = {"worker-1": "sync_parameter_server"}
BY_ROLE = pytest.mark.parametrize(
    "task",
    [
        "chief-0",
        pytest.param("worker-1", marks=pytest.mark.long),
        pytest.param("ps-0", marks=pytest.mark.long),
    ],
)


def begun(training, task, steps=1500):
    return training.begun(
        steps, training={"strategy": STRATEGIES.get(task, "async_parameter_server")}
    )


def require_exact_end(training, steps=1500):
    code, message = training.end()
    assert (code, training.published()) == (0, steps), message
    training.require_nothing_left()


@pytest.mark.long
@BY_ROLE
@pytest.mark.parametrize("engine", ["tfjob"])
def test_a_tfjob_that_loses_a_pod_is_made_again_in_the_same_step(training, task):
    with begun(training, task):
        training.wait(Progress)
        before = training.kube.take_away(task, "EvictionByEvictionAPI")
        training.kube.pod(task, but=before["metadata"]["uid"])
        training.wait(AttemptBegin)
        require_exact_end(training)


@pytest.mark.long
@BY_ROLE
@pytest.mark.parametrize("engine", ["jobset"])
def test_a_jobset_that_loses_a_pod_gracefully_loses_no_more(training, task):
    with begun(training, task):
        training.wait(Progress)
        job, before = training.job()["metadata"]["uid"], training.uids()
        training.kube.take_away(task, "EvictionByEvictionAPI")
        training.kube.pod(task, but=before[task])
        after = training.uids()
        assert training.job()["metadata"]["uid"] == job
        assert {each for each in before if before[each] != after[each]} == {task}
        if task != "worker-1":
            training.wait(AttemptBegin)
        require_exact_end(training)


@pytest.mark.long
@pytest.mark.parametrize("task", ["worker-1", "ps-0", "chief-0"])
@on_engines()
def test_a_pod_that_is_killed_is_replaced_and_training_survives(training, task):
    with begun(training, task):
        training.wait(Progress)
        training.lose(task)
        if task != "worker-1":
            training.wait(AttemptBegin)
        require_exact_end(training)


@pytest.mark.slow
@on_engines(tfjob=pytest.mark.long)
def test_a_task_that_is_killed_begins_again_in_its_pod(training):
    kube = training.kube
    with training.begun(6000):
        training.wait(Progress)
        before = training.uids()
        for task in ("worker-1", "ps-0", "chief-0"):
            pod = kube.pod(task)["metadata"]
            kube.kubelet.kill_task(pod["namespace"], pod["name"])
            line = training.wait_for_line(f'"task": "{task}", "cause": "exit code 137')
            assert line.startswith(f"[{task}]")
            if task == "ps-0":
                # The chief ends by itself when it sees the loss: the one after it is killed.
                training.wait(AttemptBegin)
        training.wait(Progress)
        assert training.uids() == before
        require_exact_end(training, 6000)
    counted = [each.task for each in training.said(Restart)]
    assert {"worker-1", "ps-0", "chief-0"} <= set(counted)

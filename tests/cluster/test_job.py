"""A job on the Kubernetes stand-in whose pods train: launched, lost, suspended, cancelled."""

import os
import random
import signal

import pytest

from flotilla.components import launchers
from flotilla.components.kubernetes.launcher import delete_jobs
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import VALIDATION_LOSS, read_validations
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import AttemptBegin, Progress, Restart, Suspension
from flotilla.trainer.runtime.errors import INTERRUPTED
from tests.cluster.job_training import on_engines
from tests.kubernetes.cluster import shared
from tests.pipelines.called import call, setting

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]

PUBLISHED = ("dataset", "checkpoint", "evaluation", "decision", "model")
STRATEGIES = ("sync_parameter_server", "in_graph", "multi_worker_mirrored", "single")


def require_plain_run(training, tasks):
    code, message = training.end()
    assert (code, training.published()) == (0, 400), message
    assert {line.partition(" ")[0] for line in training.lines} >= {f"[{task}]" for task in tasks}
    training.require_nothing_left()


@on_engines(tfjob=pytest.mark.long)
@pytest.mark.slow
def test_all_steps_are_trained_and_nothing_is_left(training):
    with training.begun(400):
        require_plain_run(training, ["chief-0", "ps-0", "worker-0", "worker-1"])


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_engines(tfjob=pytest.mark.long, jobset=pytest.mark.long)
def test_all_steps_are_trained_with_each_strategy(training, strategy):
    tasks = {
        "single": ["chief-0"],
        "multi_worker_mirrored": ["worker-0", "worker-1"],
    }.get(strategy, ["chief-0", "ps-0", "worker-0", "worker-1"])
    with training.begun(400, training={"strategy": strategy}):
        require_plain_run(training, tasks)


@on_engines(tfjob=pytest.mark.long, jobset=pytest.mark.long)
def test_the_pipeline_is_blessed_with_the_same_artifacts_as_on_this_machine(kube, engine, tmp_path):
    def run(launcher):
        options = setting(
            training__steps=600,
            training__checkpoint_every=300,
            cluster__workers=1,
            cluster__launcher=launcher,
        )
        pods = ["--set", shared(tmp_path)]
        ended = call("run", tmp_path / launcher, *options, *pods, cwd=tmp_path)
        assert (ended.code, ended.answer["status"]) == (0, "blessed"), ended.err + ended.log[-3000:]
        assert ended.answer["global_step"] == 600
        return ended

    ours, local = run(engine), run("local")
    assert set(ours.answer["artifacts"]) == set(local.answer["artifacts"])
    for artifact in PUBLISHED:
        there = storage.verify(ours.answer["artifacts"][artifact])
        here = storage.verify(local.answer["artifacts"][artifact])
        assert there.fields.keys() == here.fields.keys()
        assert [file.path for file in there.files] == [file.path for file in here.files]
    assert "[chief-0]" in ours.log
    assert "[worker-0]" in ours.log
    assert [e.global_step for e in ours.events(Progress)][-1] == 600
    kube.wait_until_deleted()


@on_engines(tfjob=pytest.mark.long, jobset=pytest.mark.long)
def test_without_a_chief_worker_0_leads(training):
    with training.begun(400, kubernetes={"chiefless": True}):
        require_plain_run(training, ["ps-0", "worker-0", "worker-1"])


@on_engines(tfjob=pytest.mark.long, jobset=pytest.mark.long)
def test_an_evaluator_measures_the_checkpoints(training):
    with training.begun(600, workers=1, evaluator=True):
        line = training.wait_for_line('"event": "validation"')
        code, message = training.end()
    assert (code, training.published()) == (0, 600), message
    assert line.startswith("[evaluator-0]")
    rows = read_validations(storage.join(training.root, "checkpoints"))
    assert rows
    assert {row["global_step"] for row in rows} <= {0, 200, 400, 600}
    assert all(0 < row[VALIDATION_LOSS] < 5 for row in rows)
    training.require_nothing_left()


KILLS = int(os.environ.get("FLOTILLA_KILLS", "3"))


@pytest.mark.slow
@on_engines(tfjob=pytest.mark.long)
def test_the_job_of_a_killed_launcher_is_adopted_while_it_trains(training):
    # Longer than the next launcher takes to start.
    settings = {"every": 1000, "kubernetes": {"deadlines": {"heartbeat": 60}}}
    with training.begun(10_000, **settings):
        training.wait(Progress)
        job, pods = training.job()["metadata"]["uid"], training.uids()
        training.kill_launcher()
    with training.begun(10_000, **settings):
        training.wait(Progress)
        assert (training.job()["metadata"]["uid"], training.uids()) == (job, pods)
        code, message = training.end()
    assert (code, training.published()) == (0, 10_000), message
    assert {each.resumed for each in training.said(AttemptBegin)} == {False}
    training.require_nothing_left()


@pytest.mark.slow
@on_engines(tfjob=pytest.mark.long, jobset=pytest.mark.long)
def test_a_launcher_killed_at_random_leaves_no_orphan_and_a_valid_checkpoint(training):
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    kube = training.kube
    for _ in range(KILLS):
        # Between the creation of the job and the middle of training.
        after = len(kube.server.requests) + chance.randrange(1, 25)
        with training.begun(800):
            process = training.step.process
            kube.store.wait(
                lambda p=process, after=after: (
                    len(kube.server.requests) >= after or p.poll() is not None
                )
            )
            training.kill_launcher()
        if chance.random() < 0.3:
            engine = launchers.engine(training.engine)
            delete_jobs(engine, Config().cluster.kubernetes, "run-1")
            kube.wait_until_deleted()
    with training.begun(800):
        code, message = training.end()
    assert (code, training.published()) == (0, 800), (seed, message)
    training.require_nothing_left()


@pytest.mark.slow
@on_engines(tfjob=pytest.mark.long)
def test_without_a_heartbeat_the_guard_ends_the_job_with_a_last_checkpoint(training):
    deadlines = {"heartbeat": 10}
    with training.begun(10**7, every=10**7, kubernetes={"deadlines": deadlines}):
        reached = training.wait(Progress).global_step
        training.step.signal(signal.SIGKILL)
        training.require_nothing_left()
    assert training.published() >= reached > 0


# Synchronous training waits for a worker, so it is back before the end.
JOB_LOST_PODS_STRATEGIES = {"worker-1": "sync_parameter_server"}
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
        steps, training={"strategy": JOB_LOST_PODS_STRATEGIES.get(task, "async_parameter_server")}
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
                # The chief exits by itself when it sees the loss; its successor is killed.
                training.wait(AttemptBegin)
        training.wait(Progress)
        assert training.uids() == before
        require_exact_end(training, 6000)
    counted = [each.task for each in training.said(Restart)]
    assert {"worker-1", "ps-0", "chief-0"} <= set(counted)


@pytest.mark.slow
@on_engines(tfjob=pytest.mark.long)
def test_suspended_and_resumed_training_ends_at_its_exact_step(training):
    with training.begun(8000, every=10**6):
        reached = training.wait(Progress).global_step
        training.kube.suspend(training.job(), True)
        training.kube.store.wait(lambda: not training.kube.pods())
        last = training.published()
        assert last >= reached
        training.kube.suspend(training.job(), False)
        begin = training.wait(AttemptBegin, lambda begin: begin.resumed)
        code, message = training.end()
    assert (code, training.published()) == (0, 8000), message
    assert begin.global_step == last
    assert [each.is_over for each in training.said(Suspension)] == [False, True]
    # A suspension is not a failure.
    assert not training.said(Restart)
    training.require_nothing_left()


CANCELS = int(os.environ.get("FLOTILLA_CANCELS", "1"))
STEPS = 10**7
SECRET = {"pod": {"secret_env": {"AWS_ACCESS_KEY_ID": "store/accesskey"}}}


def require_last_checkpoint(training, reached):
    """Cancel the run, and check that only a checkpoint remains."""
    training.step.signal(signal.SIGTERM)
    code, message = training.end()
    assert code == INTERRUPTED, message
    last = training.published()
    assert last >= reached > 0, message
    uri = storage.join(training.root, "checkpoints", f"step-{last:08d}")
    assert message == f"interrupted at global step {last}; checkpoint {uri}"
    training.require_nothing_left()


@pytest.mark.slow
@on_engines(tfjob=pytest.mark.long)
def test_cancelled_while_training_the_chief_publishes_a_last_checkpoint(training):
    with training.begun(STEPS, every=STEPS, kubernetes=SECRET):
        require_last_checkpoint(training, training.wait(Progress).global_step)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("lost", ["worker", "server"])
@on_engines()
def test_a_cancel_after_a_restart_publishes_the_last_checkpoint(training, lost):
    for _ in range(CANCELS):
        with training.begun(STEPS, every=STEPS):
            reached = training.wait(Progress).global_step
            if lost == "worker":
                training.lose_a_worker()
            else:
                training.lose("ps-0")
                training.wait(AttemptBegin)
            reached = training.wait(Progress).global_step
            require_last_checkpoint(training, reached)


@pytest.mark.slow
@on_engines(jobset=pytest.mark.long)
def test_a_launcher_killed_after_its_request_leaves_a_checkpoint_and_no_job(training):
    with training.begun(STEPS, every=STEPS):
        training.lose_a_worker()
        reached = training.wait(Progress).global_step
        training.step.signal(signal.SIGTERM)
        # KFP may kill the launcher a second later, and also the exit step.
        training.kube.store.wait(training.kube.stop_is_asked)
        training.step.signal(signal.SIGKILL)
        training.end()
        training.require_nothing_left()
    assert training.published() >= reached > 0

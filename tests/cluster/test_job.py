"""Tests jobs whose pods train on a fake cluster: launched, lost, suspended and cancelled."""

import os
import signal

import pytest

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import VALIDATION_LOSS, read_validations
from flotilla.trainer.events import AttemptBegin, Progress, Restart, Suspension
from flotilla.trainer.runtime.errors import INTERRUPTED
from tests.cluster.job_training import on_engines
from tests.kubernetes.cluster import shared
from tests.pipelines.called import call, setting

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]

PUBLISHED = ("dataset", "checkpoint", "evaluation", "decision", "model")
STRATEGIES = ("sync_parameter_server", "in_graph", "multi_worker_mirrored", "single")


def require_plain_run(training, tasks, steps=400):
    code, message = training.end()
    assert (code, training.published()) == (0, steps), message
    assert {line.partition(" ")[0] for line in training.lines} >= {f"[{task}]" for task in tasks}
    training.require_nothing_left()


@pytest.mark.parametrize("strategy", STRATEGIES)
@on_engines(tfjob=pytest.mark.long, jobset=pytest.mark.long)
def test_all_steps_are_trained_with_each_strategy(training, strategy):
    tasks = {"single": ["chief-0"], "multi_worker_mirrored": ["worker-0", "worker-1"]}.get(
        strategy, ["chief-0", "ps-0", "worker-0", "worker-1"]
    )
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


@on_engines(tfjob=pytest.mark.long)
def test_without_a_heartbeat_the_guard_ends_the_job_with_a_last_checkpoint(training):
    deadlines = {"heartbeat": 10}
    with training.begun(10**7, every=10**7, kubernetes={"deadlines": deadlines}):
        reached = training.wait(Progress).global_step
        training.step.signal(signal.SIGKILL)
        training.require_nothing_left()
    assert training.published() >= reached > 0


CANCELS = int(os.environ.get("FLOTILLA_CANCELS", "1"))
STEPS = 10**7
SECRET = {"pod": {"secret_env": {"AWS_ACCESS_KEY_ID": "store/accesskey"}}}


def require_last_checkpoint(training, reached):
    """Cancel the run; check that it reports its last checkpoint and leaves nothing running."""
    training.step.signal(signal.SIGTERM)
    code, message = training.end()
    assert code == INTERRUPTED, message
    last = training.published()
    assert last >= reached > 0, message
    uri = storage.join(training.root, "checkpoints", f"step-{last:08d}")
    assert message == f"interrupted at global step {last}; checkpoint {uri}"
    training.require_nothing_left()


def kill_each_task(training):
    """Kill the process of one task per role; each must be restarted in its pod."""
    for task in ("worker-1", "ps-0", "chief-0"):
        pod = training.kube.pod(task)["metadata"]
        training.kube.kubelet.kill_task(pod["namespace"], pod["name"])
        line = training.wait_for_line(f'"task": "{task}", "cause": "exit code 137')
        assert line.startswith(f"[{task}]")
        if task == "ps-0":
            # The chief exits by itself when it notices the loss, so kill its successor.
            training.wait(AttemptBegin)
    training.wait(Progress)
    assert {"worker-1", "ps-0", "chief-0"} <= {each.task for each in training.said(Restart)}


def suspend_and_resume(training):
    reached, restarts = training.wait(Progress).global_step, len(training.said(Restart))
    training.kube.suspend(training.job(), True)
    training.kube.store.wait(lambda: not training.kube.pods())
    last = training.published()
    assert last >= reached
    training.kube.suspend(training.job(), False)
    assert training.wait(AttemptBegin, lambda begin: begin.resumed).global_step == last
    assert [each.is_over for each in training.said(Suspension)] == [False, True]
    assert len(training.said(Restart)) == restarts


@on_engines(tfjob=pytest.mark.long)
def test_no_step_is_lost_with_a_launcher_with_tasks_in_a_suspension_and_by_a_cancel(training):
    # The job must continue without a launcher until the next launcher has started.
    kubernetes = {**SECRET, "deadlines": {"heartbeat": 60}}
    with training.begun(STEPS, every=STEPS, kubernetes=kubernetes):
        training.wait(Progress)
        job, pods = training.job()["metadata"]["uid"], training.uids()
        training.kill_launcher()
    with training.begun(STEPS, every=STEPS, kubernetes=kubernetes):
        training.wait(Progress)
        assert {each.resumed for each in training.said(AttemptBegin)} == {False}
        kill_each_task(training)
        assert (training.job()["metadata"]["uid"], training.uids()) == (job, pods)
        suspend_and_resume(training)
        require_last_checkpoint(training, training.wait(Progress).global_step)
    steps = training.published() + 200
    with training.begun(steps):
        require_plain_run(training, ["chief-0", "ps-0", "worker-0", "worker-1"], steps)


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


@on_engines(jobset=pytest.mark.long)
def test_a_launcher_killed_after_its_request_leaves_a_checkpoint_and_no_job(training):
    with training.begun(STEPS, every=STEPS):
        reached = training.wait(Progress).global_step
        training.step.signal(signal.SIGTERM)
        # KFP may kill the launcher one second after SIGTERM, and may then kill the exit step too.
        training.kube.store.wait(training.kube.stop_is_asked)
        training.step.signal(signal.SIGKILL)
        training.end()
        training.require_nothing_left()
    assert training.published() >= reached > 0

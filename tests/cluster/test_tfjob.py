"""Training as TFJobs: every pod is a process with the operator's TF_CONFIG."""

from __future__ import annotations

import os
import random
import signal

import pytest

from components.kubernetes.launcher import delete_jobs
from tests.components.kubernetes.attempts import step
from tests.kubernetes.cluster import real_cluster
from tests.pipelines.called import call, setting
from trainer import storage
from trainer.checkpoints.history import VALIDATION_LOSS, read_validations
from trainer.checkpoints.index import newest_checkpoint
from trainer.config.schema import Config
from trainer.events import Progress

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
KILLS = int(os.environ.get("FLOTILLA_KILLS", "3"))
PUBLISHED = ("dataset", "checkpoint", "evaluation", "decision", "model")


@pytest.fixture
def kube(tmp_path, monkeypatch):
    secrets = {"store": {"accesskey": "abc"}}
    with real_cluster(tmp_path, secrets) as made:
        monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig))
        yield made


def settings(steps, **kubernetes):
    return {
        "training": {"steps": steps, "checkpoint_every": 200, "validate_every": 0},
        "cluster": {"workers": 2, "max_restarts": 9, "kubernetes": kubernetes},
    }


def newest(folder):
    """Return the global step of the newest checkpoint, which must be valid."""
    uri, reached = newest_checkpoint(storage.uri_of(folder / "run-1" / "checkpoints"))
    storage.verify(uri)
    return reached


@pytest.fixture
def attempt(kube, dataset, tmp_path):
    root = storage.uri_of(tmp_path / "run-1")
    return lambda tree: step(kube, tree, root=root, dataset=dataset)


def wait_for_line(process, text):
    for line in process.process.stdout:
        if text in line:
            return line
    raise AssertionError(f"no line with {text!r}: {process.end()}")


@pytest.mark.slow
def test_the_pipeline_is_blessed_with_the_same_artifacts_as_on_this_machine(kube, tmp_path):
    def run(launcher):
        options = setting(
            training__steps=600,
            training__checkpoint_every=300,
            cluster__workers=1,
            cluster__launcher=launcher,
        )
        ended = call("run", tmp_path / launcher, *options, cwd=tmp_path)
        assert (ended.code, ended.answer["status"]) == (0, "blessed"), ended.err + ended.log[-3000:]
        assert ended.answer["global_step"] == 600
        return ended

    ours, local = run("tfjob"), run("local")
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


@pytest.mark.slow
def test_cancelled_while_training_the_chief_publishes_a_last_checkpoint(attempt, kube, tmp_path):
    tree = settings(10**6, pod={"secret_env": {"AWS_ACCESS_KEY_ID": "store/accesskey"}})
    with attempt(tree) as process:
        wait_for_line(process, '"event": "progress"')
        process.signal()
        code, _, message = process.end()
    assert code == 130
    assert message == f"interrupted at global step {newest(tmp_path)}; checkpoint " + storage.join(
        storage.uri_of(tmp_path / "run-1"), "checkpoints", f"step-{newest(tmp_path):08d}"
    )
    kube.wait_until_deleted()


@pytest.mark.long
def test_without_a_chief_worker_0_leads(attempt, kube, tmp_path):
    with attempt(settings(200, chiefless=True)) as process:
        code, out, message = process.end()
    assert (code, newest(tmp_path)) == (0, 200), message
    assert "[worker-0]" in out
    kube.wait_until_deleted()


@pytest.mark.long
def test_an_evaluator_measures_the_checkpoints(attempt, kube, tmp_path):
    tree = settings(600)
    tree["cluster"] |= {"workers": 1, "evaluator": True}
    with attempt(tree) as process:
        line = wait_for_line(process, '"event": "validation"')
        code, _, message = process.end()
    assert (code, newest(tmp_path)) == (0, 600), message
    assert line.startswith("[evaluator-0]")
    rows = read_validations(storage.uri_of(tmp_path / "run-1" / "checkpoints"))
    assert rows
    assert {row["global_step"] for row in rows} <= {0, 200, 400, 600}
    assert all(0 < row[VALIDATION_LOSS] < 5 for row in rows)
    kube.wait_until_deleted()


@pytest.mark.long
def test_training_survives_the_loss_of_a_parameter_server_and_a_worker(attempt, kube, tmp_path):
    with attempt(settings(1500)) as process:
        wait_for_line(process, '"event": "progress"')
        for task in ("worker-1", "ps-0"):
            pod = kube.pod(task)["metadata"]
            kube.kubelet.kill(pod["namespace"], pod["name"])
            kube.pod(task, but=pod["uid"])
        code, _, message = process.end()
    assert (code, newest(tmp_path)) == (0, 1500), message
    kube.wait_until_deleted()


@pytest.mark.slow
def test_a_task_that_is_killed_begins_again_in_its_pod(attempt, kube, tmp_path):
    with attempt(settings(1500)) as process:
        wait_for_line(process, '"event": "progress"')
        pods = {task: kube.pod(task)["metadata"] for task in ("worker-1", "ps-0", "chief-0")}
        for task, pod in pods.items():
            kube.kubelet.kill_task(pod["namespace"], pod["name"])
            line = wait_for_line(process, f'"task": "{task}", "cause": "exit code 137')
            assert line.startswith(f"[{task}]")
        wait_for_line(process, '"event": "progress"')
        assert {task: kube.pod(task)["metadata"]["uid"] for task in pods} == {
            task: pod["uid"] for task, pod in pods.items()
        }
        code, _, message = process.end()
    assert (code, newest(tmp_path)) == (0, 1500), message
    kube.wait_until_deleted()


@pytest.mark.slow
def test_a_launcher_killed_at_random_leaves_no_orphan_and_a_valid_checkpoint(
    attempt, kube, tmp_path
):
    seed = random.randrange(10**6)
    chance = random.Random(seed)
    tree = settings(800)
    for _ in range(KILLS):
        # Between the creation of the job and the middle of training.
        after = len(kube.server.requests) + chance.randrange(1, 25)
        with attempt(tree) as process:
            kube.store.wait(
                lambda p=process, after=after: (
                    len(kube.server.requests) >= after or p.process.poll() is not None
                )
            )
            process.signal(signal.SIGKILL)
            process.end()
        if chance.random() < 0.3:
            delete_jobs(Config().cluster.kubernetes, "run-1")
            kube.wait_until_deleted()
    with attempt(tree) as process:
        code, _, message = process.end()
    assert (code, newest(tmp_path)) == (0, 800), (seed, message)
    kube.wait_until_deleted()

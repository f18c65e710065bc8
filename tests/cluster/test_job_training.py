"""Training on Kubernetes to its end: every pod is a process with the TF_CONFIG of its engine."""

from __future__ import annotations

import pytest

from tests.cluster.job_training import on_engines
from tests.pipelines.called import call, setting
from trainer import storage
from trainer.checkpoints.history import VALIDATION_LOSS, read_validations
from trainer.events import Progress

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
        ended = call("run", tmp_path / launcher, *options, cwd=tmp_path)
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

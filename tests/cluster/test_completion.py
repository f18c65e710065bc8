"""The end of training under real tasks: no exit code 0 without its record is a success."""

from __future__ import annotations

import json
import signal

import pytest

from tests.cluster.launched import launched
from trainer import user_code
from trainer.cluster import completion
from trainer.events import Restart

pytestmark = pytest.mark.cluster

STEPS = 60
MODULE = """
import os
import signal
from pathlib import Path

from trainer.cluster import completion
from trainer.models.classifiers import softmax

publish = completion.record


def leave(job, checkpoint):
    os._exit(0)


def die_once(job, checkpoint):
    mark = Path(job.workdir, "died")
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return publish(job, checkpoint)


def model(spec, end):
    # At the last moment: all steps are done, and the last checkpoint is published.
    completion.record = globals()[end]
    return softmax(spec)
"""
OTHERS = ("async_parameter_server", "sync_parameter_server", "in_graph")


def strategies(*often: object) -> list[object]:
    return [*often, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]


SINGLE = pytest.param("single", marks=pytest.mark.long)
MIRRORED = pytest.param("multi_worker_mirrored", marks=pytest.mark.slow)
LONG_MIRRORED = pytest.param("multi_worker_mirrored", marks=pytest.mark.long)


@pytest.fixture
def train(dataset, tmp_path, monkeypatch):
    """Train a model that meddles with the end; return the run, its exit code and its output."""
    (tmp_path / "ends.py").write_text(MODULE, encoding="utf-8")
    monkeypatch.setenv(user_code.FOLDER_VARIABLE, str(tmp_path))

    def run(strategy, end):
        training = {"strategy": strategy, "steps": STEPS, "validate_every": 0}
        config = {
            "model": {"name": "ends:model", "args": {"end": end}},
            "training": training,
            "cluster": {"workers": 2},
        }
        with launched(config, dataset, tmp_path / "run") as run:
            return (run, *run.end())

    return run


@pytest.mark.parametrize("strategy", strategies("single", LONG_MIRRORED))
@pytest.mark.slow
def test_a_leader_that_ends_with_0_before_its_record_has_failed(train, strategy):
    run, code, said = train(strategy, "leave")
    assert code == 1
    assert "ended with exit code 0 before training was over: " in said
    assert said.count("\n") == 1
    assert run.newest() >= STEPS


@pytest.mark.parametrize("strategy", strategies(SINGLE, MIRRORED))
def test_a_kill_between_the_last_checkpoint_and_the_record_costs_no_step(train, strategy, tmp_path):
    run, code, said = train(strategy, "die_once")
    assert code == 0, said
    assert run.newest() == STEPS
    path = tmp_path / "run" / "checkpoints" / completion.FILE
    assert json.loads(path.read_text(encoding="utf-8"))["global_step"] == STEPS
    first, *others = run.events(Restart)
    assert first.cause == f"signal {signal.SIGKILL.name}"
    # The other workers of a mirrored strategy begin again with it.
    assert {each.restarts for each in others} <= {1}

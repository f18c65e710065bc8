"""Mirrored workers as real processes: what they survive, and how they end."""

from __future__ import annotations

import signal

import pytest

from tests.cluster.launched import Launched, launched
from trainer.errors import BEGIN_AGAIN, INTERRUPTED
from trainer.events import AttemptBegin, Restart

pytestmark = pytest.mark.cluster

EVERY = 200
STEPS = 1000
SETTINGS = {
    "training": {
        "strategy": "multi_worker_mirrored",
        "steps": STEPS,
        "checkpoint_every": EVERY,
        "validate_every": 0,
    },
    "cluster": {"workers": 2, "communication": "ring"},
}


@pytest.fixture
def running(dataset, tmp_path):
    with launched(SETTINGS, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 1)
        yield run


def words(run: Launched, task: str) -> str:
    return (run.folder / "cluster" / task / "termination.txt").read_text(encoding="utf-8").strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "other"),
    [("worker-0", "worker-1"), pytest.param("worker-1", "worker-0", marks=pytest.mark.long)],
)
def test_all_begin_again_from_the_newest_checkpoint_when_one_dies(running, killed, other):
    running.kill(killed)
    code, said = running.end()
    assert code == 0, said
    restarts = [(e.task, e.cause, e.restarts) for e in running.events(Restart)]
    assert restarts == [(killed, "signal SIGKILL", 1), (other, f"exit code {BEGIN_AGAIN}", 1)]
    first, second = running.events(AttemptBegin)
    assert first.global_step == 0
    assert second.global_step >= EVERY
    assert second.global_step % EVERY == 0
    assert running.newest() == running.history()[-1]["global_step"] == STEPS
    log = (running.folder / "cluster" / other / "log.txt").read_text(encoding="utf-8")
    assert "flotilla: a task of the cluster is gone: Collective ops is aborted by" in log


@pytest.mark.slow
def test_an_interrupt_ends_all_workers_after_one_last_checkpoint(running):
    running.process.send_signal(signal.SIGTERM)
    code, said = running.end()
    assert code == INTERRUPTED
    newest = running.newest()
    assert newest == running.history()[-1]["global_step"] < STEPS
    assert said.strip() == (
        f"interrupted at global step {newest}; checkpoint {running.checkpoints}/step-{newest:08d}"
    )
    assert words(running, "worker-0") == words(running, "worker-1") == said.strip()


@pytest.mark.slow
def test_a_loss_that_diverges_is_reported_once_with_the_checkpoint_before(dataset, tmp_path):
    wild = {**SETTINGS["training"], "optimizer": {"name": "sgd", "learning_rate": 1e6}}
    with launched({**SETTINGS, "training": wild}, dataset, tmp_path) as run:
        code, said = run.end()
    assert code == 1
    assert said.count("\n") == 1
    assert "training diverged: the loss is" in said
    assert f"{run.checkpoints}/step-00000000" in said
    assert run.newest() == 0

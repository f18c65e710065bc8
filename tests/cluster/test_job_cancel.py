"""A cancelled job publishes its last checkpoint, also when channels have to be opened for it.

The names of pods vanish with the job: what TensorFlow connects after that finds nobody.
"""

from __future__ import annotations

import os
import signal

import pytest

from tests.cluster.job_training import on_engines
from trainer import storage
from trainer.errors import INTERRUPTED
from trainer.events import AttemptBegin, Progress

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]
CANCELS = int(os.environ.get("FLOTILLA_CANCELS", "1"))
STEPS = 10**7
SECRET = {"pod": {"secret_env": {"AWS_ACCESS_KEY_ID": "store/accesskey"}}}


def require_last_checkpoint(training, reached):
    """Cancel, and check that nothing but a checkpoint is left."""
    training.step.signal(signal.SIGTERM)
    code, message = training.end()
    assert code == INTERRUPTED, message
    last = training.published()
    assert last >= reached > 0, message
    uri = storage.join(training.root, "checkpoints", f"step-{last:08d}")
    assert message == f"interrupted at global step {last}; checkpoint {uri}"
    training.require_nothing_left()


@on_engines(tfjob=pytest.mark.long)
def test_cancelled_while_training_the_chief_publishes_a_last_checkpoint(training):
    with training.begun(STEPS, every=STEPS, kubernetes=SECRET):
        require_last_checkpoint(training, training.wait(Progress).global_step)


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
        training.lose_a_worker()
        reached = training.wait(Progress).global_step
        training.step.signal(signal.SIGTERM)
        # As KFP may kill it a second later, and the exit step too.
        training.kube.store.wait(training.kube.stop_is_asked)
        training.step.signal(signal.SIGKILL)
        training.end()
        training.require_nothing_left()
    assert training.published() >= reached > 0

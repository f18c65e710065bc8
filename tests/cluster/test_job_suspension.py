"""A job that is suspended while it trains, and resumed: no step is lost, and none is repeated."""

from __future__ import annotations

import pytest

from tests.cluster.job_training import on_engines
from trainer.events import AttemptBegin, Progress, Restart, Suspension

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(1200)]


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
    # Who has room is no failure.
    assert not training.said(Restart)
    training.require_nothing_left()

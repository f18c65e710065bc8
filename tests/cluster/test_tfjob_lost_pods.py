"""Training as a TFJob whose pods are taken away: real processes, made again and again."""

from __future__ import annotations

import pytest

from tests.cluster.test_tfjob import attempt, kube, newest, settings, wait_for_line
from trainer.events import MARK

__all__ = ["attempt", "kube"]
pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(400)]
PROGRESS = f'{MARK}"progress"'


@pytest.mark.parametrize(
    "task", ["worker-1", pytest.param("ps-0", marks=pytest.mark.long), "chief-0"]
)
def test_training_goes_on_in_the_same_step_after_a_graceful_deletion(attempt, kube, tmp_path, task):
    with attempt(settings(2000)) as process:
        wait_for_line(process, PROGRESS)
        before = kube.take_away(task, "EvictionByEvictionAPI")
        kube.pod(task, but=before["metadata"]["uid"])
        resumed = wait_for_line(process, '"event": "attempt_begin"')
        code, _, message = process.end()
    assert '"resumed": true' in resumed
    assert (code, newest(tmp_path)) == (0, 2000), message
    kube.wait_until_deleted()

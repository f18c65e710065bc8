"""Fixtures: a fake KFP instance, and submissions without a trial of the model."""

import pytest

from flotilla.pipelines.runs import submission
from flotilla.trainer.preflight.check import Checked, require_source
from tests.kfp_instance.fixtures import compiled, instance, remote, uploaded

__all__ = ["compiled", "instance", "remote", "uploaded"]


@pytest.fixture(autouse=True)
def _without_trial(monkeypatch) -> None:
    """Check only the data source before a submission, because a trial takes seconds."""

    def check(config, *, is_remote):
        return Checked(notes=require_source(config.data, is_remote=is_remote))

    monkeypatch.setattr(submission, "check", check)

"""Fixtures: an instance for tests, and no trial of a model in this process."""

import pytest

from flotilla.pipelines.runs import submission
from flotilla.trainer.preflight.check import Checked, require_source
from tests.kfp_instance.fixtures import compiled, instance, remote, uploaded

__all__ = ["compiled", "instance", "remote", "uploaded"]


@pytest.fixture(autouse=True)
def _without_trial(monkeypatch) -> None:
    """Check only the source before a submission, since a trial takes seconds."""

    def check(config, *, is_remote):
        return Checked(notes=require_source(config.data, is_remote=is_remote))

    monkeypatch.setattr(submission, "check", check)

"""Common fixtures of the tests of training."""

import pytest

from flotilla.trainer import events
from tests.trainer.counting import Run


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return Run(tmp_path)

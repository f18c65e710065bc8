"""What the tests of training share."""

import pytest

from tests.trainer.counting import Run
from trainer import events


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return Run(tmp_path)

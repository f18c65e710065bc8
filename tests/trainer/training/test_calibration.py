"""The calibration of a small model, with a real TensorFlow."""

import pytest

from trainer.config.load import load_config
from trainer.errors import ConfigError
from trainer.training import calibration

SOFTMAX = ["model.name=softmax", "model.args={}"]


@pytest.mark.slow
def test_a_model_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "SECONDS", 0.02)
    found = calibration.calibrate(load_config(None, SOFTMAX), tmp_path, [1, 2])
    assert found.bytes == 4 * (64 * 10 + 10)
    # Adam's: twice the model, the counter and the rate.
    assert 2 * found.bytes < found.slots < 2 * found.bytes + 64
    assert found.held == {1: [2600], 2: [2560, 40]}
    assert 0 < found.gradient < 0.1
    assert not found.gpu


@pytest.mark.slow
def test_a_model_that_looks_up_rows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "looks_up", lambda _: True)
    with pytest.raises(ConfigError, match="looks up rows of a table"):
        calibration.calibrate(load_config(None, SOFTMAX), tmp_path, [1])
    monkeypatch.undo()
    wrong = load_config(None, [*SOFTMAX, "cluster.placement={nothing*: 'ps:0'}"])
    with pytest.raises(ConfigError, match="fits no variable"):
        calibration.calibrate(wrong, tmp_path, [1])

"""The file of a sweep: read as it was written, or refused in one line."""

import pytest

from trainer.config.schema import Config
from trainer.errors import ConfigError, UserError
from trainer.sweeps import state
from trainer.sweeps.state import Sweep
from trainer.sweeps.trial import Objective, Trial

RATE = "training.optimizer.learning_rate"


def a_sweep(**more):
    trials = tuple(
        Trial(number=number, settings={RATE: rate}, run_id=f"r{number}")
        for number, rate in enumerate(("0.01", "0.003"), start=1)
    )
    fields = {
        "sweep_id": "s",
        "config": Config().model_dump(mode="json"),
        "source": "my config.yaml",
        "fixed": ("training.steps=90",),
        "keys": (RATE,),
        "objective": Objective(metric="validation_loss", better="lower"),
        "rungs": (30, 90),
        "trials": trials,
        "test": {},
    }
    return Sweep(**{**fields, **more})


def test_it_is_read_as_it_was_written(tmp_path):
    sweep = a_sweep()
    sweep = sweep.with_trial(sweep.reached(sweep.trials[0], 0, 30, 0.25))
    state.write(sweep, tmp_path)
    assert state.read(tmp_path) == sweep
    assert state.read(tmp_path).base == Config()


def test_the_steps_of_a_trial_are_those_of_its_rung():
    sweep = a_sweep()
    config = sweep.config_on(sweep.trials[1], 0, sweep.base)
    assert config.training.steps == 30
    assert config.training.optimizer.learning_rate == 0.003
    alone = a_sweep(rungs=(0,))
    assert alone.config_on(alone.trials[1], 0, alone.base).training.steps == 1500


def test_the_command_of_the_best_is_quoted():
    assert a_sweep().command() == ""
    assert a_sweep(best=2).command() == (
        f"flotilla run 'my config.yaml' --set training.steps=90 --set {RATE}=0.003"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no sweep"),
        ("{", "is damaged"),
        ("{}", "is damaged"),
        ('{"schema": 9}', "another version"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / state.FILE).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        state.read(tmp_path)


def test_a_file_that_cannot_be_written_is_said(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="cannot write"):
        state.write(a_sweep(), tmp_path / "file")

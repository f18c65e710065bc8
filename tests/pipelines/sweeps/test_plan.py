"""Tests that the plan of a sweep is checked before the sweep starts."""

import pytest

from flotilla.pipelines.sweeps import SweepOptions, plan_sweep
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError

BATCHES = ("training.steps=90", "training.batch_size=16,32,64")


def test_each_trial_has_a_run_of_its_own():
    sweep = plan_sweep(SweepOptions(config=Config(), settings=BATCHES))
    assert len({each.run_id for each in sweep.trials}) == 3
    assert sweep.keys == ("training.batch_size",)
    assert sweep.fixed == ("training.steps=90",)
    # With "stop", the run of the best trial would end, because a trial had the same configuration.
    assert sweep.base.training.when_unchanged == "train"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"parallel": 0}, "--parallel 0"),
        ({"seed": 3}, "--seed 3 applies only to --random"),
        ({"seed": -1, "random": 3}, "--seed -1 is not between 0 and"),
        ({"seed": 1 << 32, "tpe": 3}, "--seed 4294967296 is not between 0 and"),
        ({"random": 3, "tpe": 3}, "use only one of them"),
        ({"random": 0}, "--random 0"),
        ({"tpe": 1001}, "--tpe 1001"),
        ({"better": "up"}, "--better 'up'"),
        ({"random": 1}, "has only one trial"),
        ({"settings": ("training.batch_size=16,16",)}, "has only one trial"),
        ({"settings": BATCHES[1:], "config": "/no/such.yaml"}, "cannot read"),
    ],
)
def test_what_cannot_be_done_is_refused(named, message):
    with pytest.raises(ConfigError, match=message):
        plan_sweep(SweepOptions(**{"config": Config(), "settings": BATCHES, **named}))

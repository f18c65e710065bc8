"""Tests that a search space is parsed as a whole and that trials are drawn without duplicates."""

import importlib
import inspect

import pytest

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.model import MODELS
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.sweeps.study import (
    automatic,
    corners,
    draw_trials,
    grid,
    make_config,
    parse_space,
)

RATE = "training.optimizer.learning_rate"


def test_a_grid_has_every_combination_of_the_values_once():
    found = parse_space(Config(), [f"{RATE}=0.01,1e-2,0.003", "training.batch_size=16,64"])
    trials = grid(found)
    assert len(trials) == 4
    assert {(each[RATE], each["training.batch_size"]) for each in trials} == {
        ("0.01", "16"), ("0.01", "64"), ("0.003", "16"), ("0.003", "64"),
    }  # fmt: skip
    given = ["training.steps=70", "model.args={hidden_units: [10, 20]},{hidden_units: [30]}"]
    found = parse_space(Config(), given)
    assert found.base.training.steps == 70
    configs = [make_config(found.base, each) for each in grid(found)]
    assert [each.model.args for each in configs] == [
        {"hidden_units": [10, 20]},
        {"hidden_units": [30]},
    ]
    assert {each.training.steps for each in configs} == {70}


def test_draws_are_those_of_the_seed_within_the_range_and_without_repeats():
    found = parse_space(Config(), [f"{RATE}=0.0001..0.1:log", "training.batch_size=16..64"])
    trials = draw_trials(found, 40, seed=3)
    assert trials == draw_trials(found, 40, seed=3)
    assert trials != draw_trials(found, 40, seed=4)
    rates = [float(each[RATE]) for each in trials]
    assert all(0.0001 <= each <= 0.1 for each in rates)
    # In a log space, half of the values are below the middle of the exponents, about 0.00316.
    assert 10 < sum(each < 0.00316 for each in rates) < 30
    assert all(16 <= int(each["training.batch_size"]) <= 64 for each in trials)
    found = parse_space(Config(), ["training.batch_size=16,32,64"])
    assert len(draw_trials(found, 20, seed=0)) == 3


WRONG = [
    ([], "no key is searched"),
    (["training.steps=100"], "no key is searched"),
    (["training.steps="], "has no value"),
    (["training.steps=,"], "has no value"),
    (["training.steps=1,,2"], "empty"),
    (["training.steps"], "write it as"),
    (["data.seed=1,2"], "same validation examples"),
    (["gate.min={},{loss: 1}"], "same for all trials"),
    (["training.steps=1,2", "training.steps=3,4"], "is already searched"),
    (["training.steps=3", "training.steps=1,2"], "keep one"),
    (["model.args.a=1", "model.args={a: 2},{a: 3}"], "keep one"),
    ([f"{RATE}=0.1..0.01"], "must be below the last"),
    ([f"{RATE}=0..0.01:log"], "above zero"),
    ([f"{RATE}=0.1..0.2,0.3"], "cannot be combined"),
    (["training.lerning=1,2"], "no such key"),
    (["training.batch_size=16,-1"], "the trial training.batch_size=-1"),
    ([f"{RATE}=0.1..0.2"], "--random N"),
    (["training.steps=" + ",".join(map(str, range(1, 1002)))], "at most 1000"),
]


def test_what_is_wrong_is_said_before_the_first_trial():
    for given, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            grid(parse_space(Config(), given))


@pytest.mark.parametrize(
    "given",
    [f"{RATE}=-1..0.1", "cluster.workers=1..99", "training.optimizer.name=adam,sgd,none_such"],
)
def test_every_value_and_both_ends_of_a_range_are_checked(given):
    with pytest.raises(ConfigError, match=r"the trial .*(=-1.0|=99|=none_such):"):
        corners(parse_space(Config(), [given]))


@pytest.mark.parametrize("name", [*sorted(MODELS)[::3], "own_module:net"])
def test_the_space_of_every_model_is_allowed_and_trains_what_it_says(name):
    config = parse_config({"model": {"name": name}})
    texts = automatic(config, ())
    found = parse_space(config, texts)
    assert {"training.optimizer.learning_rate", "training.batch_size"} <= found.keys.keys()
    assert corners(found)
    if ":" not in name:
        place, _, function = MODELS[name].partition(":")
        takes = inspect.signature(getattr(importlib.import_module(place), function)).parameters
        own = {
            key.removeprefix("model.args.") for key in found.keys if key.startswith("model.args.")
        }
        assert own <= takes.keys()


def test_what_is_given_is_not_made():
    given = ["training.optimizer={name: sgd}", "training.batch_size=32", "model.args.dropout=0,0.4"]
    keys = {each.partition("=")[0] for each in automatic(Config(), given)}
    assert keys == {"model.args.hidden_units"}
    unknown = {"batch_size": "auto", "optimizer": {"learning_rate": "auto"}}
    config = parse_config({"training": unknown})
    assert corners(parse_space(config, automatic(config, ())))
    config = parse_config({"training": {"optimizer": {"name": "model"}}})
    assert not [each for each in automatic(config, ()) if "optimizer" in each]

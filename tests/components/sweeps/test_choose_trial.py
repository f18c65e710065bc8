"""The best of the finished trials is chosen."""

import json
from dataclasses import replace

import pytest

from flotilla.components.sweeps import choose_trial, run_trial
from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.json_records import tree_of
from tests.trainer.sweeps.test_sweep import a_sweep, reached

SWEEP = a_sweep()
TRIALS = [
    replace(reached(SWEEP, trial, 0, value), checkpoint=f"file:///c{trial.number}")
    for trial, value in zip(SWEEP.trials, (0.5, 0.25), strict=True)
]


def going(root, rung):
    found = (run_trial._find_trial(SWEEP, root, "digits-1", place, rung) for place in range(2))
    return [each.number for each in found if each]


def chosen(root, *trials, rung=0):
    texts = [json.dumps(tree_of(each)) for each in trials]
    text = json.dumps(tree_of(SWEEP))
    config = Config().model_dump_json()
    return choose_trial.choose_trial.python_func(config, root, "digits-1", text, texts, rung)


def test_the_best_goes_on_with_its_own_configuration(root):
    found = chosen(root, *TRIALS)
    assert going(root, 1) == [2]
    assert found.checkpoint == "file:///c2"
    config = Config.model_validate_json(found.config)
    assert config.training.optimizer.learning_rate == 0.003
    assert config.training.steps == 30


def test_one_that_failed_is_not_chosen(root):
    failed = replace(TRIALS[1], status="failed", error="lost")
    assert chosen(root, TRIALS[0], failed).checkpoint == "file:///c1"
    assert going(root, 1) == [1]


def test_where_a_whole_rung_failed_the_best_of_the_one_before_is_chosen(root):
    known = storage.join(root, "digits-1", "trials", "0001.json")
    storage.write_bytes(known, json.dumps(tree_of(TRIALS[0])).encode())
    lost = replace(TRIALS[1], rung=1, status="failed", error="lost")
    found = chosen(root, lost, rung=1)
    assert found.checkpoint == "file:///c1"
    assert Config.model_validate_json(found.config).training.steps == 30
    assert going(root, 2) == []


def test_where_all_failed_the_sweep_fails_with_the_first_cause(root, capsys):
    failed = [replace(each, status="failed", error="no data") for each in TRIALS]
    with pytest.raises(SystemExit):
        chosen(root, *failed)
    assert "all 2 trials failed; the first: no data" in capsys.readouterr().err

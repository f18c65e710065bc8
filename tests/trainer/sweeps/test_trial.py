"""Which trial goes on, and which one is the best."""

from dataclasses import replace

import pytest

from trainer.config.load import parse_config
from trainer.config.schema import Config
from trainer.errors import ConfigError
from trainer.sweeps.trial import (
    DONE,
    FAILED,
    INTERRUPTED,
    RUNNING,
    Objective,
    Result,
    Trial,
    best_of,
    next_job,
    objective_of,
    rungs_of,
    value_of,
)

LOSS = Objective(metric="validation_loss", better="lower")
NINE = [Trial(number=number, settings={}) for number in range(1, 10)]
RUNGS = (10, 30, 90)


def ended(trial, rung, value):
    result = Result(rung=rung, steps=RUNGS[rung], value=value)
    return replace(trial, status=DONE, rung=rung, results=(*trial.results, result))


def all_trained(values, rungs=RUNGS, fails=()):
    """Train one after the other; return the trials, and which rung each job was on."""
    trials, jobs = list(NINE[: len(values)]), []
    while job := next_job(trials, rungs, LOSS):
        trial, rung = job
        jobs.append((trial.number, rung))
        at = trials.index(trial)
        failed = replace(trial, status=FAILED, rung=rung, error="x")
        done = ended(trial, rung, values[trial.number - 1] / (rung + 1))
        trials[at] = failed if (trial.number, rung) in fails else done
    return trials, jobs


def test_without_rungs_each_is_trained_once_and_the_best_wins():
    trials, jobs = all_trained([3, 1, 2], rungs=(0,))
    assert jobs == [(1, 0), (2, 0), (3, 0)]
    assert best_of(trials, LOSS).number == 2
    assert best_of(trials, Objective(metric="x", better="higher")).number == 1


def test_halving_trains_few_to_the_end_and_finds_the_best():
    trials, jobs = all_trained([9, 8, 7, 6, 5, 4, 3, 2, 1])
    assert [jobs.count((each.number, 0)) for each in trials] == [1] * 9
    assert jobs[9:] == [(9, 1), (8, 1), (7, 1), (9, 2)]
    assert best_of(trials, LOSS).number == 9


def test_where_most_fail_the_best_of_the_others_goes_on_to_the_end():
    trials, _ = all_trained([5, 4, 3, 2], fails={(1, 0), (2, 0), (3, 0)})
    assert best_of(trials, LOSS).number == 4
    assert best_of(trials, LOSS).last.rung == 2


def test_one_that_fails_on_the_last_rung_is_followed_by_the_next():
    trials, _ = all_trained([1, 2, 3], fails={(1, 2)})
    assert best_of(trials, LOSS).number == 2
    assert best_of(trials, LOSS).last.rung == 2


def test_nothing_is_best_where_all_failed():
    trials, _ = all_trained([1, 2], rungs=(0,), fails={(1, 0), (2, 0)})
    assert best_of(trials, LOSS) is None


def test_an_interrupted_trial_goes_on_first_on_its_own_rung():
    trials = [
        replace(NINE[0], status=RUNNING),
        NINE[1],
        replace(NINE[2], status=INTERRUPTED, rung=1),
    ]
    trial, rung = next_job(trials, RUNGS, LOSS)
    assert (trial.number, rung) == (3, 1)


def test_the_rungs_are_thirds_of_the_steps():
    nine = [{"model.name": "mlp"}] * 9
    base = parse_config({"training": {"steps": 900}})
    assert rungs_of(base, nine, halving=True) == (100, 300, 900)
    assert rungs_of(base, nine[:5], halving=True) == (300, 900)
    assert rungs_of(base, nine, halving=False) == (0,)


@pytest.mark.parametrize(
    ("tree", "settings", "count", "message"),
    [
        ({"steps": 29}, {}, 9, "29 are too few"),
        ({"steps": 900}, {}, 2, "there are 2"),
        ({"steps": 900}, {"training.steps": "9"}, 9, "one value"),
        ({"schedule": {"name": "cosine"}}, {}, 9, "cosine"),
    ],
)
def test_halving_that_is_not_possible_is_refused(tree, settings, count, message):
    with pytest.raises(ConfigError, match=message):
        rungs_of(parse_config({"training": tree}), [settings] * count, halving=True)


def test_the_objective_is_of_validation():
    assert objective_of(Config(), [], "", "") == LOSS
    assert objective_of(Config(), [], "validation_accuracy", "").better == "higher"
    assert objective_of(Config(), [], "mine", "lower").metric == "validation_mine"


@pytest.mark.parametrize(
    ("tree", "keys", "metric", "message"),
    [
        ({"data": {"validation": 0}}, [], "", "data.validation"),
        ({"training": {"validate_every": 0}}, [], "", "training.validate_every"),
        ({}, ["task.loss"], "", "changes what the loss is"),
        ({}, [], "mine", "--better"),
    ],
)
def test_an_objective_that_compares_nothing_is_refused(tree, keys, metric, message):
    with pytest.raises(ConfigError, match=message):
        objective_of(parse_config(tree), keys, metric, "")


def test_a_metric_that_is_absent_is_named_with_those_there_are():
    metrics = {"validation_loss": 0.5, "validation_accuracy": 0.9, "loss": 0.1}
    assert value_of(metrics, LOSS) == 0.5
    assert value_of({"best_validation_loss": 0.4}, LOSS) == 0.4
    with pytest.raises(ConfigError, match="no validation_auc: it has accuracy, loss"):
        value_of(metrics, Objective(metric="validation_auc", better="higher"))

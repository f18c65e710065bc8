"""Tests the results of a sweep: objective, rungs, the best trial, and the tables of all trials."""

from dataclasses import replace

import pytest

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.main_metric import BY_LOSS, MainMetric
from flotilla.trainer.config.schema import Config
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.sweeps.sweep import (
    DONE,
    FAILED,
    Objective,
    Result,
    Sweep,
    Trial,
    find_best,
    list_rungs,
    make_objective,
    make_table,
    read_value,
    to_markdown,
)

LOSS = Objective(metric="validation_loss", better="lower")
NINE = [Trial(number=number, settings={}) for number in range(1, 10)]
RUNGS = (10, 30, 90)
RATE = "training.optimizer.learning_rate"


def ended(trial, rung, value):
    result = Result(rung=rung, steps=RUNGS[rung], value=value)
    return replace(trial, status=DONE, rung=rung, results=(*trial.results, result))


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
    }
    return Sweep(**{**fields, **more})


def test_the_best_is_that_of_the_highest_rung_by_the_objective():
    trials = [
        ended(NINE[0], 0, 1),
        ended(ended(NINE[1], 0, 2), 1, 3),
        replace(NINE[2], status=FAILED),
    ]
    assert find_best(trials, LOSS).number == 2
    assert find_best(trials[:1], LOSS).number == 1
    assert find_best(trials[2:], LOSS) is None
    trials = [ended(trial, 0, value) for trial, value in zip(NINE, (3, 1, 2), strict=False)]
    assert find_best(trials, LOSS).number == 2
    assert find_best(trials, Objective(metric="x", better="higher")).number == 1


def test_the_steps_and_the_command_of_a_trial():
    sweep = a_sweep()
    config = sweep.configure(sweep.trials[1], 0, sweep.base)
    assert config.training.steps == 30
    assert config.training.optimizer.learning_rate == 0.003
    alone = a_sweep(rungs=(0,))
    assert alone.configure(alone.trials[1], 0, alone.base).training.steps == 1500
    assert a_sweep().command() == ""
    assert a_sweep(best=2).command() == (
        f"flotilla run 'my config.yaml' --set training.steps=90 --set {RATE}=0.003"
    )


def test_the_rungs_are_thirds_of_the_steps():
    nine = [{"model.name": "mlp"}] * 9
    base = parse_config({"training": {"steps": 900}})
    assert list_rungs(base, nine, 9, halving=True) == (100, 300, 900)
    assert list_rungs(base, nine[:5], 5, halving=True) == (300, 900)
    assert list_rungs(base, nine, 9, halving=False) == (0,)


@pytest.mark.parametrize(
    ("tree", "settings", "count", "message"),
    [
        ({"steps": 29}, {}, 9, "29 is too few"),
        ({"steps": 900}, {}, 2, "there are only 2"),
        ({"steps": 900}, {"training.steps": "9"}, 9, "one value"),
        ({"schedule": {"name": "cosine"}}, {}, 9, "cosine"),
    ],
)
def test_halving_that_is_not_possible_is_refused(tree, settings, count, message):
    with pytest.raises(ConfigError, match=message):
        list_rungs(parse_config({"training": tree}), [settings] * count, count, halving=True)


def reached(sweep, trial, rung, value, main=None):
    trial = replace(trial, metrics={(main or BY_LOSS).column: value})
    return sweep.add_result(trial, rung, main)


def test_the_objective_is_a_metric_of_validation():
    assert make_objective(Config(), [], "", "") == Objective()
    assert make_objective(Config(), ["task.loss"], "", "") == Objective()
    assert make_objective(Config(), [], "validation_accuracy", "").better == "higher"
    assert make_objective(Config(), [], "mine", "lower").metric == "validation_mine"
    metrics = {"validation_loss": 0.5, "validation_accuracy": 0.9, "loss": 0.1}
    assert read_value(metrics, LOSS) == 0.5
    assert read_value({"best_validation_loss": 0.4}, LOSS) == 0.4
    with pytest.raises(
        ConfigError, match="did not measure validation_auc: validation has accuracy, loss"
    ):
        read_value(metrics, Objective(metric="validation_auc", better="higher"))


@pytest.mark.parametrize(
    ("tree", "keys", "metric", "message"),
    [
        ({"data": {"validation": 0}}, [], "", "data.validation"),
        ({"training": {"validate_every": 0}}, [], "", "training.validate_every"),
        ({}, ["task.loss"], "loss", "changes the loss"),
        ({}, ["task.name"], "", "changes the metric"),
        ({}, ["task.main_metric"], "", "changes the metric"),
        ({}, [], "mine", "--better"),
    ],
)
def test_an_objective_that_compares_nothing_is_refused(tree, keys, metric, message):
    with pytest.raises(ConfigError, match=message):
        make_objective(parse_config(tree), keys, metric, "")


def trained():
    sweep = a_sweep(best=2, verdict="blessed")
    first, second = (
        reached(sweep, trial, 0, value)
        for trial, value in zip(sweep.trials, (0.5, 0.25), strict=True)
    )
    return replace(sweep, trials=(first, reached(sweep, second, 1, 0.2)))


AUC = MainMetric(name="auc", better="higher")


@pytest.mark.parametrize(
    ("main", "best"), [(AUC, 1), (replace(AUC, better="lower"), 2), (BY_LOSS, 2), (None, 2)]
)
def test_without_a_choice_trials_are_compared_by_their_main_metric(main, best):
    sweep = a_sweep(objective=Objective())
    trials = tuple(
        reached(sweep, each, 0, value, main)
        for each, value in zip(sweep.trials, (0.9, 0.8), strict=True)
    )
    assert find_best(trials, sweep.objective).number == best
    heads, rows = make_table(replace(sweep, trials=trials))
    assert heads[2] == {"auc": "validation AUC", "loss": "validation loss"}[(main or BY_LOSS).name]
    assert [row[0] for row in rows] == [str(best), str(3 - best)]


def test_main_metrics_that_compare_nothing_are_refused():
    sweep = a_sweep(objective=Objective())
    trials = [
        reached(sweep, each, 0, 0.5, main)
        for each, main in zip(sweep.trials, (AUC, BY_LOSS), strict=True)
    ]
    with pytest.raises(ConfigError, match="by different metrics, auc and loss: choose one"):
        find_best(trials, sweep.objective)
    sweep = a_sweep(objective=Objective(), keys=("task.loss",))
    assert reached(sweep, sweep.trials[0], 0, 0.5, AUC).last.value == 0.5
    with pytest.raises(ConfigError, match=r"task\.loss changes the loss"):
        reached(sweep, sweep.trials[0], 0, 0.5, BY_LOSS)


def test_the_tables_have_the_best_first_and_its_command():
    heads, rows = make_table(trained())
    assert heads == ["trial", "learning_rate", "validation loss", "steps", "duration", "status"]
    assert rows == [
        ["2", "0.003", "0.2", "90", "0.0 s", "best"],
        ["1", "0.01", "0.5", "30", "0.0 s", "done"],
    ]
    sweep = trained()
    failed = replace(sweep.trials[0], status=FAILED, error="<b>bad</b>", results=())
    text = to_markdown(replace(sweep, trials=(failed, sweep.trials[1]))).decode()
    assert f"--set {RATE}=0.003`" in text
    assert "Trial 2 is the best of 2" in text
    assert r"trial 1: \<b\>bad\</b\>" in text
    assert "2 trials." in to_markdown(a_sweep()).decode()

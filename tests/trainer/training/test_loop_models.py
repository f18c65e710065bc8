"""Tests the outer loop with real models: optimizers, averages and frozen variables."""

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.checkpoints import restore_model
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.models.registry import freeze
from flotilla.trainer.runtime.errors import RunInterruptedError, UserError
from flotilla.trainer.strategies.strategy import create
from tests.trainer.counting import Run, stop_after
from tests.trainer.objectives import of_classes
from tests.trainer.plain import CHIEF, CLASSES, NOBODY, Plain, dense, examples, problem_of


def measured_by_objective(strategy):
    objective = of_classes(CLASSES)
    return objective.means(
        objective.totals(strategy.model, tf.data.Dataset.from_tensors(examples())).numpy()
    )


def values(strategy):
    return {path: variable.numpy() for path, variable in strategy.variables().items()}


@pytest.mark.parametrize(
    ("optimizer", "dropout"),
    [
        pytest.param("adam", 0, marks=pytest.mark.slow),
        pytest.param("adafactor", 0, marks=pytest.mark.slow),
        ("sgd", 0.5),
    ],
)
def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tmp_path, optimizer, dropout):
    problem = problem_of(partial(dense, dropout), optimizer)
    straight = Plain()
    Run(tmp_path / "straight").train(straight, steps=30, make_problem=problem)
    run = Run(tmp_path / "interrupted")
    for looks in (1, 2):
        given = {"should_stop": stop_after(looks), "validate_every": 4}
        with pytest.raises(RunInterruptedError):
            run.train(Plain(), steps=30, make_problem=problem, **given)
    resumed = Plain()
    assert run.train(resumed, steps=30, make_problem=problem) == 30
    expected = values(straight)
    assert values(resumed).keys() == expected.keys()
    for path, value in values(resumed).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_it_learns_and_says_so(tmp_path):
    run, strategy = Run(tmp_path), Plain()
    given = {"validate": measured_by_objective, "validate_every": 50, "keep": 1}
    run.train(strategy, steps=200, make_problem=problem_of(rate=0.05), **given)
    accuracies = run.rows("validation_accuracy")
    assert len(accuracies) == 4
    assert accuracies[-1] > 0.9
    assert run.rows("loss")[-1] < run.rows("loss")[0]
    assert run.rows("learning_rate")[-1] == pytest.approx(0.05)
    # A plain process can load its checkpoint.
    model = dense()
    restore_model(f"{run.uri}/step-00000200", model, tmp_path / "evaluation")
    points, _ = examples()
    np.testing.assert_array_equal(model(points), strategy.model(points))


@pytest.mark.slow
def test_a_learning_rate_far_too_high_is_a_divergence(tmp_path):
    run = Run(tmp_path)
    problem = problem_of(optimizer="sgd", rate=1e30)
    with pytest.raises(UserError, match="training diverged: ") as caught:
        run.train(Plain(), steps=100, make_problem=problem)
    assert len(str(caught.value).splitlines()) == 1
    assert run.steps() == [0]


@pytest.mark.slow
def test_the_learning_rate_is_the_configurations_also_when_training_is_resumed(tmp_path):
    run, strategy = Run(tmp_path), Plain()
    run.train(Plain(), steps=10, make_problem=problem_of(rate=0.01))
    run.train(strategy, steps=20, make_problem=problem_of(rate=0.002))
    assert run.rows("learning_rate") == pytest.approx([0.01, 0.002])
    assert strategy.global_step() == 20


def test_another_model_or_optimizer_is_refused(tmp_path):
    run = Run(tmp_path)
    train_frozen(run, 10, HIDDEN)
    same = {"freeze": list(HIDDEN)}
    for other, given, said in (
        ({"model": partial(frozen, HIDDEN), "optimizer": "lion"}, same, "no optimizer/lion/"),
        ({"model": partial(dense, name="wide")}, same, "no model/"),
        # This error does not depend on a change of the frozen variables.
        ({"optimizer": "lion"}, {"optimizer": {"name": "lion"}}, "no optimizer/lion/"),
    ):
        says = rf"does not match the model and optimizer .*\(it has {said}"
        with pytest.raises(UserError, match=says):
            run.train(Plain(), steps=20, make_problem=problem_of(**other), **given)
        assert run.steps() == [0, 10], other
        assert run.rows() == [10], other


MOMENTUM = 0.8
KERNEL = "dense/logits/kernel"


def train_with(run, steps, **training):
    config = parse_config({"training": {"strategy": "single", "batch_size": 4, **training}})
    strategy = create(config, NOBODY, CHIEF)
    run.train(strategy, steps=steps, make_problem=problem_of(), batch_size=4, keep=9, **training)
    return strategy


def handed_on(run, step, tmp_path):
    model = dense()
    restore_model(storage.join(run.uri, f"step-{step:08d}"), model, tmp_path / f"fetched-{step}")
    return {variable.path: variable.numpy() for variable in model.variables}


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("averaged"))
    train_with(run, 20, ema=MOMENTUM)
    return run


def test_a_checkpoint_has_both_and_hands_the_average_on(averaged, tmp_path):
    run = averaged
    first, last = saved(run, 0), saved(run, 20)
    np.testing.assert_array_equal(first[f"average/{KERNEL}"], first[f"model/{KERNEL}"])
    assert not np.allclose(last[f"average/{KERNEL}"], last[f"model/{KERNEL}"], atol=1e-4)
    model = handed_on(run, 20, tmp_path)
    np.testing.assert_array_equal(model[KERNEL], last[f"average/{KERNEL}"])
    mean = "dense/norm/moving_mean"
    np.testing.assert_array_equal(model[mean], last[f"model/{mean}"])


def test_a_resumed_run_continues_both(averaged, tmp_path):
    parts = Run(tmp_path)
    train_with(parts, 10, ema=MOMENTUM)
    train_with(parts, 20, ema=MOMENTUM)
    expected, found = saved(averaged, 20), saved(parts, 20)
    assert set(found) == set(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, atol=1e-5, err_msg=path)


def test_it_may_begin_and_end_with_a_later_attempt(tmp_path):
    run = Run(tmp_path)
    train_with(run, 10)
    at_first = train_with(run, 10, ema=MOMENTUM).variables()
    np.testing.assert_array_equal(
        at_first[f"average/{KERNEL}"].numpy(), saved(run, 10)[f"model/{KERNEL}"]
    )
    train_with(run, 20, ema=MOMENTUM)
    assert f"average/{KERNEL}" in saved(run, 20)
    train_with(run, 30)
    assert f"average/{KERNEL}" not in saved(run, 30)


def test_a_validation_measures_the_average_and_training_goes_on_from_the_weights(tmp_path):
    seen = []

    def validate(strategy):
        variables = strategy.variables()
        seen.append({path: each.numpy() for path, each in variables.items()})
        return {"loss": 1.0}

    run = Run(tmp_path)
    config = parse_config({"training": {"strategy": "single", "ema": MOMENTUM}})
    strategy = create(config, NOBODY, CHIEF)
    run.train(strategy, steps=10, make_problem=problem_of(), validate=validate, validate_every=10)
    (measured,) = seen
    last = saved(run, 10)
    np.testing.assert_array_equal(measured[f"model/{KERNEL}"], last[f"average/{KERNEL}"])
    np.testing.assert_array_equal(measured[f"average/{KERNEL}"], last[f"model/{KERNEL}"])


@pytest.mark.parametrize("before", ["", "float16"])
@pytest.mark.slow
def test_the_scale_is_continued_or_begun(tmp_path, before):
    run = Run(tmp_path)
    train_with(run, 10, mixed_precision=before)
    resume = partial(train_with, run, mixed_precision="float16")
    scale = resume(10).variables()["loss_scale/gradients"].numpy()
    assert scale == (10 if before else 0)
    assert resume(20).variables()["loss_scale/gradients"].numpy() == scale + 10


HIDDEN = ("dense/hidden/*",)
NORM = ("dense/norm/*",)


def frozen(globs):
    model = dense()
    freeze(model, globs)
    return model


def train_frozen(run, steps, globs=(), optimizer="adam", **named):
    """Train with these variables frozen; return the strategy."""
    strategy = Plain()
    make = problem_of(partial(frozen, globs), optimizer)
    optimizers = {"optimizer": {"name": optimizer}}
    run.train(strategy, steps=steps, make_problem=make, freeze=list(globs), **optimizers, **named)
    return strategy


def saved(run, step):
    uri = storage.join(run.uri, f"step-{step:08d}")
    reader = tf.train.load_checkpoint(str(storage.local_path(uri) / "variables"))
    return {
        key.removeprefix("variables/").partition("/")[0].replace(".S", "/"): reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key.startswith("variables/")
    }


def changed(before, after, part):
    return {
        path: bool((before[path] != after[path]).any())
        for path in before
        if path.startswith(f"model/dense/{part}/")
    }


def test_frozen_variables_are_in_the_checkpoint_and_have_no_slots(tmp_path):
    run = Run(tmp_path)
    train_frozen(run, 20, HIDDEN, keep=9)
    first, last = saved(run, 0), saved(run, 20)
    assert changed(first, last, "hidden") == {
        "model/dense/hidden/kernel": False,
        "model/dense/hidden/bias": False,
    }
    assert all(changed(first, last, "logits").values())
    slots = [path for path in last if path.startswith("optimizer/")]
    assert len(slots) == 2 * 4
    assert not any("hidden" in path for path in slots)
    assert run.fields(20)["freeze"] == list(HIDDEN)


@pytest.mark.slow
def test_another_list_thaws_with_new_slots_and_keeps_the_others(tmp_path, caplog):
    run = Run(tmp_path)
    train_frozen(run, 20, HIDDEN)
    before = saved(run, 20)
    resumed = train_frozen(run, 20, NORM)
    values = {path: variable.numpy() for path, variable in resumed.variables().items()}
    for path, value in values.items():
        if path in before:
            np.testing.assert_array_equal(value, before[path], err_msg=path)
    anew = [path for path in values if path not in before]
    assert len(anew) == 4
    assert all("hidden" in path and not values[path].any() for path in anew)
    assert "training.freeze has changed: reinitialized 4 of 8 optimizer slots" in caplog.text
    train_frozen(run, 40, NORM)
    after = saved(run, 40)
    assert all(changed(before, after, "hidden").values())
    assert not any(changed(before, after, "norm").values())


@pytest.mark.slow
def test_slots_that_a_number_tells_apart_begin_anew(tmp_path):
    run = Run(tmp_path)
    train_frozen(run, 20, ("dense/hidden/kernel",), "adafactor")
    resumed = train_frozen(run, 20, (), "adafactor").variables()
    # The names of the slots of the two kernels differ only in a number.
    assert not any(resumed[path].numpy().any() for path in resumed if "optimizer/kernel" in path)
    assert resumed["optimizer/adafactor/dense_logits_bias_velocity"].numpy().any()
    assert train_frozen(run, 30, (), "adafactor").global_step() == 30

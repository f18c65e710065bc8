"""The outer loop around a real Keras model: what is interrupted goes on as if it had not been."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.counting import Run
from tests.trainer.objectives import of_classes
from tests.trainer.plain import CLASSES, Plain, dense, examples, problem_of
from trainer.checkpoints.checkpoints import restore_model
from trainer.errors import RunInterruptedError, UserError


def measured(strategy):
    objective = of_classes(CLASSES)
    return objective.means(
        objective.totals(strategy.model, tf.data.Dataset.from_tensors(examples())).numpy()
    )


def values(strategy):
    return {path: variable.numpy() for path, variable in strategy.variables().items()}


def stop_after(looks):
    asked = iter([False] * looks)
    return lambda: next(asked, True)


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
        with pytest.raises(RunInterruptedError):
            run.train(
                Plain(),
                steps=30,
                make_problem=problem,
                should_stop=stop_after(looks),
                validate_every=4,
            )
    resumed = Plain()
    assert run.train(resumed, steps=30, make_problem=problem) == 30
    expected = values(straight)
    assert values(resumed).keys() == expected.keys()
    for path, value in values(resumed).items():
        np.testing.assert_allclose(value, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_it_learns_and_says_so(tmp_path):
    run = Run(tmp_path)
    problem = problem_of(rate=0.05)
    run.train(Plain(), steps=200, make_problem=problem, validate=measured, validate_every=50)
    accuracies = run.rows("validation_accuracy")
    assert len(accuracies) == 4
    assert accuracies[-1] > 0.9
    assert run.rows("loss")[-1] < run.rows("loss")[0]
    assert run.rows("learning_rate")[-1] == pytest.approx(0.05)


def test_its_checkpoint_is_a_model_for_a_plain_process(tmp_path):
    run, strategy = Run(tmp_path), Plain()
    run.train(strategy, steps=20, make_problem=problem_of(), keep=1)
    model = dense()
    restore_model(f"{run.uri}/step-00000020", model, tmp_path / "evaluation")
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


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"optimizer": "lion"}, r"\(it has no optimizer/lion/"),
        ({"model": partial(dense, 0.5)}, r"\(it has no model/"),
    ],
)
def test_another_model_or_optimizer_is_refused(tmp_path, other, said):
    run = Run(tmp_path)
    run.train(Plain(), steps=10, make_problem=problem_of())
    with pytest.raises(UserError, match=said):
        run.train(Plain(), steps=20, make_problem=problem_of(**other))
    assert run.steps() == [0, 10]
    assert run.rows() == [10]

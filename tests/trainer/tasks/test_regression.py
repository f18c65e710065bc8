"""Tests that regression metrics equal those of Keras and scikit-learn, in the label's units."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
from sklearn import metrics as scores

from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks.base import Target
from flotilla.trainer.tasks.regression import Regression
from tests.trainer.tasks.measuring import InParts, check_validation, measured, target

COUNT = 40
RANDOM = np.random.default_rng(0)
# The mean of the scalar labels is far above their standard deviation, as with years.
LABELS = {
    (): 1990 + 10 * RANDOM.normal(size=COUNT),
    (3,): RANDOM.normal(size=(COUNT, 3)) * [1, 10, 100],
    (2, 3): RANDOM.normal(size=(COUNT, 2, 3)),
}


def case(shape, **args):
    labels = LABELS[shape].astype("float32")
    task = Regression(target(labels), **args)
    noise = np.random.default_rng(1).normal(size=labels.shape) / 2
    outputs = task.outputs_of({"prediction": (labels + noise).astype("float32")})
    return task, labels, outputs


@pytest.mark.parametrize("shape", LABELS)
@pytest.mark.parametrize(("standardize", "weighted"), [(False, True), (True, False)])
def test_a_validation_finds_what_an_evaluation_finds(shape, standardize, weighted):
    task, labels, outputs = case(shape, standardize=standardize)
    assert outputs.shape[1:] == task.output_shape
    assert task.answers(outputs)["prediction"].shape == labels.shape
    check_validation(task, labels, outputs, weighted=weighted)


def test_the_loss_is_the_mean_squared_error_of_keras():
    task, labels, outputs = case(())
    expected = keras.losses.MeanSquaredError()(labels, outputs)
    np.testing.assert_allclose(task.loss()(labels, outputs), expected, rtol=1e-6)


@pytest.mark.parametrize("away", [0, 1])
def test_of_equal_labels_the_score_says_whether_they_are_met(away):
    true, given = np.float32([2, 2]), np.float32([[2], [2 + away]])
    found = measured(Regression(target(true)), InParts(true, given))
    assert found["r2_score"] == 1 - away == scores.r2_score(true, given)


@pytest.mark.parametrize("shape", LABELS)
def test_what_is_said_besides_the_metrics_is_plain_data(shape):
    task, labels, outputs = case(shape, standardize=True)
    details = task.details(InParts(labels, outputs))
    assert json.loads(json.dumps(details, allow_nan=False)) == details
    (table,) = details["tables"]
    errors = np.abs(np.asarray(task.answers(outputs)["prediction"]) - labels)
    assert table["rows"][0] == ["50%", pytest.approx(np.median(errors), rel=1e-3)]
    assert table["rows"][-1] == ["100%", pytest.approx(errors.max(), rel=1e-3)]
    for chart in details["charts"]:
        assert {len(points) for points in chart["series"].values()} == {20}
    worst = task.described(labels[0], outputs[0])
    assert abs(worst["error"]) == pytest.approx(errors[0].max(), rel=1e-3)


def test_an_untrained_model_costs_a_blind_guess():
    (task, labels, _), (other, *_) = case(()), case((), standardize=True)
    assert task.chance_loss() == pytest.approx((labels.astype("float64") ** 2).mean())
    assert other.chance_loss() == 1
    # A model begins in the units that its outputs have.
    assert task.in_units
    assert not other.in_units


def test_a_label_or_an_argument_that_it_does_not_take_is_refused():
    with pytest.raises(ConfigError, match=r"^the label must be numeric, not 'label' \(one string"):
        Regression(Target(name="label", shape=(), dtype="string"))
    with pytest.raises(
        ConfigError, match=r"^standardize: 1 is not allowed; it must be true or fal"
    ):
        Regression(target(np.zeros(2)), standardize=1)


def test_labels_without_use_are_refused_before_training():
    with pytest.raises(ConfigError, match="is 2 in all training examples"):
        Regression(target(np.full(3, 2.0))).check()
    with pytest.raises(ConfigError, match="values that are not finite numbers"):
        Regression(Target(name="label", shape=(), dtype="float32")).check()
    Regression(target(np.arange(3.0))).check()

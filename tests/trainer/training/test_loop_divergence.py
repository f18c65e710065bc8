"""Tests that training ends if a loss, a weight or a validation is not finite."""

import math

import pytest

from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.training.loop import DIVERGED
from tests.trainer.counting import CHANCE_LOSS, Counting

MOST = DIVERGED * CHANCE_LOSS


def refused(run, *args, **options):
    with pytest.raises(UserError) as caught:
        run.train(*args, steps=100, keep=100, **options)
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert len(message.splitlines()) == 1
    assert message.startswith("training diverged: ")
    assert "lower training.optimizer.learning_rate or clip the gradient" in message
    return message


def from_step(step, answer):
    return lambda strategy: answer(strategy) if strategy.global_step() >= step else 1.0


def poison(value):
    def answer(strategy):
        strategy.weight.assign(value)
        return 1.0

    return answer


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (math.nan, "the loss is nan"),
        (math.inf, "the loss is inf"),
        (MOST * 1.01, "the loss is 20200"),
    ],
)
def test_a_loss_that_is_none(run, loss, said):
    message = refused(run, Counting(from_step(25, lambda _: loss)), validate_every=5)
    assert message.startswith(f"training diverged: {said} at global step 25; ")
    assert message.endswith(f"(the last finite checkpoint is {run.uri}/step-00000020)")
    assert run.steps() == [0, 10, 20]
    assert run.rows() == [5, 10, 15, 20]


@pytest.mark.parametrize("loss", [-1.0, 0.0, MOST * 0.99])
def test_a_loss_that_is_merely_bad_or_odd(run, loss):
    assert run.train(Counting(loss), steps=20) == 20


def test_a_loss_that_is_none_at_once(run):
    message = refused(run, Counting(lambda _: math.nan))
    assert "; look for a logarithm or a root of zero, or a division by zero; otherwise" in message
    assert message.endswith(f"(the last finite checkpoint is {run.uri}/step-00000000)")
    assert run.steps() == [0]
    assert run.rows() == []


def test_a_weight_that_is_not_finite_behind_a_loss_that_is(run):
    message = refused(run, Counting(from_step(25, poison(math.inf))))
    assert message.startswith("training diverged: model/weight is not finite at global step 30; ")
    assert run.steps() == [0, 10, 20]


def test_a_weight_that_is_not_finite_when_an_end_is_asked_for(run):
    looks = iter([False] * 5)
    message = refused(
        run,
        Counting(from_step(25, poison(math.nan))),
        should_stop=lambda: next(looks, True),
        validate_every=5,
    )
    assert "model/weight is not finite at global step 25" in message
    assert run.steps() == [0, 10, 20]


def test_a_validation_that_is_none_behind_a_loss_that_is(run):
    def validate(strategy):
        return {"loss": math.nan if strategy.global_step() >= 30 else 1.0, "accuracy": 0.5}

    message = refused(run, validate=validate)
    assert message.startswith("training diverged: the validation loss is nan at global step")
    assert run.steps() == [0, 10, 20]
    assert run.rows("validation_loss") == [1.0, 1.0]


def test_what_diverged_may_be_trained_again_from_the_last_finite_checkpoint(run):
    refused(run, Counting(from_step(25, lambda _: math.nan)))
    assert run.train(steps=40, keep=100) == 40
    assert run.steps() == [0, 10, 20, 30, 40]
    assert run.weight(40) == 20.0
    assert run.rows() == [10, 20, 30, 40]

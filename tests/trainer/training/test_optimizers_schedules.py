"""Learning rates at exact global steps, by hand, and what a schedule refuses."""

from __future__ import annotations

import math

import keras
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.config.load import load_config
from trainer.config.optimizer import ARGS, OptimizerConfig, ScheduleConfig
from trainer.config.schema import TrainingConfig
from trainer.errors import ConfigError
from trainer.training.optimizers import build_optimizer, learning_rate

RATE = 0.4
PIECEWISE = {"boundaries": [10, 20], "factors": [1.0, 0.5, 0.1]}
EXPONENTIAL = {"decay_steps": 10, "decay_rate": 0.5}


def training(name="constant", steps=100, warmup=0, **args):
    schedule = ScheduleConfig(name=name, warmup_steps=warmup, args=args)
    settings = OptimizerConfig(name="sgd", learning_rate=RATE)
    return TrainingConfig(steps=steps, optimizer=settings, schedule=schedule)


def rate_at(step, *args, **named):
    rate = learning_rate(training(*args, **named))
    return float(rate(tf.constant(step, tf.int64))) if callable(rate) else rate


def refused(**schedule):
    with pytest.raises(ConfigError) as caught:
        load_config(None, [f"training.schedule={schedule}"])
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_constant_rate_is_a_number():
    assert learning_rate(training()) == RATE


@pytest.mark.parametrize("step", [0, 1, 25, 50, 99, 100, 250])
@pytest.mark.parametrize("alpha", [0.0, 0.1, 1.0])
def test_half_a_cosine_down_to_alpha(step, alpha):
    share = alpha + (1 - alpha) * (1 + math.cos(math.pi * min(step, 100) / 100)) / 2
    assert rate_at(step, "cosine", alpha=alpha) == pytest.approx(RATE * share, abs=1e-7)


@pytest.mark.parametrize("step", [0, 5, 10, 19, 20, 35])
def test_a_share_of_the_rate_in_every_so_many_steps(step):
    smooth = rate_at(step, "exponential", **EXPONENTIAL)
    stairs = rate_at(step, "exponential", **EXPONENTIAL, staircase=True)
    assert smooth == pytest.approx(RATE * 0.5 ** (step / 10), rel=1e-6)
    assert stairs == pytest.approx(RATE * 0.5 ** (step // 10), rel=1e-6)


@pytest.mark.parametrize(
    ("step", "factor"), [(0, 1), (9, 1), (10, 0.5), (19, 0.5), (20, 0.1), (99, 0.1)]
)
def test_the_next_factor_begins_at_its_boundary(step, factor):
    assert rate_at(step, "piecewise", **PIECEWISE) == pytest.approx(RATE * factor)
    # Counted from the end of a warm-up, where the step is a fraction for Keras.
    assert rate_at(step + 8, "piecewise", warmup=8, **PIECEWISE) == pytest.approx(RATE * factor)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4), (4, 0.4)])
def test_a_warm_up_rises_in_equal_steps_to_the_rate(step, rate):
    assert rate_at(step, warmup=4) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("name", "args"),
    [("cosine", {}), ("exponential", EXPONENTIAL), ("piecewise", PIECEWISE), ("constant", {})],
)
def test_there_is_no_jump_where_the_warm_up_ends(name, args):
    last, first = (rate_at(step, name, warmup=10, **args) for step in (9, 10))
    assert last == pytest.approx(RATE)
    assert first == pytest.approx(RATE)


def test_a_cosine_after_a_warm_up_ends_with_the_training():
    assert rate_at(10 + 45, "cosine", warmup=10) == pytest.approx(RATE / 2)
    assert rate_at(100, "cosine", warmup=10) == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("warmup", [100, 300])
def test_a_warm_up_longer_than_the_training_just_rises(warmup):
    assert rate_at(99, "cosine", warmup=warmup) == pytest.approx(RATE * 100 / warmup)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([("cosine", {}), ("exponential", EXPONENTIAL), ("piecewise", PIECEWISE)]),
    st.integers(0, 30),
    st.integers(0, 10**6),
)
def test_no_rate_is_above_the_one_that_was_set_or_below_nothing(schedule, warmup, step):
    name, args = schedule
    assert -1e-7 <= rate_at(step, name, warmup=warmup, **args) <= RATE * (1 + 1e-6)


@pytest.mark.parametrize("warmup", [0, 10])
def test_an_optimizer_reads_the_schedule_at_its_own_counter(warmup):
    optimizer = build_optimizer(training("cosine", warmup=warmup))
    optimizer.build([keras.Variable([1.0])])
    optimizer.iterations.assign(60)
    assert float(optimizer.learning_rate) == pytest.approx(rate_at(60, "cosine", warmup=warmup))


def test_an_update_moves_by_the_rate_of_its_step():
    optimizer = build_optimizer(training(warmup=4))
    weight = keras.Variable([0.0])
    optimizer.build([weight])
    places = []
    for _ in range(5):
        optimizer.apply([tf.constant([-1.0])], [weight])
        places.append(float(weight.value[0]))
    assert places == pytest.approx([0.1, 0.3, 0.6, 1.0, 1.4])


def test_a_warm_up_can_be_written_down_and_made_again():
    rate = learning_rate(training("constant", warmup=4))
    again = type(rate)(**rate.get_config())
    assert float(again(2)) == float(rate(2))


def test_every_name_has_its_arguments():
    assert set(ARGS) == set(ScheduleConfig.model_fields["name"].annotation.__args__)


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("constant", {"alpha": 0.1}, "args.alpha of constant: Extra inputs are not permitted"),
        ("constant", {"alpha": 0.1}, "(it takes none)"),
        ("cosine", {"alfa": 0.1}, "args.alfa of cosine: Extra inputs are not permitted"),
        ("cosine", {"alfa": 0.1}, "(it takes alpha)"),
        ("cosine", {"alpha": 1.5}, "args.alpha of cosine: Input should be less than or equal"),
        ("cosine", {"alpha": "high"}, "args.alpha of cosine: Input should be a valid number"),
        ("exponential", {}, "args.decay_steps of exponential: Field required"),
        ("exponential", {"decay_steps": 0, "decay_rate": 1}, "args.decay_steps of exponential"),
        ("exponential", {"decay_steps": 9, "decay_rate": 2}, "args.decay_rate of exponential"),
        ("piecewise", {}, "args.boundaries of piecewise: Field required"),
        ("piecewise", {"boundaries": [], "factors": [1, 1]}, "args.boundaries of piecewise"),
        ("piecewise", {"boundaries": [1.5], "factors": [1, 1]}, "args.boundaries.0 of piecewise"),
        ("piecewise", {"boundaries": [0], "factors": [1, 1]}, "have to rise from 1 on"),
        ("piecewise", {"boundaries": [9, 9], "factors": [1, 1, 1]}, "have to rise from 1 on"),
        ("piecewise", {"boundaries": [9], "factors": [1, 1, 1]}, "one more than boundaries"),
        ("piecewise", {"boundaries": [9], "factors": [1, -1]}, "have to be 0 or more"),
    ],
)
def test_arguments_are_refused_by_name_in_one_line(name, args, said):
    message = refused(name=name, args=args)
    assert message.startswith("training.schedule: args")
    assert said in message

"""Averages and the scale of a loss in the outer loop: saved, handed on, resumed, begun later."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.trainer.counting import Run
from tests.trainer.plain import CHIEF, NOBODY, dense, problem_of
from tests.trainer.training.test_loop_frozen import saved
from trainer import storage
from trainer.checkpoints.checkpoints import restore_model
from trainer.config.load import parse_config
from trainer.strategies.strategy import create

MOMENTUM = 0.8
KERNEL = "dense/logits/kernel"


def train(run, steps, **training):
    """Train in one process; return the strategy."""
    config = parse_config({"training": {"strategy": "single", "batch_size": 4, **training}})
    strategy = create(config, NOBODY, CHIEF)
    run.train(strategy, steps=steps, make_problem=problem_of(), batch_size=4, keep=9, **training)
    return strategy


def handed_on(run, step, tmp_path):
    model = dense()
    restore_model(storage.join(run.uri, f"step-{step:08d}"), model, tmp_path / f"fetched-{step}")
    return {variable.path: variable.numpy() for variable in model.variables}


def test_a_checkpoint_has_both_and_hands_the_average_on(tmp_path):
    run = Run(tmp_path)
    train(run, 20, ema=MOMENTUM)
    first, last = saved(run, 0), saved(run, 20)
    np.testing.assert_array_equal(first[f"average/{KERNEL}"], first[f"model/{KERNEL}"])
    assert not np.allclose(last[f"average/{KERNEL}"], last[f"model/{KERNEL}"], atol=1e-4)
    model = handed_on(run, 20, tmp_path)
    np.testing.assert_array_equal(model[KERNEL], last[f"average/{KERNEL}"])
    # What no gradient trains has no average.
    mean = "dense/norm/moving_mean"
    np.testing.assert_array_equal(model[mean], last[f"model/{mean}"])


def test_a_resumed_run_continues_both(tmp_path):
    whole, parts = Run(tmp_path / "whole"), Run(tmp_path / "parts")
    train(whole, 20, ema=MOMENTUM)
    train(parts, 10, ema=MOMENTUM)
    train(parts, 20, ema=MOMENTUM)
    expected, found = saved(whole, 20), saved(parts, 20)
    assert set(found) == set(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, atol=1e-5, err_msg=path)


def test_it_may_begin_and_end_with_a_later_attempt(tmp_path):
    run = Run(tmp_path)
    train(run, 10)
    at_first = train(run, 10, ema=MOMENTUM).variables()
    np.testing.assert_array_equal(
        at_first[f"average/{KERNEL}"].numpy(), saved(run, 10)[f"model/{KERNEL}"]
    )
    train(run, 20, ema=MOMENTUM)
    assert f"average/{KERNEL}" in saved(run, 20)
    train(run, 30)
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
    train(run, 10, mixed_precision=before)
    resume = partial(train, run, mixed_precision="float16")
    scale = resume(10).variables()["loss_scale/gradients"].numpy()
    assert scale == (10 if before else 0)
    assert resume(20).variables()["loss_scale/gradients"].numpy() == scale + 10

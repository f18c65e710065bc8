"""Tests that the scale of a float16 loss is halved and doubled, and never ends training."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.optimizers import loss_scale
from flotilla.trainer.optimizers.loss_scale import FIRST, MOST_HALVINGS, LossScale
from flotilla.trainer.strategies.gradients import build_pulled_gradient, push_state
from flotilla.trainer.strategies.strategy import create
from tests.trainer.objectives import cross_entropy
from tests.trainer.plain import CHIEF, NOBODY, dense, problem_of

SCALE = "loss_scale/scale"


def half():
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        return dense()
    finally:
        keras.mixed_precision.set_global_policy("float32")


def single(model=half, factor=1.0, **training):
    training = {"strategy": "single", "mixed_precision": "float16", **training}
    strategy = create(parse_config({"training": training}), NOBODY, CHIEF)
    problem = problem_of(model, optimizer="sgd", rate=0.01 / factor)(0)
    strategy.build(replace(problem, loss=lambda *args: problem.loss(*args) * factor))
    return strategy


def scale_of(strategy):
    """Return the scale, and the number of gradients since the last change."""
    variables = strategy.variables()
    scale, count, changed = (
        variables[f"loss_scale/{name}"].numpy() for name in ("scale", "gradients", "changed")
    )
    return float(scale), int(count - changed)


@pytest.mark.slow
@pytest.mark.parametrize("training", [{}, {"accumulate": 3}, {"jit_compile": True}])
def test_a_gradient_that_overflows_is_computed_again_and_counts_once(training):
    plain, scaled = single(dense, 64.0, mixed_precision=""), single(factor=64.0, **training)
    for each in (plain, scaled):
        assert np.isfinite(each.run(4).loss)
        assert each.global_step() == 4
    scale, finite = scale_of(scaled)
    assert scale < FIRST
    assert np.log2(scale) == int(np.log2(scale))
    assert 0 <= finite < 4 * training.get("accumulate", 1)
    for path, variable in plain.variables().items():
        # With accumulation, batch statistics are updated several times per step and so differ.
        if "moving" not in path or "accumulate" not in training:
            found = scaled.variables()[path].numpy()
            np.testing.assert_allclose(found, variable.numpy(), atol=0.02, err_msg=path)


def test_it_grows_after_so_many_finite_updates(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH", 3)
    strategy = single(factor=0.01)
    seen = []
    for _ in range(7):
        strategy.run(1)
        seen.append(scale_of(strategy))
    first = FIRST
    assert seen == [
        (first, 1), (first, 2), (2 * first, 0), (2 * first, 1), (2 * first, 2),
        (4 * first, 0), (4 * first, 1),
    ]  # fmt: skip


def test_gradients_of_several_workers_make_one_update(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH", 3)
    scale = LossScale(gradients=2)
    compute = scale.wrap(lambda _w, state, _b, factor: (tf.constant(1.0), [factor], state))
    state = [each.value.read_value() for each in scale.variables]
    counts = []
    for _ in range(6):
        _, found, state = compute([], state, ())
        counts.append((float(state[0]) / FIRST, int(state[1] - int(state[2]))))
        assert float(found[0]) == 1
    assert counts == [(1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (2, 0)]


def test_workers_that_change_it_at_once_change_it_once(monkeypatch):
    monkeypatch.setattr(loss_scale, "GROWTH", 3)
    workers = 4
    scale = LossScale(gradients=workers)
    compute = scale.wrap(lambda _w, state, _b, factor: (tf.constant(1.0), [factor], state))
    seen = []
    for _ in range(8):
        # All workers read the state before any of them writes it.
        before = [each.value.read_value() for each in scale.variables]
        for after in [compute([], before, ())[2] for _ in range(workers)]:
            push_state(scale.variables, before, after)
        seen.append(float(scale.variables[0].value) / FIRST)
    assert seen == [1, 1, 1, 2, 2, 2, 4, 4]


@pytest.mark.parametrize("value", [1.0, np.nan, np.inf])
def test_what_no_scale_makes_finite_is_given_up(value):
    calls = []

    def compute(_weights, state, _batch, factor):
        calls.append(factor)
        return tf.constant(value), [tf.constant(np.inf)], state

    scale = LossScale()
    state = [each.value.read_value() for each in scale.variables]
    _, found, _ = scale.wrap(compute)([], state, ())
    assert not np.isfinite(found[0])
    # If the loss itself is not finite, training has diverged, and no scale helps.
    assert len(calls) == (1 + MOST_HALVINGS if np.isfinite(value) else 1)


def test_rows_that_overflow_stay_rows():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(5, 2), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((2,), dtype="int64"), *layers])
    batch = tf.constant([[0, 1], [1, 4]], tf.int64), tf.constant([0, 2], tf.int64)
    # The loss overflows at the first scale, as a float16 gradient would.
    loss = lambda *args: cross_entropy(*args) * 1e35  # noqa: E731
    scale = LossScale()
    gradient = build_pulled_gradient(model, loss, jit=False, scale=scale, parts=1, in_place=True)
    _, found = tf.function(gradient)(batch)
    assert isinstance(found[0], tf.IndexedSlices)
    assert np.isfinite(found[0].values).all()
    assert scale.variables[0].value < FIRST


def test_a_checkpoint_has_the_scale_under_float16_alone():
    assert SCALE in single().variables()
    assert SCALE not in single(dense, mixed_precision="bfloat16").variables()

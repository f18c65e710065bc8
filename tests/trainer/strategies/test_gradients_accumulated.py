"""Batches that are taken one after the other make the gradient of one that holds them all."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.objectives import cross_entropy
from tests.trainer.plain import CHIEF, NOBODY, Plain, dense, examples, problem_of
from trainer.config.load import parse_config
from trainer.errors import ConfigError
from trainer.models.registry import reset_uids
from trainer.strategies.gradients import pulled_gradient_of
from trainer.strategies.strategy import create, gradient_of, require_updates

PARTS = 4


def linear():
    reset_uids()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((2,)), *layers])


def looked_up():
    reset_uids()
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Embedding(5, 2), keras.layers.Flatten(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((2,), dtype="int64"), *layers])


def stacked(batch):
    return tuple(tf.reshape(each, [PARTS, -1, *each.shape[1:]]) for each in batch)


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_mean_over_parts_is_the_gradient_of_the_whole(in_place, jit):
    loss, expected = gradient_of(linear(), cross_entropy)(examples())
    of_parts = pulled_gradient_of(linear(), cross_entropy, jit=jit, parts=PARTS, in_place=in_place)
    value, found = tf.function(of_parts)(stacked(examples()))
    assert float(value) == pytest.approx(float(loss), rel=1e-5)
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_rows_stay_rows():
    points, labels = examples()
    batch = tf.cast(tf.abs(points) * 2, tf.int64) % 5, labels
    _, expected = gradient_of(looked_up(), cross_entropy)(batch)
    of_parts = pulled_gradient_of(looked_up(), cross_entropy, jit=False, parts=PARTS, in_place=True)
    _, found = tf.function(of_parts)(stacked(batch))
    assert isinstance(found[0], tf.IndexedSlices)
    for mine, theirs in zip(found, expected, strict=True):
        dense_ones = map(tf.convert_to_tensor, (mine, theirs))
        np.testing.assert_allclose(*dense_ones, atol=1e-6)


def test_state_goes_through_all_parts():
    one_by_one, of_parts = dense(), dense()
    batches = stacked(examples())
    step = gradient_of(one_by_one, cross_entropy)
    for part in range(PARTS):
        step(tuple(each[part] for each in batches))
    tf.function(pulled_gradient_of(of_parts, cross_entropy, jit=False, parts=PARTS))(batches)
    for mine, theirs in zip(of_parts.variables, one_by_one.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), atol=1e-6, err_msg=mine.path)


def test_one_process_makes_one_update_of_several_batches():
    plain = Plain()
    config = parse_config({"training": {"strategy": "single", "accumulate": 3}})
    strategy = create(config, NOBODY, CHIEF)
    # Every batch is the same one.
    for each in (plain, strategy):
        each.build(problem_of(linear)(0))
        each.run(5)
    assert strategy.global_step() == 5
    for path, variable in plain.variables().items():
        found = strategy.variables()[path].numpy()
        np.testing.assert_allclose(found, variable.numpy(), atol=1e-5, err_msg=path)


@pytest.mark.parametrize(
    "training", [{"accumulate": 2}, {"ema": 0.5}, {"mixed_precision": "float16"}]
)
def test_a_strategy_of_ones_own_that_makes_its_updates_itself_refuses(training):
    own = f"{Plain.__module__}:{Plain.__name__}"
    config = parse_config({"training": {"strategy": own, **training}})
    with pytest.raises(ConfigError, match=f"training.{next(iter(training))}: '{own}' makes its"):
        create(config, NOBODY, CHIEF)


class OwnStep(keras.Sequential):
    """Updates itself."""

    def train_step(self, _data):
        raise NotImplementedError


def normalized():
    dense = keras.layers.SpectralNormalization(keras.layers.Dense(3), name="spectral")
    return keras.Sequential([keras.Input((2,)), dense])


@pytest.mark.parametrize(
    "training", [{"accumulate": 2}, {"ema": 0.5}, {"mixed_precision": "float16"}]
)
def test_a_model_that_makes_its_updates_itself_refuses(training):
    config = parse_config({"training": {"strategy": "single", **training}})
    key = next(iter(training))
    with pytest.raises(ConfigError) as caught:
        require_updates(config, OwnStep([keras.Input((2,)), keras.layers.Dense(3)]))
    step = "OwnStep.train_step makes its updates itself"
    assert str(caught.value) == f"training.{key}: {step}; leave the key out"
    if key == "ema":
        require_updates(config, normalized())
        return
    with pytest.raises(ConfigError, match=rf"{key}: spectral \(SpectralNormalization\) changes"):
        require_updates(config, normalized())

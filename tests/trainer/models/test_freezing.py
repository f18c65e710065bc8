"""Which variables `training.freeze` keeps from training, and which globs it refuses."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from trainer.errors import ConfigError
from trainer.models import registry
from trainer.models.freezing import freeze


def net():
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, name="hidden")(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    hidden = keras.layers.Dropout(0.5, name="dropout")(hidden)
    return keras.Model(inputs, keras.layers.Dense(2, name="out")(hidden))


def trained(model):
    return [variable.path for variable in model.trainable_variables]


ALL = ["hidden/kernel", "hidden/bias", "norm/gamma", "norm/beta", "out/kernel", "out/bias"]


@pytest.mark.parametrize(
    ("globs", "frozen"),
    [
        ([], []),
        (["hidden/*"], ["hidden/kernel", "hidden/bias"]),
        (["*/kernel"], ["hidden/kernel", "out/kernel"]),
        (["hidden/bias", "norm/*"], ["hidden/bias", "norm/gamma", "norm/beta"]),
        (["norm/gamma"], ["norm/gamma"]),
    ],
)
def test_what_fits_is_not_trained(globs, frozen):
    model = net()
    freeze(model, globs)
    assert trained(model) == [path for path in ALL if path not in frozen]
    # All are still the model's: a checkpoint holds them.
    assert len(model.variables) == len(net().variables)


def moving(model):
    statistics = {v.path: v.numpy() for v in model.variables if "moving" in v.path}
    model(np.ones((8, 3), np.float32), training=True)
    return any((v.numpy() != statistics[v.path]).any() for v in model.variables if "mov" in v.path)


def test_statistics_stay_where_the_whole_layer_is_frozen():
    model = net()
    freeze(model, ["norm/*"])
    assert not moving(model)


def test_statistics_move_where_only_weights_are_frozen():
    model = net()
    freeze(model, ["norm/gamma", "norm/beta"])
    assert moving(model)


def test_a_layer_in_a_model_in_the_model():
    base = net()
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1, name="head")(base(inputs)))
    freeze(model, ["hidden/*", "norm/*", "out/*"])
    assert trained(model) == ["head/kernel", "head/bias"]
    assert not moving(model)


@pytest.mark.parametrize(
    ("glob", "said"),
    [
        ("hiden/*", "'hiden/*' fits no variable; did you mean 'hidden/bias'?"),
        ("hidden", "'hidden' fits no variable; did you mean 'hidden/bias'?"),
        (
            "norm/moving_*",
            "'norm/moving_*' fits only norm/moving_mean, state that no gradient trains; it stays "
            "as it is where its whole layer is frozen: 'norm/*'",
        ),
    ],
)
def test_a_glob_that_freezes_nothing_is_refused(glob, said):
    with pytest.raises(ConfigError) as caught:
        freeze(net(), ["out/bias", glob])
    assert str(caught.value) == f"training.freeze: {said}"


def test_a_layer_that_the_model_has_frozen_itself_may_be_named():
    model = net()
    model.get_layer("norm").trainable = False
    freeze(model, ["norm/moving_*", "norm/gamma"])
    assert trained(model) == ["hidden/kernel", "hidden/bias", "out/kernel", "out/bias"]


def test_with_everything_frozen_there_is_nothing_to_train():
    model = net()
    freeze(model, ["*"])
    with pytest.raises(ConfigError, match=r"all of its variables are frozen, .* training.freeze"):
        registry.require_trainable("net", model)

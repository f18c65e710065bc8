"""What is configured and cannot be done with the model is refused before training."""

from __future__ import annotations

import keras
import pytest

from trainer.config.load import parse_config
from trainer.errors import ConfigError
from trainer.training.dry_run import require


class Kept(keras.layers.Layer):
    """A layer that cannot be read back."""

    def __init__(self, function, **settings):
        super().__init__(**settings)
        self.function = function

    def call(self, inputs):
        return self.function(inputs)


def net(*layers, trainable=True):
    inputs = keras.layers.Input((4,))
    model = keras.Sequential([inputs, *layers, keras.layers.Dense(3, name="logits")])
    model.trainable = trainable
    return model


def frozen():
    """Freeze each layer, as `include_top` models are used, and not the model."""
    model = net()
    for layer in model.layers:
        layer.trainable = False
    return model


MODELS = {
    "plain": net,
    "frozen": lambda: net(trainable=False),
    "frozen layers": frozen,
    "without variables": lambda: keras.Sequential([keras.layers.Input((3,))]),
    "lambda": lambda: net(keras.layers.Lambda(lambda x: x / 2, name="half")),
    "own": lambda: net(Kept(keras.ops.relu, name="kept")),
}
SAVED_ALONE = {"export": {"formats": ["saved_model"]}}
SERVERS = {"parameter_servers": 2}


def configured(tree):
    return parse_config({"model": {"name": "some:model"}, **tree})


@pytest.mark.parametrize(
    ("model", "tree", "message"),
    [
        ("frozen", {}, "it has nothing to train: all of its variables are frozen"),
        ("frozen layers", SAVED_ALONE, "it has nothing to train: all of its variables are frozen"),
        ("without variables", {}, "it has nothing to train: it has no variables"),
        ("lambda", {}, "its layer half (Lambda) cannot be written in the format keras and read "),
        ("own", {}, "its layer kept (Kept) cannot be written in the format keras and read back: "),
    ],
)
def test_a_model_that_cannot_be_trained_or_exported_is_refused(model, tree, message):
    with pytest.raises(ConfigError) as error:
        require(configured(tree), MODELS[model]())
    assert str(error.value).startswith(f"model some:model: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("model", ["lambda", "own"])
def test_without_the_format_keras_nothing_has_to_be_read_back(model):
    require(configured(SAVED_ALONE), MODELS[model]())


def test_a_glob_that_fits_no_variable_is_refused():
    tree = {"cluster": {**SERVERS, "placement": {"hidden/*": "ps:1"}}}
    model = net()
    with pytest.raises(ConfigError, match=r"^cluster.placement: 'hidden/\*' fits no variable"):
        require(configured(tree), model)
    require(configured({**tree, "training": {"strategy": "single"}}), model)


def test_a_model_that_fits_is_left_as_it_is():
    model = net()
    before = [variable.path for variable in model.variables]
    tree = {"cluster": {**SERVERS, "placement": {before[0]: "ps:1"}}}
    require(configured(tree), model)
    assert [variable.path for variable in model.variables] == before


def test_a_glob_of_a_warm_start_that_fits_nothing_is_refused():
    warm_start = {"from": "gs://b/c", "exclude": ["logit/*"]}
    with pytest.raises(ConfigError, match=r"^training.warm_start.exclude: 'logit/\*' fits no var"):
        require(configured({"training": {"warm_start": warm_start}}), net())

"""Every Keras optimizer by name, and what is said about wrong arguments."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.config.optimizer import OPTIMIZERS, OptimizerConfig
from trainer.config.schema import TrainingConfig
from trainer.errors import ConfigError
from trainer.training import optimizers
from trainer.training.optimizers import build_optimizer


def _build(kind, **args):
    return _of(OptimizerConfig(name=kind, args=args))


def _of(settings):
    return build_optimizer(TrainingConfig.model_construct(optimizer=settings))


def _refusal(kind, **args):
    with pytest.raises(ConfigError) as caught:
        _build(kind, **args)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_the_configuration_knows_every_keras_optimizer():
    assert sorted(optimizers.available()) == sorted(OPTIMIZERS)


def test_wrappers_are_optimizers_of_keras_still():
    for name in optimizers.NOT_OFFERED:
        assert issubclass(getattr(keras.optimizers, name), keras.optimizers.Optimizer)


def test_refused_arguments_are_arguments_of_keras_still():
    known = {*keras.optimizers.Adam().get_config(), "name"}
    assert set(optimizers.REFUSED) <= known


@pytest.mark.parametrize("name", sorted(optimizers.available()))
def test_each_optimizer_is_plain_and_has_the_learning_rate(name):
    optimizer = _of(OptimizerConfig.model_construct(name=name, learning_rate=0.25))
    assert type(optimizer) is optimizers.available()[name]
    assert not optimizer.built
    assert float(optimizer.learning_rate) == pytest.approx(0.25)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(optimizers.available()))
def test_each_optimizer_learns_inside_a_function(name):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    optimizer = _of(OptimizerConfig.model_construct(name=name, learning_rate=0.05))
    optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    x = tf.constant(np.random.default_rng(0).normal(size=(30, 4)), tf.float32)
    y = tf.argmax(x[:, :3], axis=1)

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = [float(step()) for _ in range(40)]
    assert losses[-1] < losses[0]


def test_arguments_are_passed_on():
    optimizer = _build("sgd", momentum=0.9, nesterov=True, clipnorm=1.0)
    assert (optimizer.momentum, optimizer.nesterov, optimizer.clipnorm) == (0.9, True, 1.0)


def test_nothing_may_stand_where_keras_says_nothing():
    assert _build("adam", clipnorm=None).clipnorm is None


def test_a_whole_number_is_a_number():
    assert _build("adam", global_clipnorm=5).global_clipnorm == 5


def test_unknown_argument_names_the_nearest():
    message = _refusal("sgd", momentm=0.9)
    assert message.startswith("training.optimizer.args.momentm: sgd takes momentum, nesterov, ")
    assert message.endswith("; did you mean 'momentum'?")


@pytest.mark.parametrize("argument", sorted(optimizers.REFUSED))
def test_arguments_without_effect_are_refused(argument):
    message = _refusal("adam", **{argument: 1})
    assert message.startswith(f"training.optimizer.args.{argument} cannot be set: ")


def test_the_learning_rate_has_a_key_of_its_own():
    assert _refusal("adam", learning_rate=0.1) == (
        "training.optimizer.args.learning_rate cannot be set: set training.optimizer.learning_rate"
    )


@pytest.mark.parametrize(
    ("name", "argument", "value", "allowed"),
    [
        ("adam", "beta_1", "0.9", "a number"),
        ("adam", "beta_1", None, "a number"),
        ("adam", "beta_1", True, "a number"),
        ("adam", "clipnorm", "1", "a number"),
        ("adam", "amsgrad", 1, "true or false"),
        ("muon", "ns_steps", 2.5, "a whole number"),
        ("muon", "ns_steps", True, "a whole number"),
        ("muon", "exclude_layers", "logits", "a list of texts"),
        ("muon", "exclude_layers", [1], "a list of texts"),
    ],
)
def test_wrong_types_are_named(name, argument, value, allowed):
    assert _refusal(name, **{argument: value}) == (
        f"training.optimizer.args.{argument}: {value!r} is not allowed; it has to be {allowed}"
    )


def test_a_list_of_layers_is_passed_on():
    assert _build("muon", exclude_layers=["logits"]).exclude_layers == ["logits"]


def test_what_keras_itself_refuses_is_one_line():
    message = _refusal("adam", clipnorm=1.0, clipvalue=1.0)
    assert message.startswith("training.optimizer.args of adam: ")

"""The optimizer that a model is compiled with, made again where `training.optimizer` says so."""

from __future__ import annotations

import keras
import pytest

from trainer.config.load import parse_config
from trainer.errors import ConfigError
from trainer.training.optimizers import build_optimizer


def compiled_with(optimizer, policy="float32"):
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model.compile(optimizer=optimizer, loss="mse")
    return model


def built(optimizer, policy="float32", **training):
    config = parse_config({"training": {"optimizer": {"name": "model"}, **training}})
    return build_optimizer(config.training, compiled_with(optimizer, policy).optimizer)


def test_it_has_the_settings_and_no_variable_of_the_compiled_one():
    given = keras.optimizers.AdamW(0.02, weight_decay=0.3, beta_1=0.5, global_clipnorm=2.0)
    made = built(given)
    assert made is not given
    assert type(made) is keras.optimizers.AdamW
    assert made.get_config() == given.get_config()
    assert not made.built


def test_a_schedule_comes_with_it():
    made = built(keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, 10)))
    made.build(compiled_with("sgd").trainable_variables)
    assert float(made.learning_rate) == pytest.approx(0.5)
    made.iterations.assign(10)
    assert float(made.learning_rate) == pytest.approx(0.0)


def test_weight_decay_leaves_out_what_it_left_out():
    given = keras.optimizers.AdamW(0.02)
    given.exclude_from_weight_decay(var_names=["bias", "gamma"])
    made = built(given)
    kernel, bias = compiled_with("sgd").trainable_variables
    assert (made._use_weight_decay(kernel), made._use_weight_decay(bias)) == (True, False)


def test_under_float16_the_strategy_scales_the_loss():
    made = built("adam", policy="mixed_float16", mixed_precision="float16")
    assert type(made) is keras.optimizers.Adam


def excluding_a_variable():
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_list=compiled_with("sgd").trainable_variables)
    return optimizer


class Unmade(keras.optimizers.SGD):
    """Cannot be made again."""

    def __init__(self, pace):
        super().__init__(pace)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keras.optimizers.Adam(use_ema=True), "has use_ema: set training.ema"),
        (
            lambda: keras.optimizers.Adam(gradient_accumulation_steps=2),
            "has gradient_accumulation_steps: set training.accumulate",
        ),
        (
            lambda: keras.optimizers.Adam(loss_scale_factor=8.0),
            "has loss_scale_factor: set training.mixed_precision: float16, which scales the loss",
        ),
        (
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()),
            "scales the loss; set training.mixed_precision: float16",
        ),
        (keras.optimizers.ScheduleFreeAdamW, "is ScheduleFreeAdamW, which cannot be used here"),
        (excluding_a_variable, "excludes variables from weight decay by var_list"),
        (lambda: Unmade(0.1), "is Unmade, which cannot be made again from its get_config: "),
    ],
)
def test_what_another_loop_needs_is_refused_in_one_line(make, message):
    with pytest.raises(ConfigError) as caught:
        built(make())
    assert str(caught.value).startswith(f"training.optimizer.name: model {message}")
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_compiled_has_none():
    config = parse_config({"training": {"optimizer": {"name": "model"}}})
    with pytest.raises(ConfigError, match="and the model is not compiled; compile it, or name one"):
        build_optimizer(config.training)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"optimizer": {"name": "model", "learning_rate": 0.1}}, "training.optimizer: learning_ra"),
        (
            {"optimizer": {"name": "model", "args": {"beta_1": 0.5}}},
            "training.optimizer: args: the",
        ),
        (
            {"optimizer": {"name": "model"}, "schedule": {"warmup_steps": 3}},
            "training.schedule: the optimizer of the model has its own; leave it out",
        ),
    ],
)
def test_the_model_alone_says_its_settings(training, message):
    with pytest.raises(ConfigError, match=message):
        parse_config({"training": training})

"""Tests users' own models, the errors for models that do not fit, and frozen layers."""

from __future__ import annotations

import os
import re
import sys
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.schema import ModelConfig
from flotilla.trainer.models import registry
from flotilla.trainer.models.registry import freeze
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.objectives import of_classes
from tests.trainer.refusal import refusal

SPEC = InputSpec(shape=(4,), dtype="float32", output_shape=(3,))
BATCH = np.ones((2, 4), np.float32)

MODULE = """
    import keras
    from keras import layers

    def functional(spec, *, units=8):
        given = keras.Input(spec.shape, dtype=spec.dtype)
        return keras.Model(given, layers.Dense(spec.num_classes)(layers.Dense(units)(given)))

    def open_arguments(spec, **args):
        return functional(spec, units=args["units"])

    def not_built(spec):
        return keras.Sequential([layers.Dense(8), layers.Dense(spec.num_classes)])

    class Own(keras.Model):
        def __init__(self, classes):
            super().__init__()
            self.hidden = layers.Dense(8)
            self.norm = layers.BatchNormalization()
            self.drop = layers.Dropout(0.5)
            self.out = layers.Dense(classes)

        def call(self, x, training=False):
            x = self.norm(self.hidden(x), training=training)
            return self.out(self.drop(x, training=training))

    def subclass(spec):
        return Own(spec.num_classes)

    def no_model(spec):
        return "a text"

    def probabilities(spec):
        return keras.Sequential([layers.Dense(spec.num_classes, activation="softmax")])

    def wrong_classes(spec):
        return keras.Sequential([layers.Dense(spec.num_classes + 1)])

    def two_outputs(spec):
        given = keras.Input(spec.shape)
        return keras.Model(given, [layers.Dense(3)(given), layers.Dense(3)(given)])

    def whole_numbers(spec):
        given = keras.Input(spec.shape)
        return keras.Model(given, keras.ops.cast(layers.Dense(3)(given), "int32"))

    def wrong_input(spec):
        return keras.Sequential([keras.Input((99,)), layers.Dense(spec.num_classes)])

    class SameNames(keras.Model):
        def __init__(self, classes):
            super().__init__()
            self.first = layers.Dense(4, name="a")
            self.second = layers.Dense(classes, name="a")

        def call(self, x):
            return self.second(self.first(x))

    def same_names(spec):
        return SameNames(spec.num_classes)

    def raises(spec):
        raise RuntimeError("no weights here\\nsecond line")

    def needs(spec, size):
        return functional(spec, units=size)

    def without_arguments():
        return keras.Sequential()

    NOT_A_FUNCTION = 3
    MODEL = keras.Sequential([layers.Dense(3)])
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Return a function that builds a model from a user's module."""
    (tmp_path / "own_models.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_models", raising=False)

    def build(function, spec=SPEC, seed=0, **args):
        config = ModelConfig(name=f"own_models:{function}", args=args)
        return registry.build(config, spec, seed, of_classes(spec.num_classes).accept)

    yield build
    sys.modules.pop("own_models", None)


def test_own_models_are_built_and_give_logits_and_get_their_arguments(own):
    for function in ("functional", "not_built", "subclass"):
        model = own(function)
        assert model.built
        assert model.variables
        assert model(BATCH).shape == (2, 3)
    assert own("functional", units=5).layers[1].units == 5
    assert own("open_arguments", units=6).layers[1].units == 6


@pytest.mark.parametrize("function", ["not_built", "subclass"])
def test_names_given_by_keras_do_not_depend_on_what_was_built_before(own, function):
    first = own(function, seed=4)
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    second = own(function, seed=4)
    assert [v.path for v in first.variables] == [v.path for v in second.variables]
    for left, right in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())


def test_a_model_that_was_built_before_goes_on(own):
    first = own("subclass")
    before = first(BATCH).numpy()
    own("functional")
    np.testing.assert_array_equal(first(BATCH).numpy(), before)


def test_a_strategy_scope_stays_usable_and_owns_the_variables(own):
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = own("subclass")
        assert tf.distribute.get_strategy() is strategy
    assert tf.distribute.get_strategy() is not strategy
    for variable in model.variables:
        assert variable.value.distribute_strategy is strategy


def test_the_dtype_policy_stays():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = registry.build(ModelConfig(name="mlp"), SPEC, 0)
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
        assert model.get_layer("hidden_0").compute_dtype == "bfloat16"
        assert model(BATCH).dtype == tf.float32
    finally:
        keras.config.set_dtype_policy("float32")


IMPORTED = {
    "no_such_package": (None, "ModuleNotFoundError: No module named 'no_such_package'; put it in "),
    "broken_models": ("def model(spec:\n", "SyntaxError"),
    "script_models": ("import sys\nsys.exit(3)\n", "SystemExit: 3 ({folder}/script_models.py:2)"),
    "json": (None, "Python has a module with the name json; rename your module"),
}


@pytest.mark.parametrize("module", IMPORTED)
def test_a_module_that_cannot_be_imported_is_one_line(module, tmp_path, monkeypatch):
    code, words = IMPORTED[module]
    if code:
        (tmp_path / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
    message = refusal(registry.build, ModelConfig(name=f"{module}:model"), SPEC, 0)
    assert words.format(folder=tmp_path) in message
    if module != "json":
        assert message.startswith(f"model {module}:model: cannot import {module}: ")
    if module == "no_such_package":
        assert message.endswith(f"put it in {os.getcwd()} or on PYTHONPATH")


REFUSED = {
    "functionl": ": own_models has no function 'functionl'; did you mean 'functional'\\?",
    "raises": r": RuntimeError: no weights here \(.*/own_models\.py:\d+\)",
    "two_outputs": ": the output is a list, but the task has one output; return the tensor itself",
    "probabilities": ": .*remove the softmax from its last layer.*",
    "wrong_classes": (
        r": the output must be floats of shape \(batch, 3\) for classification of 'label' \(one "
        r"int64 of 3 classes\), not float32 of shape \(None, 4\)"
    ),
    "whole_numbers": r": .*not int32 of shape \(None, 3\)",
    "same_names": ": .*checkpoints identify variables by name",
    "without_arguments": (
        r": the function accepts .*own_models.py:68\); its first argument must be the `InputSpec`"
    ),
    "NOT_A_FUNCTION": ": NOT_A_FUNCTION is of type int; give the name of a function",
    "MODEL": " is a Keras model, not a function that returns one",
    "no_model": " is a str, not a keras.Model",
    "wrong_input": r" does not accept the dataset's input of shape \(4,\) and type float32: .*",
}


@pytest.mark.parametrize("function", REFUSED)
def test_what_is_no_fitting_model_is_refused_in_one_line(own, function):
    assert re.fullmatch(f".*own_models:{function}{REFUSED[function]}", refusal(own, function))


def test_arguments_of_an_own_function_are_named(own):
    assert refusal(own, "functional", unit=3) == (
        "model.args: own_models:functional has no argument 'unit' (it takes units); "
        "did you mean 'units'?"
    )
    message = refusal(own, "needs")
    assert message.startswith("model.args: own_models:needs needs 'size' (it takes size) (")
    assert message.endswith("own_models.py:65); set model.args: {size: VALUE}")


def listed(spec, *, shape=(3, 1)):
    given = spec.symbols()
    return keras.Model(given, [keras.layers.Dense(each)(given) for each in shape])


def test_a_list_of_outputs_goes_by_the_order_of_the_targets():
    spec = InputSpec(shape=(4,), dtype="float32", output_shape={"city": (3,), "income": (1,)})
    model = registry.build(ModelConfig(name=f"{__name__}:listed"), spec, seed=0)
    shapes = {name: each.shape for name, each in model.output.items()}
    assert shapes == {"city": (None, 3), "income": (None, 1)}


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
    assert len(model.variables) == len(net().variables)


def moving(model):
    statistics = {v.path: v.numpy() for v in model.variables if "moving" in v.path}
    model(np.ones((8, 3), np.float32), training=True)
    return any((v.numpy() != statistics[v.path]).any() for v in model.variables if "mov" in v.path)


def test_statistics_stay_only_where_the_whole_layer_is_frozen():
    for globs, moves in ((["norm/*"], False), (["norm/gamma", "norm/beta"], True)):
        model = net()
        freeze(model, globs)
        assert moving(model) == moves


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
        ("hiden/*", "'hiden/*' matches no variable; did you mean 'hidden/bias'?"),
        ("hidden", "'hidden' matches no variable; did you mean 'hidden/bias'?"),
        (
            "norm/moving_*",
            "'norm/moving_*' matches only norm/moving_mean, which gradients do not "
            "train; to keep it unchanged, freeze its whole layer: 'norm/*'",
        ),
    ],
)
def test_a_glob_that_freezes_nothing_is_refused(glob, said):
    assert refusal(freeze, net(), ["out/bias", glob]) == f"training.freeze: {said}"


def test_a_layer_that_the_model_has_frozen_itself_may_be_named():
    model = net()
    model.get_layer("norm").trainable = False
    freeze(model, ["norm/moving_*", "norm/gamma"])
    assert trained(model) == ["hidden/kernel", "hidden/bias", "out/kernel", "out/bias"]


def test_with_everything_frozen_there_is_nothing_to_train():
    model = net()
    freeze(model, ["*"])
    with pytest.raises(ConfigError, match=r"all variables are frozen, .* training.freeze"):
        registry.require_trainable("net", model)

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

    def two_inputs(spec):
        given = spec.symbols()
        joined = layers.Concatenate()([layers.Flatten()(x) for x in given.values()])
        return keras.Model(given, layers.Dense(spec.num_classes)(joined))

    def no_model(spec):
        return "a text"

    def nothing(spec):
        return None

    def probabilities(spec):
        return keras.Sequential([layers.Dense(spec.num_classes, activation="softmax")])

    def softmax_layer(spec):
        return keras.Sequential([layers.Dense(spec.num_classes), layers.Softmax()])

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


def _refusal(build, function, spec=SPEC, **args):
    with pytest.raises(ConfigError) as caught:
        build(function, spec, **args)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("function", ["functional", "not_built", "subclass"])
def test_own_models_are_built_and_give_logits(own, function):
    model = own(function)
    assert model.built
    assert model.variables
    assert model(BATCH).shape == (2, 3)


def test_own_arguments_are_passed_on(own):
    assert own("functional", units=5).layers[1].units == 5
    assert own("open_arguments", units=6).layers[1].units == 6


def test_own_model_may_take_several_inputs(own):
    spec = InputSpec(
        shape={"left": (2,), "right": (3,)},
        dtype={"left": "float32", "right": "float32"},
        output_shape=(2,),
    )
    model = own("two_inputs", spec)
    batch = {"left": np.ones((4, 2), np.float32), "right": np.ones((4, 3), np.float32)}
    assert model(batch).shape == (4, 2)


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


def test_unknown_module():
    with pytest.raises(ConfigError) as caught:
        registry.build(ModelConfig(name="no_such_package:model"), SPEC, 0)
    assert str(caught.value) == (
        "model no_such_package:model: cannot import no_such_package: ModuleNotFoundError: "
        f"No module named 'no_such_package'; put it in {os.getcwd()} or on PYTHONPATH"
    )


def test_module_that_fails_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "broken_models.py").write_text("def model(spec:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="cannot import broken_models: SyntaxError") as caught:
        registry.build(ModelConfig(name="broken_models:model"), SPEC, 0)
    assert "\n" not in str(caught.value)


def test_module_that_ends_the_process_while_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "script_models.py").write_text("import sys\nsys.exit(3)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        registry.build(ModelConfig(name="script_models:model"), SPEC, 0)
    assert str(caught.value).endswith(
        f"cannot import script_models: SystemExit: 3 ({tmp_path}/script_models.py:2)"
    )


def test_module_that_one_of_pythons_own_hides():
    with pytest.raises(
        ConfigError, match="Python has a module with the name json; rename your module"
    ):
        registry.build(ModelConfig(name="json:model"), SPEC, 0)


def test_own_function_without_an_argument(own):
    message = _refusal(own, "without_arguments")
    assert message.startswith("model own_models:without_arguments: the function accepts")
    assert message.endswith("own_models.py:79); its first argument must be the `InputSpec`")


def test_unknown_function_names_the_nearest(own):
    assert _refusal(own, "functionl") == (
        "model own_models:functionl: own_models has no function 'functionl'; "
        "did you mean 'functional'?"
    )


def test_something_that_cannot_be_called(own):
    assert "NOT_A_FUNCTION is of type int; give the name of a function" in _refusal(
        own, "NOT_A_FUNCTION"
    )


def test_a_model_in_place_of_a_function(own):
    assert _refusal(own, "MODEL") == (
        "model own_models:MODEL is a Keras model, not a function that returns one"
    )


def test_unknown_argument_of_an_own_function(own):
    assert _refusal(own, "functional", unit=3) == (
        "model.args: own_models:functional has no argument 'unit' (it takes units); "
        "did you mean 'units'?"
    )


def test_missing_argument_of_an_own_function(own):
    message = _refusal(own, "needs")
    assert message.startswith("model.args: own_models:needs needs 'size' (it takes size) (")
    assert message.endswith("own_models.py:76); set model.args: {size: VALUE}")


def test_own_function_that_raises(own):
    message = _refusal(own, "raises")
    assert re.fullmatch(
        r"model own_models:raises: RuntimeError: no weights here \(.*/own_models\.py:\d+\)", message
    )


@pytest.mark.parametrize(("function", "kind"), [("no_model", "str"), ("nothing", "NoneType")])
def test_own_function_that_returns_no_model(own, function, kind):
    message = _refusal(own, function)
    assert message == f"model own_models:{function} is a {kind}, not a keras.Model"


@pytest.mark.parametrize("function", ["probabilities", "softmax_layer"])
def test_probabilities_in_the_place_of_logits(own, function):
    assert "remove the softmax from its last layer" in _refusal(own, function)


def test_wrong_number_of_classes(own):
    assert _refusal(own, "wrong_classes") == (
        "model own_models:wrong_classes: the output must be floats of shape (batch, 3) for "
        "classification of 'label' (one int64 of 3 classes), not float32 of shape (None, 4)"
    )


def test_output_that_is_not_float(own):
    assert "not int32 of shape (None, 3)" in _refusal(own, "whole_numbers")


def test_several_outputs(own):
    assert "the output is a list, but the task has one output; return" in _refusal(
        own, "two_outputs"
    )


def test_model_for_another_input(own):
    message = _refusal(own, "wrong_input")
    assert "does not accept the dataset's input of shape (4,) and type float32" in message


def test_two_variables_of_one_name(own):
    message = _refusal(own, "same_names")
    assert "checkpoints identify variables by name" in message


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
    with pytest.raises(ConfigError, match=r"all variables are frozen, .* training.freeze"):
        registry.require_trainable("net", model)

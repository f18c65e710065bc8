"""Tests the built-in classifiers: shapes, names of variables, and errors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.model import MODELS, ModelConfig
from flotilla.trainer.embeddings.embedding_table import SEED
from flotilla.trainer.models import registry
from flotilla.trainer.models.classifiers import Augmentation
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.strategies.gradients import build_pulled_gradient
from flotilla.trainer.strategies.strategy import build_gradient
from tests.trainer.objectives import of_classes
from tests.trainer.refusal import refusal

# Models with a single input tensor; those with IDs or tokens have their own tests.
OF_NAMED_INPUTS = {"two_tower", "two_tower_ranker", "gru", "tabular", "text", "sequence"}
PLAIN = tuple(name for name in MODELS if name not in OF_NAMED_INPUTS)
DIGITS = InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(10,))
TABLE = InputSpec(shape=(4,), dtype="float32", output_shape=(3,))


def _build(name, spec=DIGITS, seed=0, **args):
    return registry.build(ModelConfig(name=name, args=args), spec, seed)


def _paths(model):
    return [variable.path for variable in model.variables]


def _batch(spec, count=5):
    random = np.random.default_rng(0)
    if spec.dtype == "uint8":
        return random.integers(0, 256, (count, *spec.shape), dtype=np.uint8)
    return random.normal(size=(count, *spec.shape)).astype(spec.dtype)


@pytest.mark.parametrize("name", PLAIN)
def test_output_is_one_float_logit_for_each_class_of_any_number_of_examples(name):
    model = _build(name)
    logits = model(_batch(DIGITS)).numpy()
    assert logits.shape == (5, 10)
    assert logits.dtype == np.float32
    assert not np.allclose(logits.sum(axis=1), 1), "a softmax would sum up to one"
    np.testing.assert_allclose(model(_batch(DIGITS)[:1]), logits[:1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_same_seed_gives_the_same_weights_and_names_whatever_was_built_before(name):
    first = _build(name, seed=3)
    _build("mlp", hidden_units=[5, 5, 5], dropout=0.5, seed=9)
    second, other = _build(name, seed=3), _build(name, seed=4)
    assert _paths(first) == _paths(second)
    for left, right in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())
    kernels = (each.trainable_variables[0].numpy() for each in (first, other))
    assert not np.array_equal(*kernels)


def test_softmax_is_one_linear_layer_and_bytes_are_brought_into_zero_to_one():
    model = _build("softmax")
    assert _paths(model) == ["logits/kernel", "logits/bias"]
    assert model.count_params() == 64 * 10 + 10
    white = np.full((1, 8, 8, 1), 255, np.uint8)
    kernel, bias = (variable.numpy() for variable in model.variables)
    np.testing.assert_allclose(model(white).numpy()[0], kernel.sum(axis=0) + bias, rtol=1e-5)


def test_floats_are_taken_as_they_are():
    model = _build("softmax", TABLE)
    kernel, bias = (variable.numpy() for variable in model.variables)
    batch = _batch(TABLE)
    np.testing.assert_allclose(model(batch).numpy(), batch @ kernel + bias, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dtype", "batch"),
    [((4,), "int64", [[0, 1, 0, 1]]), ((4,), "bool", [[0, 1, 0, 1]]), ((), "float32", [1, 2])],
)
def test_numbers_of_any_type_and_single_ones_are_inputs(shape, dtype, batch):
    spec = InputSpec(shape=shape, dtype=dtype, output_shape=(3,))
    logits = _build("mlp", spec)(np.array(batch, dtype)).numpy()
    assert logits.shape == (len(batch), 3)
    assert logits.dtype == np.float32
    assert np.isfinite(logits).all()


def test_softmax_draws_its_weights_as_configured():
    spread = {"class_name": "RandomNormal", "config": {"stddev": 1.0}}
    wide = InputSpec(shape=(28, 28, 1), dtype="uint8", output_shape=(10,))
    kernel, bias = _build("softmax", wide, kernel_initializer=spread).variables
    assert np.std(kernel.numpy()) == pytest.approx(1, abs=0.05)
    assert not bias.numpy().any()
    assert not _build("softmax", kernel_initializer="zeros").variables[0].numpy().any()


@pytest.mark.parametrize(
    "value", ["glorot", 3, None, {}, {"class_name": "Dense"}, {"stddev": 1.0}, "Dense"]
)
def test_an_initializer_that_keras_does_not_have_is_refused(value):
    with pytest.raises(ConfigError, match=r"kernel_initializer: .* must be a Keras initializer"):
        _build("softmax", kernel_initializer=value)


def test_mlp_has_the_hidden_layers_that_were_asked_for():
    model = _build("mlp", hidden_units=[7, 5])
    shapes = [tuple(variable.shape) for variable in model.variables]
    assert shapes == [(64, 7), (7,), (7, 5), (5,), (5, 10), (10,)]
    assert _paths(model)[0] == "hidden_0/kernel"
    assert _build("mlp", hidden_units=[]).count_params() == 64 * 10 + 10
    assert _build("mlp").get_layer("hidden_0").units == 100


def test_dropout_works_in_training_only_and_has_names_of_its_own():
    model = _build("mlp", hidden_units=[50, 50], dropout=0.5)
    batch = _batch(DIGITS)
    np.testing.assert_array_equal(model(batch).numpy(), model(batch).numpy())
    assert not np.array_equal(model(batch, training=True).numpy(), model(batch).numpy())
    assert len(set(_paths(model))) == len(_paths(model)) == 8


def test_cnn_has_the_layers_that_were_asked_for():
    model = _build("cnn", filters=[2, 3], kernel_size=5, hidden_units=[4], dropout=0.1)
    shapes = {variable.path: tuple(variable.shape) for variable in model.variables}
    assert shapes["convolution_0/kernel"] == (5, 5, 1, 2)
    assert shapes["convolution_1/kernel"] == (5, 5, 2, 3)
    assert shapes["hidden_0/kernel"] == (2 * 2 * 3, 4)
    assert shapes["logits/kernel"] == (4, 10)
    # An image may have no channel axis, and may be pooled any number of times.
    spec = InputSpec(shape=(8, 6), dtype="uint8", output_shape=(4,))
    assert _build("cnn", spec, filters=[2])(_batch(spec)).shape == (5, 4)
    assert _build("cnn", filters=[2] * 6).get_layer("pool_5").output.shape == (None, 1, 1, 2)


def _augmenting():
    model = _build("cnn", augment=True, filters=[4], hidden_units=[5], dropout=0.5)
    return of_classes(10).attach(model)


def test_augmented_images_differ_in_training_only():
    augmented, plain = (_build("cnn", augment=each) for each in (True, False))
    batch = _batch(DIGITS)
    plain.set_weights([each.numpy() for each in augmented.trainable_variables])
    once, again = (augmented(batch, training=True).numpy() for _ in range(2))
    same = _build("cnn", augment=True)(batch, training=True).numpy()
    assert not np.allclose(once, again)
    np.testing.assert_array_equal(once, same)
    for answers in (augmented(batch), augmented(batch, training=False)):
        np.testing.assert_array_equal(answers, plain(batch))


def test_images_keep_their_colours_and_are_moved_apart():
    image = np.zeros((1, 20, 20, 3), np.float32)
    image[0, 8:12, 8:12] = [1, 0.5, 0.25]
    keras.utils.set_random_seed(1)
    found = Augmentation()(np.repeat(image, 9, axis=0), training=True).numpy()
    assert len({each.tobytes() for each in found}) == 9
    np.testing.assert_allclose(found[..., 1] * 2, found[..., 0], atol=1e-6)
    middles = [np.argwhere(each[..., 0] > 0.5).mean(axis=0) for each in found]
    assert np.abs(np.array(middles) - 9.5).max() < 5


def test_a_worker_with_a_copy_of_the_values_augments_alike():
    here, copied = _augmenting(), _augmenting()
    loss = of_classes(10).loss
    batch = (tf.constant(_batch(DIGITS)), tf.range(5))
    for _ in range(2):
        value, gradients = build_gradient(here, loss)(batch)
        other, pulled = build_pulled_gradient(copied, loss, jit=False)(batch)
        assert float(value) == pytest.approx(float(other), rel=1e-5)
        for left, right in zip(gradients, pulled, strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5)
    seeds = [each for each in _paths(copied) if each.endswith(SEED)]
    assert len(seeds) == 4
    for left, right in zip(here.variables, copied.variables, strict=True):
        np.testing.assert_array_equal(left.numpy(), right.numpy())


def test_cnn_refuses_what_is_no_image():
    line = (
        r"images must have the shape \(height, width\) or .* has the shape \(4,\); use mlp or soft"
    )
    with pytest.raises(ConfigError, match=f"^model cnn: {line}"):
        _build("cnn", TABLE)


@pytest.mark.parametrize(
    ("shape", "dtype", "line"),
    [
        (
            {"age": (), "fare": ()},
            {"age": "float32", "fare": "float32"},
            "one input feature is allowed, but there are age, fare; use `tabular`, or your own "
            "model as package.module:function",
        ),
        ((), "string", "the input must be numeric, but it is a string"),
    ],
)
@pytest.mark.parametrize("name", PLAIN)
def test_several_inputs_or_a_text_need_a_model_of_ones_own(name, shape, dtype, line):
    with pytest.raises(ConfigError, match=f"^model {name}: {line}"):
        _build(name, InputSpec(shape=shape, dtype=dtype, output_shape=(2,)))


def test_wrong_arguments_are_named():
    assert refusal(_build, "mlp", hidden_unit=[3]) == (
        "model.args: mlp has no argument 'hidden_unit' (it takes hidden_units, dropout); did you "
        "mean 'hidden_units'?"
    )


SIZE, SIZES = "a whole number of at least 1", "a list of whole numbers of at least 1"
SHARE = "a number of at least 0 and below 1"


@pytest.mark.parametrize(
    ("name", "key", "values", "allowed"),
    [
        ("mlp", "hidden_units", [100, [0], [-1], [1.5], [True], ["8"], "8", None, {"a": 1}], SIZES),
        ("cnn", "filters", [[0], [1.5], "8"], SIZES),
        ("mlp", "dropout", [-0.1, 1, 1.0, True, "0.5", None], SHARE),
        ("cnn", "dropout", [1.0], SHARE),
        ("cnn", "kernel_size", [0, -3, 2.0, True, "3", None], SIZE),
        ("cnn", "augment", [1], "true or false"),
    ],
)
def test_arguments_are_checked(name, key, values, allowed):
    for value in values:
        line = f"model {name}: {key}: {value!r} is not allowed; it must be {allowed}"
        assert refusal(_build, name, **{key: value}) == line


@pytest.mark.parametrize("name", PLAIN)
def test_they_end_in_one_linear_layer_for_each_output(name):
    shapes = {"digit": (10,), "corner": (2, 2)}
    model = _build(name, InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=shapes))
    assert {key: each.shape[1:] for key, each in model.output.items()} == shapes
    assert {layer.units for layer in model.layers if layer.name.endswith("_output")} == {10, 4}


PLACES = 5


def build(output_shape, shape=(PLACES,), dtype="int64", **args):
    spec = InputSpec(shape=shape, dtype=dtype, output_shape=output_shape)
    return registry.build(ModelConfig(name="gru", args={"vocabulary": 4, **args}), spec, seed=0)


@pytest.mark.parametrize(
    ("output_shape", "bidirectional"),
    [((3,), True), ((PLACES, 3), False), ({"a": (2,), "b": (1,)}, False)],
)
def test_its_outputs_have_the_shape_that_is_wanted(output_shape, bidirectional):
    model = build(output_shape, bidirectional=bidirectional)
    if isinstance(output_shape, dict):
        found = {name: each.shape[1:] for name, each in model.output.items()}
    else:
        found = model.output.shape[1:]
    assert found == output_shape


def test_padding_does_not_change_what_is_said_of_a_sequence():
    model = build((3,))
    tokens = np.array([[1, 2, 3, 0, 0]])
    other = build((3,), shape=(3,))
    np.testing.assert_allclose(model(tokens), other(tokens[:, :3]), rtol=1e-6)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"dtype": "float32"}, "one sequence of integers, not float32"),
        ({"shape": (8, 8)}, "one sequence of integers, not int64 of shape"),
        ({"vocabulary": 0}, "vocabulary: 0 is not allowed"),
    ],
)
def test_what_is_no_sequence_is_refused(args, words):
    with pytest.raises(ConfigError, match=words):
        build((3,), **args)

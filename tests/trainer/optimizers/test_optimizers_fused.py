"""Tests that TensorFlow's fused kernels update variables by Keras's formulas."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.optimizers.optimizers import build_optimizer, fuse

FUSED = [
    ("adam", {}),
    ("adam", {"beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3}),
    ("adam", {"beta_1": 0}),
    ("adam", {"global_clipnorm": 0.1}),
    ("adam", {"weight_decay": 0.1}),
    ("adamw", {}),
    ("sgd", {}),
    ("sgd", {"clipvalue": 0.1}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
]
LEFT = [("adam", {"amsgrad": True}), ("rmsprop", {}), ("adagrad", {})]
SCHEDULE = {"name": "cosine", "warmup_steps": 2}


def built(name, args, *, dtype="float32", schedule=None):
    variables = [
        keras.Variable(np.random.RandomState(seed).normal(size=shape), dtype=dtype)
        for seed, shape in enumerate([(4, 3), (5,)])
    ]
    training = {"optimizer": {"name": name, "learning_rate": 0.05, "args": args}}
    if schedule:
        training["schedule"] = schedule
    optimizer = build_optimizer(parse_config({"training": training}).training)
    optimizer.build(variables)
    return optimizer, variables


def moved(optimizer, variables, *, rows=False):
    """Return the variables and slots after four steps."""

    @tf.function
    def step(first, second):
        if rows:
            indices = tf.constant([0, 2], tf.int64)
            first = tf.IndexedSlices(first[:2], indices, tf.constant([4, 3]))
        optimizer.apply([first, second], variables)

    random = np.random.RandomState(1)
    for _ in range(4):
        step(*[tf.constant(random.normal(size=v.shape), v.value.dtype) for v in variables])
    return [each.numpy() for each in (*variables, *optimizer.variables)]


def operations(optimizer, variables):
    signature = [tf.TensorSpec(v.shape, v.value.dtype) for v in variables]
    graph = tf.function(lambda *g: optimizer.apply(list(g), variables))
    return [each.type for each in graph.get_concrete_function(*signature).graph.get_operations()]


@pytest.mark.slow
@pytest.mark.parametrize("rows", [False, True], ids=["dense", "rows"])
@pytest.mark.parametrize(("name", "args"), FUSED, ids=str)
def test_it_moves_variables_and_slots_as_keras_does(name, args, rows):
    optimizer, variables = built(name, args, schedule=SCHEDULE)
    fuse(optimizer)
    for value, expected in zip(
        moved(optimizer, variables, rows=rows),
        moved(*built(name, args, schedule=SCHEDULE), rows=rows),
        strict=True,
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "args"), [FUSED[row] for row in (0, 3, 5, 6, 8, 9)], ids=str)
def test_it_is_one_operation_a_variable(name, args):
    optimizer, variables = built(name, args)
    fuse(optimizer)
    kernels = [each for each in operations(optimizer, variables) if each.startswith("ResourceAppl")]
    assert len(kernels) == len(variables)


@pytest.mark.parametrize(("name", "args"), LEFT, ids=str)
def test_what_has_no_kernel_stays_as_it_is(name, args):
    optimizer, variables = built(name, args)
    before = operations(optimizer, variables)
    fuse(optimizer)
    assert operations(optimizer, variables) == before


def test_another_precision_stays_as_it_is():
    optimizer, variables = built("adam", {}, dtype="float64")
    fuse(optimizer)
    assert not [each for each in operations(optimizer, variables) if "ApplyAdam" in each]
    for value, expected in zip(
        moved(optimizer, variables), moved(*built("adam", {}, dtype="float64")), strict=True
    ):
        np.testing.assert_allclose(value, expected, rtol=1e-12)


class Still(keras.optimizers.SGD):
    def update_step(self, gradient, variable, learning_rate):
        """Change no variable."""


def test_what_is_derived_from_it_keeps_its_own_formula():
    variable = keras.Variable(np.ones(3), dtype="float32")
    optimizer = Still(0.1)
    optimizer.build([variable])
    fuse(optimizer)
    optimizer.apply([tf.ones(3)], [variable])
    assert variable.numpy().tolist() == [1, 1, 1]

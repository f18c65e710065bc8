"""Tests that lazy updates change only the rows of a batch, and by Keras's formula."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.embeddings import row_updates as touched_rows
from flotilla.trainer.embeddings.row_updates import read_rows, update_touched_rows, whole_tables
from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.models.registry import reset_uids
from flotilla.trainer.optimizers.optimizers import build_optimizer, fuse
from flotilla.trainer.strategies.strategy import Problem, create
from tests.trainer.plain import CHIEF, NOBODY

ROWS, DIMENSION = 8, 3
TOUCHED, OTHERS = [1, 4], [0, 2, 3, 5, 6, 7]
LAZY = [
    ("adam", {}),
    ("adam", {"amsgrad": True, "epsilon": 1e-3, "global_clipnorm": 0.1}),
    ("adamw", {"weight_decay": 0.1}),
    ("adagrad", {}),
    # With these values, TensorFlow's kernel differs strongly from Keras's formula.
    ("adagrad", {"initial_accumulator_value": 0.0, "epsilon": 0.01}),
    ("ftrl", {}),
    (
        "ftrl",
        {
            "beta": 0.5,
            "l1_regularization_strength": 0.1,
            "l2_regularization_strength": 0.2,
            "l2_shrinkage_regularization_strength": 0.3,
            "learning_rate_power": -0.7,
        },
    ),
    ("sgd", {}),
    ("sgd", {"weight_decay": 0.1, "clipnorm": 0.2}),
    ("sgd", {"momentum": 0.9}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
]
LEFT = ("rmsprop", "nadam", "adamax", "adadelta", "lamb", "adafactor", "lion")
IDS = [name + " ".join(["", *args]) for name, args in LAZY]
# Each batch looks up the rows 1 and 4, one of them twice.
BATCHES = ([1, 4, 4], [4, 1, 4], [1, 1, 4], [4, 4, 1])


def training_of(name, **args):
    optimizer = {"name": name, "learning_rate": 0.05, "args": args}
    schedule = {"name": "cosine", "warmup_steps": 2}
    return parse_config({"training": {"optimizer": optimizer, "schedule": schedule}}).training


def made(name, args, dtype="float32"):
    """Return an optimizer, a table, and a variable that no batch looks up."""
    values = np.random.RandomState(0).normal(size=(ROWS, DIMENSION))
    table, other = keras.Variable(values, dtype=dtype), keras.Variable(np.ones(2), dtype=dtype)
    optimizer = build_optimizer(training_of(name, **args))
    optimizer.build([table, other])
    return optimizer, table, other


def moved(optimizer, table, other, *, dense=False, batches=BATCHES):
    """Return the table, its slots and all other variables after one step per batch."""
    random, dtype = np.random.RandomState(1), table.value.dtype
    for ids in batches:
        values = tf.constant(random.normal(size=(len(ids), DIMENSION)), dtype)
        gradient = tf.IndexedSlices(values, tf.constant(ids, tf.int64), tf.constant(table.shape))
        rest = tf.constant(random.normal(size=2), dtype)
        optimizer.apply(
            [tf.convert_to_tensor(gradient) if dense else gradient, rest], [table, other]
        )
    found = [each.numpy() for each in (table, other, *optimizer.variables)]
    whole = [each for each in found if each.shape == (ROWS, DIMENSION)]
    return whole, [each for each in found if each.shape != (ROWS, DIMENSION)]


def lazy(optimizer, *rest):
    fuse(optimizer)
    update_touched_rows(optimizer)
    return optimizer, *rest


@pytest.mark.parametrize(("name", "args"), LAZY, ids=IDS)
def test_rows_that_each_step_touches_move_as_in_keras_and_all_others_stand_still(name, args):
    before = [each.numpy() for each in (made(name, args)[1], *made(name, args)[0].variables)]
    tables, rest = moved(*lazy(*made(name, args)))
    expected, expected_rest = moved(*made(name, args), dense=True)
    first = [each for each in before if each.shape == (ROWS, DIMENSION)]
    for table, as_keras, at_first in zip(tables, expected, first, strict=True):
        np.testing.assert_allclose(table[TOUCHED], as_keras[TOUCHED], rtol=1e-4, atol=1e-5)
        assert table[OTHERS].tobytes() == at_first[OTHERS].tobytes()
        assert not np.array_equal(table[TOUCHED], at_first[TOUCHED])
    for each, as_keras in zip(rest, expected_rest, strict=True):
        np.testing.assert_allclose(each, as_keras, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adagrad", "ftrl", "sgd"])
def test_a_batch_without_rows_moves_no_row(name):
    optimizer, table, other = lazy(*made(name, {}))
    before, (as_it_was, *_) = moved(optimizer, table, other, batches=[])
    after, (moved_too, *_) = moved(optimizer, table, other, batches=[[]])
    for one, later in zip(before, after, strict=True):
        assert one.tobytes() == later.tobytes()
    assert not np.array_equal(as_it_was, moved_too)
    assert int(optimizer.iterations) == 1


def test_another_precision_keeps_its_digits():
    tables, _ = moved(*lazy(*made("adam", {}, "float64")))
    expected, _ = moved(*made("adam", {}, "float64"), dense=True)
    for table, as_keras in zip(tables, expected, strict=True):
        np.testing.assert_allclose(table[TOUCHED], as_keras[TOUCHED], rtol=1e-9)


def test_between_two_touches_adams_moments_stand_still_and_the_bias_is_that_of_the_global_step():
    optimizer, table, other = lazy(*made("adam", {}))

    def touch(row):
        gradient = tf.IndexedSlices(tf.ones((1, DIMENSION)), [row], tf.constant(table.shape))
        optimizer.apply([gradient, tf.zeros(2)], [table, other])

    for row in (1, 2, 2):
        touch(row)
    np.testing.assert_allclose(optimizer._momentums[0].numpy()[1], 0.1, rtol=1e-5)
    before = table.numpy()[1]
    touch(1)
    m, v = 0.1 + 0.9 * 0.1, 0.001 + 0.999 * 0.001
    rate = float(optimizer._learning_rate(3))
    step = rate * np.sqrt(1 - 0.999**4) / (1 - 0.9**4) * m / (np.sqrt(v) + 1e-7)
    np.testing.assert_allclose(before - table.numpy()[1], step, rtol=1e-4)


class Still(keras.optimizers.Adam):
    def update_step(self, gradient, variable, learning_rate):
        """Change no variable."""


def test_what_has_no_lazy_form_stays_as_it_is():
    for optimizer in (Still(0.1), *(made(name, {})[0] for name in LEFT)):
        before = optimizer._backend_update_step, optimizer._apply_weight_decay
        update_touched_rows(optimizer)
        assert (optimizer._backend_update_step, optimizer._apply_weight_decay) == before, optimizer


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_keras_embedding_reads_rows_alone_and_returns_the_same(dtype):
    ids = np.array([[3, 0], [-1, 3]])
    layer = keras.layers.Embedding(ROWS, DIMENSION, dtype=dtype)
    given = keras.Input((2,), dtype="int32")
    model = keras.Model(given, layer(given))
    expected = keras.ops.convert_to_numpy(keras.ops.cast(model(ids), "float32"))
    read_rows(model)
    found = keras.ops.convert_to_numpy(keras.ops.cast(model(ids), "float32"))
    np.testing.assert_array_equal(found, expected)
    graph = tf.function(model).get_concrete_function(tf.TensorSpec([None, 2], tf.int32)).graph
    types = {each.type for each in graph.get_operations()}
    assert "ResourceGather" in types
    assert "ReadVariableOp" not in types


def tables(regularizer=None):
    """Return a model with a Keras embedding and a sharded table for the same ids."""
    reset_uids()
    keras.utils.set_random_seed(0)
    ids = keras.Input((), dtype="int64")
    whole = keras.layers.Embedding(
        ROWS, DIMENSION, embeddings_regularizer=regularizer, name="whole"
    )
    parts = ShardedEmbedding(ROWS, DIMENSION, name="parts")
    both = keras.layers.Concatenate()([whole(ids), parts(ids)])
    return keras.Model(ids, keras.layers.Dense(1, name="out")(both))


def single(model=tables, **training):
    optimizer = {"name": "adam", **training.pop("optimizer", {})}
    tree = {"training": {"strategy": "single", "optimizer": optimizer, **training}}
    config = parse_config(tree)
    strategy = create(config, NOBODY, CHIEF)
    strategy.build(
        Problem(
            build_model=model,
            build_optimizer=lambda: build_optimizer(config.training),
            loss=lambda _model, batch, found: tf.reduce_mean(tf.square(found - batch[1])),
            chance_loss=1.0,
            batches=lambda: tf.data.Dataset.from_tensors(
                (tf.constant([1, 4, 4]), tf.constant([[1.0], [2.0], [4.0]]))
            ).repeat(),
        )
    )
    return strategy


def values_of(strategy):
    return {path: each.numpy() for path, each in strategy.variables().items()}


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_strategy_is_lazy_and_dense_where_it_is_configured(accumulate):
    lazily, densely = (
        single(optimizer={"dense_updates": dense}, accumulate=accumulate) for dense in (False, True)
    )
    for each in (lazily, densely):
        # Set all moments, as earlier gradients would. Only a dense update changes the moments of
        # rows that are not in the batch.
        each.variables()["optimizer/adam/whole_embeddings_momentum"].assign(
            tf.ones((ROWS, DIMENSION))
        )
    before = values_of(lazily)
    for each in (lazily, densely):
        each.run(2)
    found, dense = values_of(lazily), values_of(densely)
    assert found.keys() == dense.keys()
    for path in ("model/whole/embeddings", "optimizer/adam/whole_embeddings_momentum"):
        assert found[path][OTHERS].tobytes() == before[path][OTHERS].tobytes()
        assert not np.array_equal(dense[path][OTHERS], before[path][OTHERS])
        np.testing.assert_allclose(found[path][TOUCHED], dense[path][TOUCHED], atol=1e-5)
    np.testing.assert_allclose(found["model/out/kernel"], dense["model/out/kernel"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dense_first", [False, True])
def test_each_goes_on_with_the_variables_of_the_other(dense_first):
    first = single(optimizer={"dense_updates": dense_first})
    first.run(2)
    later = single(optimizer={"dense_updates": not dense_first})
    saved = values_of(first)
    assert later.variables().keys() == saved.keys()
    for path, variable in later.variables().items():
        variable.assign(saved[path])
    later.run(1)
    assert later.global_step() == 3
    assert np.all(np.isfinite(values_of(later)["model/whole/embeddings"]))


@pytest.mark.slow
def test_an_average_moves_with_all_rows():
    strategy = single(ema=0.5)
    strategy.run(1)
    found = values_of(strategy)
    np.testing.assert_array_equal(
        found["average/whole/embeddings"], found["model/whole/embeddings"]
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        ({"optimizer": {"dense_updates": True, "name": "rmsprop"}}, ""),
        ({"optimizer": {"name": "rmsprop"}}, "RMSprop cannot update single rows"),
        ({"ema": 0.9}, "training.ema averages all rows"),
        ({"pulled": True}, "training.pull_every or training.jit_compile needs whole tables"),
        ({"regularizer": "l2"}, "a table has a regularizer or a constraint"),
    ],
)
def test_a_line_says_what_large_tables_cost(settings, words, monkeypatch):
    pulled = settings.pop("pulled", False)
    model = tables(settings.pop("regularizer", None))
    training = parse_config({"training": settings}).training
    optimizer = build_optimizer(training)
    assert not whole_tables(model, optimizer, training, pulled=pulled)
    monkeypatch.setattr(touched_rows, "LARGE", 12)
    line = whole_tables(model, optimizer, training, pulled=pulled)
    assert bool(line) is bool(words)
    if words:
        assert line.endswith(f"per step): {words}") or f": {words}, unlike Adam" in line
        assert "whole/embeddings; 48 values in total" in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("optimizer", "warns"),
    [
        ({"name": "sgd", "args": {"momentum": 0.9}}, True),
        ({"name": "sgd", "args": {"momentum": 0.0}}, False),
        ({"name": "adam"}, False),
        ({"name": "sgd", "args": {"momentum": 0.9}, "dense_updates": True}, False),
    ],
)
def test_momentum_that_is_lazy_says_so(optimizer, warns, caplog):
    single(optimizer=optimizer)
    assert (touched_rows.SLOWER in caplog.messages) is warns

"""Tests that a sharded table equals a single table, and sends only requested rows."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.models import registry
from flotilla.trainer.models.registry import report_bad_input
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.refusal import refusal

ROWS, DIMENSION = 11, 3
BATCHES = [[4], [0, 10, 5], [3, 3, 3], [[1, 2], [9, 2]], [[[7]]]]


def table(rows=ROWS, dimension=DIMENSION):
    return np.random.default_rng(0).normal(size=(rows, dimension)).astype("float32")


def sharded(shards, rows=ROWS, dimension=DIMENSION, **named):
    """Return a layer with the rows of `table`."""
    layer = ShardedEmbedding(rows, dimension, shards=shards, **named)
    layer.build((None,))
    whole = table(rows, dimension)
    for shard, variable in enumerate(layer.tables):
        variable.assign(whole[shard::shards])
    return layer


def gradients(layer, ids):
    """Return the gradient of each variable for a loss with a different weight for every value."""

    @tf.function
    def found():
        with tf.GradientTape() as tape:
            rows = tf.cast(layer(tf.constant(ids, tf.int64)), tf.float32)
            weights = tf.reshape(tf.range(tf.size(rows), dtype=tf.float32), tf.shape(rows))
            loss = tf.reduce_sum(weights * rows**2)
        return tape.gradient(loss, [variable.value for variable in layer.trainable_variables])

    return found()


def serialized(gradient):
    return sum(
        len(tf.io.serialize_tensor(part).numpy()) for part in (gradient.values, gradient.indices)
    )


@pytest.mark.parametrize("dtype", ["int32", "uint8", "int64"])
@pytest.mark.parametrize("shards", [1, 2, ROWS])
def test_it_gives_the_rows_of_one_table(shards, dtype):
    layer = sharded(shards)
    for ids in BATCHES:
        found = layer(np.array(ids, dtype)).numpy()
        np.testing.assert_array_equal(found, table()[np.array(ids)])


@pytest.mark.slow
@pytest.mark.parametrize("ids", BATCHES)
@pytest.mark.parametrize("shards", [1, 2, 3, ROWS])
def test_its_gradient_is_that_of_one_table(shards, ids):
    whole = keras.layers.Embedding(ROWS, DIMENSION)
    whole.build()
    whole.set_weights([table()])
    (expected,) = gradients(whole, ids)
    found = np.zeros((ROWS, DIMENSION), "float32")
    for shard, gradient in enumerate(gradients(sharded(shards), ids)):
        found[shard::shards] = tf.convert_to_tensor(gradient).numpy()
    np.testing.assert_allclose(found, tf.convert_to_tensor(expected).numpy(), rtol=1e-6)


def test_a_gradient_has_each_row_that_was_asked_for_once():
    even, odd = gradients(sharded(2), [4, 3, 4, 8, 3, 4])
    assert isinstance(even, tf.IndexedSlices)
    assert sorted(even.indices.numpy()) == [2, 4]
    assert odd.indices.numpy() == [1]


@pytest.mark.slow
def test_a_gradient_grows_with_the_batch_and_not_with_the_table():
    def size(rows, batch):
        layer = ShardedEmbedding(rows, 16, shards=2)
        return sum(map(serialized, gradients(layer, list(range(batch)))))

    assert size(1_000_000, 64) == size(1000, 64)
    # For each id, only the id and one row are sent.
    assert size(1_000_000, 256) - size(1_000_000, 64) == pytest.approx(192 * (16 * 4 + 8), rel=0.01)


def test_the_table_is_only_ever_gathered_from():
    layer = sharded(2)
    graph = tf.function(layer).get_concrete_function(tf.TensorSpec([None], tf.int64)).graph
    handles = [
        inner
        for outer, inner in graph.captures
        if any(outer is variable.value.handle for variable in layer.tables)
    ]
    assert len(handles) == 2
    assert {user.type for handle in handles for user in handle.consumers()} == {"ResourceGather"}


@pytest.mark.parametrize(("rows", "shards"), [(10, 2), (1000, 3), (7, 7)])
def test_shards_are_equal_to_one_row_and_have_all_rows(rows, shards):
    layer = ShardedEmbedding(rows, 2, shards=shards)
    layer.build((None,))
    sizes = [int(variable.shape[0]) for variable in layer.tables]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert [variable.path.split("/")[-1] for variable in layer.tables] == [
        f"shard_{shard}" for shard in range(shards)
    ]


@pytest.mark.parametrize("initializer", ["uniform", keras.initializers.RandomNormal(seed=5)])
def test_shards_begin_with_numbers_of_their_own_and_the_same_ones_again(initializer):
    def made(initializer=initializer):
        keras.utils.set_random_seed(1)
        layer = ShardedEmbedding(8, 4, shards=2, initializer=initializer)
        layer.build((None,))
        return [variable.numpy() for variable in layer.tables]

    one, other = made()
    assert not (one == other).any()
    np.testing.assert_array_equal(made(), [one, other])
    assert (np.array(made(tf.ones)) == 1).all(), "an initializer may be a function"


@pytest.mark.parametrize("wrong", [-1, ROWS, 2**40])
def test_an_unknown_id_is_an_error_that_names_it(wrong):
    layer = sharded(2, name="items")
    with pytest.raises(tf.errors.InvalidArgumentError, match="items: ids outside of 0 to 10"):
        layer(np.array([0, wrong]))
    with pytest.raises(UserError) as caught, report_bad_input():
        tf.function(layer)(tf.constant([0, wrong], tf.int64))
    # The message also has the line of the user's code, which is in this file.
    message, _, place = str(caught.value).partition(" (")
    assert message == f"the model does not accept its input: items: ids outside of 0 to 10: {wrong}"
    assert place.startswith("tests/trainer/embeddings/test_sharded_embedding.py:")


@pytest.mark.parametrize(
    ("given", "row"), [(-1, 10), (ROWS, 0), (ROWS + 4, 4), (2**40, 2**40 % 11)]
)
def test_an_unknown_id_may_share_a_row(given, row):
    found = sharded(2, unknown="wrap")(np.array([given]))
    np.testing.assert_array_equal(found.numpy(), table()[[row]])


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ({"rows": 0}, "rows: 0 is not allowed; it must be at least 1"),
        ({"dimension": -1}, "dimension: -1 is not allowed; it must be at least 1"),
        ({"shards": 0}, "shards: 0 is not allowed; it must be at least 1"),
        ({"shards": 12}, "shards: 11 rows cannot be split over 12 shards"),
        ({"unknown": "zero"}, "unknown: 'zero' is not one of error, wrap"),
    ],
)
def test_what_it_cannot_be_is_refused(named, message):
    with pytest.raises(ValueError, match=message):
        ShardedEmbedding(**{"rows": ROWS, "dimension": DIMENSION, **named})


def test_rows_stay_whole_where_computing_is_done_in_16_bits():
    layer = sharded(2, dtype="mixed_bfloat16")
    assert layer(np.array([1, 2])).dtype == "bfloat16"
    assert {variable.value.dtype.name for variable in layer.tables} == {"float32"}
    assert all(isinstance(each, tf.IndexedSlices) for each in gradients(layer, [1, 2]))


def test_it_is_saved_with_its_rows_and_read_back(tmp_path):
    given = keras.Input((), dtype="int64")
    model = keras.Model(given, sharded(3, unknown="wrap")(given))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    ids = np.array([0, 10, 12, -2])
    np.testing.assert_array_equal(loaded(ids).numpy(), model(ids).numpy())
    assert [v.path for v in loaded.variables] == [v.path for v in model.variables]
    assert loaded.layers[-1].get_config() == model.layers[-1].get_config()


def test_a_saved_model_answers_alone(tmp_path):
    given = keras.Input((), dtype="int64")
    model = keras.Model(given, sharded(2)(given))
    model.export(tmp_path / "saved", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "saved")
    found = loaded.serve(tf.constant([3, 8], tf.int64))
    np.testing.assert_array_equal(found.numpy(), table()[[3, 8]])


def test_xla_is_refused_by_name():
    given = keras.Input((), dtype="int64")
    model = keras.Model(given, ShardedEmbedding(4, 2, name="items")(given))
    assert refusal(registry.require_compilable, model) == (
        "training.jit_compile: XLA cannot compile items (ShardedEmbedding); set it to false"
    )
    registry.require_compilable(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))

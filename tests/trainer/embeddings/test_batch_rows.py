"""Tests that a batch's rows are pulled once, before the forward pass, with equal gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.embeddings.batch_rows import Sent, Unforeseen, find_lookups
from flotilla.trainer.embeddings.embedding_table import EmbeddingTable
from flotilla.trainer.embeddings.row_updates import read_rows
from flotilla.trainer.embeddings.sharded_embedding import ShardedEmbedding
from flotilla.trainer.models.registry import reset_uids
from flotilla.trainer.strategies.gradients import build_rows_gradient
from flotilla.trainer.strategies.strategy import build_gradient

# Several ids per example, including one beyond the table and a negative one.
BATCH = (
    [tf.constant([[1, 2, 3], [50, 2, 7]], tf.int64), tf.constant([2, -1])],
    tf.constant([1.0, 2.0]),
)


def loss(_model, batch, outputs):
    return tf.reduce_mean(tf.square(outputs[:, 0] - batch[1]))


def model_of():
    """Return a model with a table that is used twice, a Keras embedding, state and dropout."""
    reset_uids()
    keras.utils.set_random_seed(0)
    several, one = keras.Input((3,), dtype="int64"), keras.Input((), dtype="int32")
    shared = ShardedEmbedding(50, 4, shards=3, unknown="wrap", name="shared")
    rows = [
        keras.layers.Flatten()(shared(several)),
        keras.layers.BatchNormalization()(shared(one)),
        keras.layers.Embedding(20, 4, name="own")(one),
    ]
    both = keras.layers.Dropout(0.1, seed=1)(keras.layers.Concatenate()(rows))
    model = keras.Model([several, one], keras.layers.Dense(1)(both))
    read_rows(model)
    return model


def refused(_batch, why):
    raise why


def of_rows(model, **named):
    lookups = find_lookups(model)
    found = build_rows_gradient(model, loss, lookups, otherwise=refused, **named)
    # AutoGraph is off, because it takes most of the time.
    return tf.function(found, autograph=False)


def test_the_gradient_is_that_of_lookups_one_by_one():
    plain, model = model_of(), model_of()
    expected_loss, expected = tf.function(build_gradient(plain, loss), autograph=False)(BATCH)
    value, found = of_rows(model)(BATCH)
    assert float(value) == pytest.approx(float(expected_loss), rel=1e-6)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(
            tf.convert_to_tensor(one), tf.convert_to_tensor(other), atol=1e-6
        )
    # The weights include the moving averages and the seed.
    for one, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_the_gradients_of_an_id_are_summed_before_they_are_sent():
    model = model_of()
    found = of_rows(model)(BATCH)[1]
    by_path = dict(zip([each.path for each in model.trainable_variables], found, strict=True))
    rows = {path: each.indices.numpy().tolist() for path, each in by_path.items() if "sh" in path}
    # The id 50 wraps to 0, and -1 to 49; the id 2 is looked up three times.
    assert {path: sorted(each) for path, each in rows.items()} == {
        "shared/shard_0": [0, 1],
        "shared/shard_1": [0, 2, 16],
        "shared/shard_2": [0],
    }


def test_one_message_holds_all_tables_of_a_server(monkeypatch):
    tables = find_lookups(model_of()).tables
    sent = []
    identity = tf.identity
    monkeypatch.setattr(tf, "identity", lambda each: sent.append(each) or identity(each))
    asked = Sent(tables, [tf.constant([7, 3, 5], tf.int64), tf.constant([2], tf.int64)])
    # The message holds four sizes and four ids, as int32 instead of int64.
    assert [(each.dtype, each.shape.as_list()) for each in sent] == [(tf.int32, [8])]
    rows = asked.rows()
    assert sent[1].shape.as_list() == [4 * 4]
    asked.gradients(rows)
    assert sent[2].shape.as_list() == [4 * 4]
    assert len(sent) == 3
    expected = [tables[0].shards[shard].numpy()[row] for shard, row in ((1, 2), (0, 1), (2, 1))]
    np.testing.assert_array_equal(rows[0], expected)


class Apply(keras.layers.Layer):
    """Applies a function to a tensor, optionally with a table whose rows it may look up."""

    def __init__(self, function, shape=(), dtype="int32", table=None):
        super().__init__()
        self.function, self.shape, self.of, self.table = function, shape, dtype, table
        if table is not None and not table.built:
            table.build((None,))

    def call(self, x):
        return self.function(x) if self.table is None else self.function(x, self.table)

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape[:1], *self.shape), self.of)


def test_rows_are_known_where_the_model_maps_a_function_that_branches():
    def turned(example):
        if example[0] > 0:
            return example
        return -example

    ids = keras.Input((), dtype="int32")
    rows = keras.layers.Embedding(20, 1, embeddings_initializer=keras.initializers.Constant(-2))
    layer = Apply(lambda examples: tf.map_fn(turned, examples), (1,), "float32")
    model = keras.Model(ids, layer(rows(ids)))
    read_rows(model)
    value, _ = of_rows(model)((tf.constant([3, 5]), tf.zeros([2])))
    assert float(value) == 4.0


def test_a_table_that_no_batch_asks_has_no_row_in_its_gradient():
    model = model_of()
    asked = Sent(find_lookups(model).tables, [tf.zeros([0], tf.int64), tf.constant([3], tf.int64)])
    found = asked.gradients(asked.rows())
    shapes = [found[id(each)].values.shape.as_list() for each in model.trainable_variables[:3]]
    assert shapes == [[0, 4]] * 3


def embedding():
    return keras.layers.Embedding(20, 4)


def looked_up(function):
    """Return a layer that passes ids and an embedding to a function that returns rows."""
    return Apply(function, (4,), "float32", embedding())


def walking(ids):
    table = embedding()
    return table(Apply(lambda row: keras.ops.cast(row[:, 0] > 0, "int32"))(table(ids)))


def tied(ids):
    table = embedding()
    times = lambda x, table: keras.ops.matmul(x, keras.ops.transpose(table.embeddings))  # noqa: E731
    return Apply(times, (20,), "float32", table)(table(ids))


def branched(ids):
    return looked_up(
        lambda ids, table: tf.cond(
            tf.reduce_all(ids > 0), lambda: table(ids), lambda: 2 * table(ids)
        )
    )(ids)


class Routed(keras.layers.Layer):
    """A layer that computes the id from its weights."""

    def build(self, _shape):
        self.weight = self.add_weight(shape=(1, 4), initializer="random_normal")

    def call(self, ids):
        x = keras.ops.cast(ids[:, None], "float32")
        return keras.ops.argmax(keras.ops.matmul(x, self.weight), axis=-1)


def routed(ids):
    return embedding()(Routed()(ids))


def drawn(ids):
    return embedding()(Apply(lambda ids: tf.random.uniform(tf.shape(ids), 0, 20, tf.int32))(ids))


class Drawn(keras.layers.Layer):
    def build(self, _shape):
        self.seed = keras.random.SeedGenerator(1)

    def call(self, ids):
        return keras.random.randint(keras.ops.shape(ids), 0, 20, seed=self.seed)


def drawn_by_keras(ids):
    return embedding()(Drawn()(ids))


def ragged(ids):
    made = lambda each: tf.RaggedTensor.from_row_lengths(each, tf.ones_like(each))  # noqa: E731
    return looked_up(lambda ids, table: table(made(ids)))(ids)


def sparse(ids):
    return looked_up(lambda ids, table: table(tf.sparse.from_dense(ids[:, tf.newaxis])))(ids)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (ragged, "looks up ids of a ragged or sparse tensor"),
        (sparse, "looks up ids of a ragged or sparse tensor"),
        (routed, "computes ids from variables"),
        (drawn, "draws ids at random"),
        (drawn_by_keras, "computes ids from variables"),
        (walking, "computes ids from rows"),
        (tied, "uses a table for something other than lookups"),
        (branched, "looks up rows in a branch or a loop"),
    ],
)
def test_rows_that_are_not_known_beforehand_are_looked_up_in_their_place(made, words):
    given = keras.Input((), dtype="int32")
    model = keras.Model(given, made(given))
    read_rows(model)
    batch = (tf.constant([1, 5]), tf.constant([1.0, 2.0]))
    with pytest.raises(Unforeseen, match=words):
        of_rows(model)(batch)


@pytest.mark.parametrize(
    "ids",
    [lambda: tf.ragged.constant([[1], [2, 3]]), lambda: tf.sparse.from_dense([[1, 0], [2, 3]])],
    ids=["ragged", "sparse"],
)
def test_a_batch_that_is_not_dense_is_looked_up_in_its_place(ids):
    given = keras.Input((None,), dtype="int32")
    model = keras.Model(given, keras.layers.Embedding(20, 4)(given))
    with pytest.raises(Unforeseen, match="accepts ragged or sparse tensors"):
        of_rows(model)((ids(), tf.constant([1.0, 2.0])))


@pytest.mark.parametrize("unknown", ["error", "wrap"])
def test_rows_of_words_are_known_beforehand(unknown):
    words = keras.Input((), dtype="string")
    ids = keras.layers.StringLookup(vocabulary=["a", "b"])(words)
    model = keras.Model(words, ShardedEmbedding(3, 4, shards=1, unknown=unknown)(ids))
    _, found = of_rows(model)((tf.constant(["b", "b"]), tf.constant([1.0, 2.0])))
    assert found[0].indices.numpy().tolist() == [2]


class Own(ShardedEmbedding):
    def call(self, ids):
        return 2 * super().call(ids)


@pytest.mark.parametrize(
    "table",
    [
        lambda: keras.layers.Embedding(9, 2, embeddings_regularizer="l2"),
        lambda: keras.layers.Embedding(9, 2, trainable=False),
        lambda: EmbeddingTable(9, 2),
        lambda: Own(9, 2),
    ],
)
def test_tables_that_have_to_be_used_in_their_place(table):
    given = keras.Input((), dtype="int64")
    plain = keras.layers.Embedding(9, 2)
    model = keras.Model(given, plain(given) + table()(given))
    assert find_lookups(model) is None

"""Tests which ids get or lose a row of a dynamic table, and what the other ids return."""

from __future__ import annotations

from functools import lru_cache

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.schema import ModelConfig
from flotilla.trainer.embeddings import embedding_table
from flotilla.trainer.embeddings.embedding_table import EmbeddingTable, shrink
from flotilla.trainer.embeddings.table_shard import GIVEN
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.models.two_tower import growing_table
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.refusal import refusal

DIMENSION = 3
UNIFORM = keras.initializers.RandomUniform(seed=1)
KEYS = ("int64", "string")


def table(capacity=8, **named):
    layer = EmbeddingTable(
        capacity, DIMENSION, **{"shards": 1, "min_age": 0, "initializer": UNIFORM, **named}
    )
    layer.build((None,))
    return layer


def ids_of(layer, ids):
    ids = np.array(ids, np.int64)
    return tf.constant(ids if layer.keys == "int64" else ids.astype(str))


def in_graph(layer, rank=1):
    """Return a function that looks up any number of ids in a graph, as a training step does."""
    signature = [tf.TensorSpec([None] * rank, layer.keys, "ids")]
    # AutoGraph is off, because it takes most of the time.
    return tf.function(
        lambda ids: layer(ids, training=True), input_signature=signature, autograph=False
    )


@lru_cache(maxsize=4)
def step_of(layer, rank, _trainable):
    return in_graph(layer, rank)


def trained(layer, ids):
    given = ids_of(layer, ids)
    return step_of(layer, given.shape.rank, layer.trainable)(given).numpy()


def known(layer, ids):
    """Return which ids have a row."""
    return layer(ids_of(layer, ids), training=False).numpy().any(axis=-1).tolist()


@pytest.mark.parametrize("counted", [1, 4])
def test_rows_that_are_younger_or_older_than_their_count_are_counted_again(counted):
    layer = table()
    trained(layer, [1, 2])
    tally = layer.parts[0].noted.tally
    tally.assign(tf.tensor_scatter_nd_update(tally.value, [[GIVEN]], [counted]))
    layer.rebuild()
    assert layer.metrics() == {"rows": 2, "evicted": max(0, counted - 2), "turned_away": 0}
    assert known(layer, [1, 2, 3]) == [True, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("shards", [1, 3])
def test_each_id_has_one_row_wherever_it_comes_again(keys, shards):
    layer = table(60, keys=keys, shards=shards)
    ids = [-(2**63), 2**63 - 1, 0, -1, 7]
    first = trained(layer, [*ids, 0, 7])
    assert first.shape == (7, DIMENSION)
    assert len(np.unique(first[:5], axis=0)) == 5
    np.testing.assert_array_equal(first[[2, 4]], first[[5, 6]])
    np.testing.assert_array_equal(
        trained(layer, [[7, 8], [0, -1]])[[0, 1, 1], [0, 0, 1]], first[[4, 2, 3]]
    )
    assert layer.metrics() == {"rows": 6, "evicted": 0, "turned_away": 0}


@pytest.mark.parametrize("keys", KEYS)
def test_an_unknown_id_gets_zeros_and_no_row(keys):
    layer = table(keys=keys)
    trained(layer, [1])
    assert known(layer, [1, 2]) == [True, False]
    assert layer.metrics()["rows"] == 1
    assert layer(ids_of(layer, [])).shape == (0, DIMENSION)
    layer.trainable = False
    assert not trained(layer, [2]).any(), "a frozen table takes no new ids"
    assert layer.metrics()["rows"] == 1


def test_without_a_graph_it_does_the_same():
    eager, graph = (table(4, min_count=2, max_age=6, shards=2) for _ in range(2))
    random = np.random.default_rng(0)
    for _ in range(6):
        ids = random.integers(0, 8, 4)
        np.testing.assert_array_equal(trained(graph, ids), eager(tf.constant(ids), training=True))
    assert graph.metrics() == eager.metrics()
    assert graph.metrics()["evicted"] > 0


# Arguments of a table, batches of a training with the ids that have a row after each of them, and
# the metrics: rows, evicted rows, and lookups of ids without a row.
HISTORIES = {
    "an id gets a row when it has come often enough": (
        {"min_count": 3}, [([5, 6, 5], []), ([6, 5], [5])], (1, 0, 3),
    ),
    "the row that was used least recently makes room": (
        {"capacity": 3}, [([1], [1]), ([2], [1, 2]), ([3], [1, 2, 3]), ([1], [1, 2, 3]),
        ([4], [1, 3, 4])], (3, 1, 0),
    ),
    "a row of which a gradient may be on its way stays": (
        {"capacity": 2, "min_age": 3},
        [([1, 2], [1, 2]), ([3], [1, 2]), ([2], [1, 2]), ([3], [2, 3])], (2, 1, 1),
    ),
    "what was not used for too long is given up": (
        {"max_age": 4}, [([1, 2], [1, 2]), *[([2], [1, 2])] * 4, ([2], [2])], (1, 1, 0),
    ),
    "a row that is too old stays where its id comes back in time": (
        # The last lookup searches for old rows, because it has a new id.
        {"max_age": 4}, [([1], [1]), ([2], [1, 2]), ([3], [1, 2, 3]), ([4], [1, 2, 3, 4]),
        ([5], [1, 2, 3, 4, 5]), ([1, 6], [1, 2, 3, 4, 5, 6])], (6, 0, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HISTORIES)
def test_which_ids_have_a_row(name):
    arguments, batches, metrics = HISTORIES[name]
    layer = table(**arguments)
    for ids, expected in batches:
        trained(layer, ids)
        assert np.flatnonzero(known(layer, range(10))).tolist() == expected
    assert tuple(layer.metrics().values()) == metrics


def test_what_came_seldom_is_forgotten_by_the_sieve(monkeypatch):
    monkeypatch.setattr("flotilla.trainer.embeddings.hashes.FEWEST_BLOCKS", 1)
    layer = table(1, min_count=5)
    # With one block, the sketch halves all cells once it holds more than four ids.
    for each in (1, 1, 1, 2, 3, 4, 5):
        trained(layer, [each])
    trained(layer, [1, 1, 1])
    assert layer.metrics()["rows"] == 0
    trained(layer, [1])
    assert known(layer, [1, 2, 3, 4, 5]) == [True, False, False, False, False]


def test_a_row_that_the_same_batch_looks_up_is_not_given_to_another_id():
    layer = table(3)
    first = trained(layer, [1, 2, 3])
    trained(layer, [2, 3])
    # The row of 1 is the least recently used one, but this batch looks it up.
    again = trained(layer, [1, 9])
    np.testing.assert_array_equal(again[0], first[0])
    assert (again[0] != again[1]).all()
    assert known(layer, [1, 2, 3, 9]).count(True) == 3


def test_new_rows_begin_as_those_of_the_optimizer_that_it_is_connected_with():
    layer, steps = table(8), tf.Variable(0, dtype=tf.int64)
    for number, first in enumerate((0.5, 0.25)):
        slot = tf.Variable(tf.zeros([9, DIMENSION]))
        layer.connect(steps, lambda _, slot=slot, first=first: [(slot, first)])
        in_graph(layer)(tf.constant([number], tf.int64))
        assert np.unique(slot).tolist() == [0.0, first]


def test_ids_beyond_a_batch_that_fills_the_table_get_the_common_row():
    layer = table(4)
    found = trained(layer, range(10))
    assert found.any(axis=1).sum() == 4
    assert layer.metrics() == {"rows": 4, "evicted": 0, "turned_away": 6}


def test_a_text_that_shares_only_its_key_has_no_row(monkeypatch):
    monkeypatch.setattr(
        tf.strings, "to_hash_bucket_fast", lambda each, _: tf.ones_like(each, tf.int64)
    )
    layer = table(keys="string")
    trained(layer, [1])
    assert trained(layer, [1, 2]).any(axis=1).tolist() == [True, False]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SGD", "Adagrad", "Ftrl", "Adam"])
def test_a_row_of_another_id_begins_anew_with_every_optimizer(name):

    keras.utils.set_random_seed(0)
    given = keras.Input((), dtype="int64")
    layer = EmbeddingTable(2, DIMENSION, shards=1, min_age=0, name="t")
    model = keras.Model(given, layer(given))
    optimizer = getattr(keras.optimizers, name)(0.1)
    optimizer.build(model.trainable_variables)
    fresh = [each.numpy() for each in optimizer.variables]
    embedding_table.connect(model, optimizer, optimizer.iterations.value)

    @tf.function
    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(ids, training=True) ** 2)
        (gradient,) = tape.gradient(loss, [layer.trainable_variables[0].value])
        assert isinstance(gradient, tf.IndexedSlices)
        optimizer.apply([gradient], layer.trainable_variables)

    for ids in ([1, 2], [1, 2], [1, 1]):
        step(tf.constant(ids, tf.int64))
    optimizer.learning_rate = 0.0
    model(tf.constant([3, 3], tf.int64), training=True)
    slot = np.flatnonzero(layer.parts[0].noted.ids.numpy()[:2] == 3)[0]
    for before, after in zip(fresh, optimizer.variables, strict=True):
        if before.shape == (3, DIMENSION):
            np.testing.assert_array_equal(after.numpy()[slot], before[slot])
            assert name == "SGD" or not np.array_equal(after.numpy()[1 - slot], before[1 - slot])


@pytest.mark.slow
@pytest.mark.parametrize("keys", KEYS)
def test_it_is_found_again_by_its_variables(keys):
    first = table(6, keys=keys, shards=2, min_count=2)
    for ids in ([1, 1, 2, 2], [3, 3, 9], [4, 4]):
        trained(first, ids)
    second = table(6, keys=keys, shards=2, min_count=2)
    trained(second, [7, 7, 8, 8])
    for one, other in zip(second.variables, first.variables, strict=True):
        one.assign(other)
    second.rebuild()
    asked = ids_of(first, [1, 2, 3, 4, 7, 8, 9])
    np.testing.assert_array_equal(second(asked).numpy(), first(asked).numpy())
    for layer in (first, second):
        trained(layer, [9])
        trained(layer, [5, 5])
    asked = ids_of(first, range(10))
    np.testing.assert_array_equal(second(asked).numpy(), first(asked).numpy())
    assert second.metrics() == first.metrics()


def model_of(layer):
    given = keras.Input((2,), dtype=layer.keys, name="ids")
    return keras.Model(given, layer(given))


@pytest.mark.slow
@pytest.mark.parametrize("keys", KEYS)
def test_what_is_exported_is_as_large_as_its_rows_and_answers_alike(keys, tmp_path):
    layer = EmbeddingTable(5000, DIMENSION, keys=keys, shards=2, min_count=2, name="t")
    model = model_of(layer)
    for ids in ([[1, 2], [2, 1]], [[3, 3], [9, -4]]):
        trained(layer, ids)
    # Set the shared row of ids without a row, as training would.
    for shard in layer.parts:
        shard.noted.rows.value.scatter_update(
            tf.IndexedSlices(tf.ones([1, DIMENSION]), [shard.capacity])
        )
    asked = ids_of(layer, [[1, 2], [3, 9], [-4, 10**12]])
    expected = model(asked).numpy()
    shrink(model)
    assert layer.capacity <= 6
    np.testing.assert_array_equal(model(asked).numpy(), expected)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(asked).numpy(), expected)
    model.export(tmp_path / "saved", verbose=False)
    served = tf.saved_model.load(tmp_path / "saved")
    np.testing.assert_array_equal(served.serve(asked).numpy(), expected)
    assert (tmp_path / "saved/variables/variables.data-00000-of-00001").stat().st_size < 40_000


def test_a_file_with_another_form_of_the_sieve_is_read():
    first, second = table(min_count=2, shards=2), table(min_count=2, shards=2)
    trained(first, [1, 1, 2, 2, 3])
    trained(second, [7])
    values = {}
    for number, each in enumerate([*first.trainable_variables, *first.non_trainable_variables]):
        is_sieve = each.path.endswith("_sieve")
        values[f"{number}"] = np.ones(1024, np.int32) if is_sieve else each.numpy()
    second.load_own_variables(values)
    assert known(second, [1, 2, 3, 7]) == [True, True, False, False]
    trained(second, [3, 7])
    assert known(second, [3, 7]) == [False, True]
    del values["0"]
    with pytest.raises(ValueError, match="variables"):
        second.load_own_variables(values)


@pytest.mark.parametrize(
    ("min_count", "why"),
    [
        (9, "no id occurred 9 times; lower min_count, or train longer"),
        (1, "it was frozen, or training never looked up an id in it"),
    ],
)
def test_a_table_without_a_row_is_exported_with_a_warning(caplog, min_count, why):
    layer = table(min_count=min_count)
    layer.trainable = min_count > 1
    trained(layer, [1, 2])
    layer.shrink()
    line = f"table {layer.name} has no rows, so its ids share one row per shard: {why}"
    assert caplog.messages == [line]
    assert known(layer, [1, 2]) == [False, False]


def test_it_draws_new_rows_by_the_initializer_and_never_twice():
    layer = table(200, initializer=keras.initializers.RandomNormal(5.0, 0.1, seed=3))
    rows = np.concatenate([trained(layer, [n, n + 1000]) for n in range(20)])
    assert len(np.unique(rows)) == rows.size
    assert abs(rows.mean() - 5.0) < 0.2
    assert not table(4, initializer="zeros")(tf.constant([1])).numpy().any()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"capacity": 0}, "capacity: 0 is not allowed; it must be at least 2"),
        ({"min_count": 0}, "min_count: 0 is not allowed; it must be at least 1"),
        ({"min_count": 256}, "min_count: 256 is not allowed; it must be at most 255"),
        ({"max_age": 2**31}, "max_age: 2147483648 is not allowed; it must be at most"),
        ({"capacity": 10**30}, "is not allowed; it must be at most 1099511627776"),
        ({"max_age": 16}, "max_age: 16 is not allowed; it must be above min_age"),
        ({"initializer": "glorot_uniform"}, "initializer: GlorotUniform needs the size of the"),
        ({"keys": "float32"}, "keys: 'float32' is not one of int64, string"),
    ],
)
def test_what_it_does_not_take_is_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        EmbeddingTable(**{"capacity": 8, "dimension": 2, **arguments})


def test_ids_of_another_type_are_refused():
    with pytest.raises(ValueError, match="whole numbers of up to 64 bits, not float32; whole numb"):
        table()(tf.constant([1.0]))
    with pytest.raises(ValueError, match="must be strings, not int64"):
        EmbeddingTable(4, 2, keys="string")(keras.Input((), dtype="int64"))


@pytest.mark.parametrize(
    ("dtype", "arguments", "words"),
    [
        ("float32", {"capacity": 4}, "missing or beyond 64 bits: fill missing values, or read the"),
        ("int64", {"min_count": 4}, "tables.user: {'min_count': 4} has no capacity; write {cap"),
        ("int64", {"capacity": 1}, "tables.user.capacity: 1 is not allowed; it must be at least 2"),
        ("int64", {"capacity": "many"}, "tables.user.capacity: 'many' is not a whole number"),
        ("int64", {"capacity": 4, "maxage": 3}, "there is no key 'maxage'"),
        ("int64", {"capacity": 4, "initializer": "nothing"}, "tables.user.initializer"),
    ],
)
def test_what_a_configuration_has_wrong_is_one_line(dtype, arguments, words):
    spec = InputSpec(shape=(), dtype=dtype, output_shape=(1,), names=("user",))
    assert words in refusal(growing_table, spec, "user", 2, arguments)


PAIRS = InputSpec(
    shape={"item": (), "user": ()}, dtype={"item": "int64", "user": "int64"}, output_shape=(2,)
)


def test_replicas_with_copies_of_their_own_are_refused_in_a_line_with_the_key():
    tables = {name: {"capacity": 8} for name in ("user", "item")}
    refused = pytest.raises(ConfigError, match=r"^model two_tower: training\.strategy: each GPU or")
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope(), refused:
        registry.build(ModelConfig(name="two_tower", args={"tables": tables}), PAIRS, 0)


@pytest.mark.slow
def test_a_table_that_no_memory_has_room_for_is_one_line():
    # The table exceeds the address space, so no memory is allocated.
    tables = {name: {"capacity": 2**40} for name in ("user", "item")}
    config = ModelConfig(name="two_tower", args={"tables": tables, "dimension": 2**14})
    message = refusal(registry.build, config, PAIRS, 0)
    words = "this process (CPU) has too little memory for a tensor of type float and shape"
    assert message.startswith(f"model two_tower: {words} [{2**39 + 1}, 16384]: make")

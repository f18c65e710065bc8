"""A cache of hot rows: plain SGD is not changed by it, and no gradient is lost."""

from __future__ import annotations

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.strategies.updates.test_batch_rows import loss, refused
from trainer.config.load import parse_config
from trainer.errors import ConfigError
from trainer.models.embedding_table import EmbeddingTable
from trainer.models.registry import reset_uids
from trainer.models.sharded_embedding import ShardedEmbedding
from trainer.strategies.gradients import rows_gradient_of
from trainer.strategies.strategy import gradient_of
from trainer.strategies.updates.batch_rows import lookups_of, tables_of
from trainer.strategies.updates.row_cache import RowCache, require
from trainer.strategies.updates.touched_rows import read_rows, update_touched_rows
from trainer.training.optimizers import build_optimizer

STEPS, RATE = 30, 0.05
ENDLESS = 10**6
RUN = tf.constant(1, tf.int64)


def model_of():
    reset_uids()
    keras.utils.set_random_seed(0)
    several, one = keras.Input((3,), dtype="int64"), keras.Input((), dtype="int64")
    rows = [
        keras.layers.Flatten()(ShardedEmbedding(50, 4, shards=3)(several)),
        keras.layers.Embedding(20, 4)(one),
    ]
    return keras.Model([several, one], keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))


def examples():
    random = np.random.default_rng(0)
    several = np.minimum(random.zipf(1.3, (STEPS, 16, 3)), 49)
    one = np.minimum(random.zipf(1.3, (STEPS, 16)), 19)
    labels = (several.sum(-1) % 7 / 7 + one % 3).astype("float32")
    return tf.data.Dataset.from_tensor_slices(((several, one), labels))


def trained(optimizer, cached=None):
    """Return the weights after the steps; `cached` are the rows and the staleness of a cache."""
    model = model_of()
    read_rows(model)
    settings = {"name": optimizer, "learning_rate": RATE}
    updates = build_optimizer(parse_config({"training": {"optimizer": settings}}).training)
    updates.build(model.trainable_variables)
    update_touched_rows(updates)
    gradient, cache = gradient_of(model, loss), None
    if cached:
        lookups = lookups_of(model)
        cache = RowCache(lookups.tables, rows=cached[0], staleness=cached[1])
        send = partial(cache.sent, lambda: tf.constant(RATE))
        gradient = rows_gradient_of(model, loss, lookups, otherwise=refused, send=send)

    # Without what makes graphs of Python's branches, which takes most of the time.
    @tf.function(autograph=False)
    def step(batch):
        if cache:
            cache.open(RUN)
        updates.apply(gradient(batch)[1], model.trainable_variables)

    @tf.function(autograph=False)
    def rest():
        cache.open(RUN)
        cache.apply_all(updates, model.trainable_variables)

    for number, batch in enumerate(examples()):
        step(batch)
        if cache and number in {STEPS // 2, STEPS - 1}:
            rest()
    assert int(updates.iterations) == STEPS
    return model.get_weights()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "cached"),
    [
        # Kept rows are read and pushed at each use.
        ("adam", (7, 1)),
        # Rows are evicted, pushed in the middle, or all only in the end.
        ("sgd", (7, 4)),
        pytest.param("sgd", (1000, 4), marks=pytest.mark.long),
        pytest.param("sgd", (5, ENDLESS), marks=pytest.mark.long),
    ],
)
def test_it_changes_nothing_where_local_steps_are_those_of_the_optimizer(optimizer, cached):
    for found, expected in zip(trained(optimizer, cached), trained(optimizer), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


class Worker:
    """A worker whose gradients are all ones, on one table of four rows of two numbers."""

    def __init__(self, rows, staleness):
        given = keras.Input((), dtype="int64")
        model = keras.Model(
            given, keras.layers.Embedding(4, 2, embeddings_initializer="zeros")(given)
        )
        self.table = model.layers[-1].embeddings
        self.cache = RowCache(tables_of(model), rows=rows, staleness=staleness)
        shapes = [tf.TensorSpec(shape, tf.int64) for shape in ([None], [], [])]
        self._step = tf.function(self._stepped, input_signature=shapes, autograph=False)
        self._rest = tf.function(self._rested, autograph=False)

    def use(self, *ids, run=1, other=0):
        """Return the first number of each row as the worker has it, and what it pushes by id.

        `other` is a run of a closure that begins before this one has used them.
        """
        numbers = (tf.constant(each, tf.int64) for each in (ids, run, other or run))
        rows, pushed, sums = self._step(*numbers)
        return rows.numpy()[:, 0].tolist(), dict(
            zip(pushed.numpy().tolist(), sums.numpy()[:, 0].tolist(), strict=True)
        )

    def rest(self, run=1):
        """Return what it pushes before it rests."""
        pushed, sums = self._rest(tf.constant(run, tf.int64))
        return dict(zip(pushed.numpy().tolist(), sums.numpy()[:, 0].tolist(), strict=True))

    def _rested(self, run):
        self.cache.open(run)
        (found,) = self.cache.push_all().values()
        return found.indices, found.values

    def _stepped(self, ids, run, other):
        self.cache.open(run)
        self.cache._owner.kept.fill(other)
        asked = self.cache.sent(lambda: tf.constant(1.0), [ids])
        (rows,) = asked.rows()
        (found,) = asked.gradients([tf.ones_like(rows)]).values()
        return rows, found.indices, found.values


def test_a_row_is_read_again_after_as_many_uses_as_the_staleness():
    worker = Worker(rows=4, staleness=3)
    assert worker.use(1, 2) == ([0.0, 0.0], {})
    # What others have made of it since is not seen at once, only what the worker itself did.
    worker.table.assign(tf.fill([4, 2], 100.0))
    assert worker.use(1) == ([-1.0], {})
    assert worker.use(1) == ([-2.0], {1: 3.0})
    assert worker.use(1, 2) == ([100.0, -1.0], {})
    assert worker.use(2) == ([-2.0], {2: 3.0})


def test_all_is_pushed_before_a_worker_rests_and_once():
    worker = Worker(rows=4, staleness=4)
    worker.use(1, 2)
    worker.use(2)
    assert worker.rest() == {1: 1.0, 2: 2.0}
    assert worker.rest() == {}
    # A boundary changes nothing for what is kept, and for how long.
    worker.table.assign(tf.fill([4, 2], 100.0))
    assert worker.use(0, 2) == ([100.0, -2.0], {})
    assert worker.use(2) == ([-3.0], {2: 2.0})
    assert worker.use(2) == ([100.0], {})
    assert worker.rest() == {0: 1.0, 2: 1.0}


def test_what_a_closure_has_left_that_did_not_end_is_forgotten():
    worker = Worker(rows=4, staleness=9)
    worker.use(1, 2, run=1)
    worker.table.assign(tf.fill([4, 2], 100.0))
    # As where it is run again after its connection to the chief was lost: half of what it wrote
    # may be there.
    assert worker.use(1, run=2) == ([100.0], {})
    assert worker.rest(run=2) == {1: 1.0}
    # What came to its end is kept.
    assert worker.use(1, run=3) == ([99.0], {})
    assert worker.rest(run=3) == {1: 1.0}


def test_a_closure_that_has_a_successor_changes_nothing_that_is_kept():
    worker = Worker(rows=4, staleness=9)
    worker.use(1, run=7)
    # It pushes what it makes at once, of rows that it reads anew.
    assert worker.use(1, 2, run=7, other=8) == ([0.0, 0.0], {1: 1.0, 2: 1.0})
    assert worker.use(1, run=8) == ([-1.0], {})
    assert worker.rest(run=8) == {1: 2.0}


def test_an_id_that_comes_more_often_keeps_the_slot():
    worker = Worker(rows=1, staleness=100)
    worker.use(1)
    worker.use(1)
    assert worker.use(2) == ([0.0], {2: 1.0})
    # It takes over, and what was summed up for the other one is pushed.
    assert worker.use(2) == ([0.0], {1: 2.0})
    assert worker.use(2) == ([-1.0], {})
    assert worker.rest() == {2: 2.0}


def test_two_ids_of_a_batch_never_share_a_slot():
    worker = Worker(rows=1, staleness=100)
    _, pushed = worker.use(0, 1, 2, 3)
    assert sorted(pushed.values()) == [1.0] * 3
    assert sorted({**pushed, **worker.rest()}) == [0, 1, 2, 3]


def test_two_caches_have_nothing_in_common():
    one, other = Worker(rows=4, staleness=9), Worker(rows=4, staleness=9)
    one.use(1)
    assert other.rest() == {}


@pytest.mark.parametrize(
    ("training", "words"),
    [
        ({"strategy": "sync_parameter_server"}, "take training.strategy async_parameter_server"),
        ({"pull_every": 2}, "leave out training.pull_every"),
        ({"accumulate": 2}, "leave out training.accumulate"),
        ({"mixed_precision": "float16"}, "leave out training.mixed_precision float16"),
        ({"jit_compile": True}, "leave out training.jit_compile"),
        ({"ema": 0.9}, "leave out training.ema"),
        ({"optimizer": {"name": "rmsprop"}}, "take one of adam, adamw, adagrad, ftrl, sgd"),
        # That of a compiled model, whatever it is and clips.
        ({"optimizer": {"name": "model"}}, "take one of adam, adamw, adagrad, ftrl, sgd as"),
        *(
            ({"optimizer": {"args": {name: 1.0}}}, f"leave out training.optimizer.args.{name}, or")
            for name in ("clipnorm", "global_clipnorm", "clipvalue")
        ),
        ({"optimizer": {"dense_updates": True}}, "leave out training.optimizer.dense_updates"),
    ],
)
def test_a_cache_that_cannot_serve_is_refused(training, words):
    wanted = {"strategy": "async_parameter_server", "cached_rows": 10, **training}
    with pytest.raises(ConfigError) as caught:
        require(parse_config({"training": wanted}), model_of())
    message = str(caught.value)
    assert message.startswith("training.cached_rows: hot rows cannot be cached")
    assert words in message
    assert "\n" not in message


def test_portions_of_examples_are_refused():
    config = parse_config({"training": {"cached_rows": 1}, "data": {"partition": "dynamic"}})
    with pytest.raises(ConfigError, match=r"take data\.partition disjoint or reshuffle"):
        require(config, model_of())


def test_a_model_that_cannot_be_served_is_refused():
    given = keras.Input((), dtype="int64")
    config = parse_config({"training": {"cached_rows": 10}})
    with pytest.raises(ConfigError, match=r"take a model whose tables are all of Keras's"):
        require(config, keras.Model(given, EmbeddingTable(9, 2)(given)))
    require(config, model_of())


def test_without_the_key_nothing_is_refused():
    require(parse_config({"training": {"strategy": "single"}}), model_of())

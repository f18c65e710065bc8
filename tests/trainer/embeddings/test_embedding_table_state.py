"""Tests how a strategy handles the state of a dynamic table, in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.utils.naming import reset_uids

from flotilla.trainer.checkpoints import warm_start
from flotilla.trainer.checkpoints.checkpoints import (
    Checkpoints,
    restore,
    restore_model,
    select_resumed,
)
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.embeddings import embedding_table
from flotilla.trainer.embeddings.embedding_table import EmbeddingTable
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.strategies.gradients import PureGradient
from flotilla.trainer.strategies.strategy import Problem, create, require_updates
from tests.trainer.objectives import cross_entropy, of_classes
from tests.trainer.plain import CHIEF, NOBODY
from tests.trainer.refusal import refusal


def model_of(capacity=40, dimension=3, **named):
    given = keras.Input((), dtype="int64")
    found = EmbeddingTable(capacity, dimension, name="table", **named)(given)
    found = keras.layers.Dropout(0.1, seed=1)(found)
    return keras.Model(given, keras.layers.Dense(2, name="logits")(found))


def config_of(**training):
    return parse_config({"training": {"strategy": "single", **training}})


def built(*, steps=0, capacity=40, dimension=3, min_count=1, **training):
    """Return a built strategy whose model looks up the ids 0 to 19 and their values modulo 2."""
    config, objective = config_of(**training), of_classes(2)
    # Name the layers as `registry.build` does, because a checkpoint finds variables by name.
    reset_uids()
    keras.utils.set_random_seed(0)
    strategy = create(config, NOBODY, CHIEF)
    numbers = np.arange(20)
    strategy.build(
        Problem(
            build_model=lambda: objective.attach(
                model_of(capacity, dimension, min_count=min_count)
            ),
            build_optimizer=lambda: build_optimizer(config.training),
            loss=objective.loss,
            chance_loss=1.0,
            batches=lambda: tf.data.Dataset.from_tensors((numbers * 2**50, numbers % 2)).repeat(),
        )
    )
    return strategy, strategy.run(steps) if steps else None


def saved(strategy, folder):
    checkpoints = Checkpoints(folder.as_uri(), keep=2, scratch=folder / "scratch")
    checkpoints.save(strategy.variables(), io_device=None, fields={})
    found = checkpoints.newest()
    assert found
    return found


def answers(model):
    return model(tf.constant(np.arange(25) * 2**50)).numpy()


def test_no_worker_pulls_the_bookkeeping():
    model = model_of(min_count=2)
    pure = PureGradient(model, cross_entropy, jit=False, in_place=True)
    assert [each.path.rpartition("/")[2] for each in pure.state] == ["seed_generator_state"]
    assert len(model.non_trainable_variables) == 9


@pytest.mark.parametrize(("workers", "warned"), [(16, True), (15, False)])
def test_a_row_that_may_be_given_away_under_a_gradient_is_warned_of(workers, warned, caplog):
    config = parse_config({"cluster": {"workers": workers}, "data": {"shards": 16}})
    embedding_table.require(config, model_of())
    assert ("may be that old" in caplog.text) == warned


@pytest.mark.slow
@pytest.mark.parametrize(
    "training", [{"optimizer": {"name": "adagrad", "learning_rate": 0.5}}, {"accumulate": 2}]
)
def test_the_table_is_trained_saved_and_resumed(training, tmp_path):
    strategy, report = built(steps=30, **training)
    assert report.metrics["tables"] == {"table": {"rows": 20, "evicted": 0, "turned_away": 0}}
    expected = answers(strategy.model)
    found = saved(strategy, tmp_path)
    again, _ = built(**training)
    kept = select_resumed(found, again.variables(), config_of(**training).training)
    restore(found, kept, io_device=None)
    again.refresh()
    np.testing.assert_array_equal(answers(again.model), expected)
    assert again.run(1).metrics["tables"]["table"]["rows"] == 20
    reset_uids()
    model = model_of()
    restore_model(found.uri, model, tmp_path)
    np.testing.assert_array_equal(answers(model), expected)


@pytest.mark.slow
def test_a_checkpoint_with_an_earlier_sieve_or_none_is_read(tmp_path):
    strategy, _ = built(steps=5, min_count=2)
    expected = answers(strategy.model)
    held = {path: each for path, each in strategy.variables().items() if "sieve" not in path}
    assert len(strategy.variables()) - len(held) == 2
    for earlier in (False, True):
        if earlier:
            cells = tf.ones([1024], tf.int32)
            held |= {f"model/table/shard_{n}_seen": tf.Variable(cells) for n in range(2)}
        strategy.applied.assign_add(1)
        checkpoints = Checkpoints(tmp_path.as_uri(), keep=2, scratch=tmp_path / "scratch")
        uri = checkpoints.save(held, io_device=None, fields={})
        again, _ = built(min_count=2)
        found = checkpoints.newest()
        kept = select_resumed(found, again.variables(), config_of().training)
        restore(found, kept, io_device=None)
        again.refresh()
        np.testing.assert_array_equal(answers(again.model), expected)
        assert again.run(1).metrics["tables"]["table"]["rows"] == 20
        reset_uids()
        model = model_of(min_count=2)
        restore_model(uri, model, tmp_path)
        np.testing.assert_array_equal(answers(model), expected)
        warmed, _ = built(min_count=2)
        source = warm_start.fetch_weights(uri, tmp_path / "warm")
        line = warm_start.load(source, warmed.variables(), io_device=None)["warm_start"]
        warmed.refresh()
        np.testing.assert_array_equal(answers(warmed.model), expected)
        assert "2 absent in the source (table/shard_0_sieve, table/shard_1_sieve)" in line
        assert ("2 not in this model (table/shard_0_seen" in line) == earlier


@pytest.mark.parametrize(
    ("other", "here"), [({"capacity": 80}, "[41, 3]"), ({"dimension": 5}, "[21, 5]")]
)
def test_a_checkpoint_of_another_size_is_refused_in_one_line(other, here, tmp_path):
    strategy, _ = built()
    found = saved(strategy, tmp_path)
    different, _ = built(**other)
    with pytest.raises(UserError) as caught:
        restore(found, different.variables(), io_device=None)
    message = str(caught.value)
    assert "\n" not in message
    assert "does not match the model and optimizer of the configuration" in message
    assert f"table/shard_0_rows is float32 [21, 3] in the checkpoint, not float32 {here}" in message


@pytest.mark.parametrize(
    ("optimizer", "ranks"),
    [
        # The average gradient of RMSprop must not be taken for an average of weights.
        ({"name": "rmsprop", "args": {"centered": True, "momentum": 0.9}}, [2, 2, 2]),
        # Adafactor's slot with one value per column is left out, because it has no rows.
        ({"name": "adafactor"}, [1, 2]),
    ],
)
def test_new_rows_begin_with_what_the_optimizer_began_with(optimizer, ranks):
    strategy, _ = built(optimizer=optimizer)
    table = strategy.model.get_layer("table")
    before = [[slot.numpy() for slot, _ in shard.slots] for shard in table.parts]
    for shard in table.parts:
        assert [len(slot.shape) for slot, _ in shard.slots] == ranks
        for slot, _ in shard.slots:
            slot.assign(tf.ones_like(slot))
    table(tf.constant(np.arange(1000)), training=True)
    for shard, expected in zip(table.parts, before, strict=True):
        for (slot, _), first in zip(shard.slots, expected, strict=True):
            np.testing.assert_array_equal(slot.numpy()[:-1], first[:-1])


def test_new_rows_begin_their_averages_with_themselves():
    strategy, _ = built(steps=1, ema=0.9, optimizer={"name": "adam"})
    for shard in strategy.model.get_layer("table").parts:
        assert sorted((value for _, value in shard.slots), key=str) == [0.0, 0.0, None]


@pytest.mark.parametrize(
    ("training", "words"),
    [
        (
            {"strategy": "async_parameter_server", "pull_every": 5},
            "training.pull_every: workers cannot",
        ),
        ({"strategy": "multi_worker_mirrored"}, "training.strategy: multi_worker_mirrored has a"),
        ({"replicas_to_aggregate": 0}, ""),
        ({"replicas_to_aggregate": 1}, "training.replicas_to_aggregate: with 1 of 2 workers"),
        ({"replicas_to_aggregate": 2}, ""),
    ],
)
def test_what_cannot_train_a_table_is_refused(training, words):
    training = {"strategy": "sync_parameter_server", **training}
    config = parse_config({"training": training, "cluster": {"workers": 2}})
    if words:
        assert words in refusal(require_updates, config, model_of())
    else:
        require_updates(config, model_of())


def test_a_model_without_tables_is_left_alone():
    model = keras.Sequential([keras.Input((2,)), keras.layers.BatchNormalization()])
    assert embedding_table.metrics(model) == {}
    assert embedding_table.list_groups(model) == []
    assert embedding_table.list_state(model) == model.non_trainable_variables


def test_all_that_a_shard_needs_is_placed_with_it():
    made = []

    def create(next_creator, **kwargs):
        made.append(next_creator(**kwargs))
        return made[-1]

    with tf.variable_creator_scope(create):
        table = EmbeddingTable(40, 3, keys="string", shards=2, min_count=2)
        table.build((None,))
    model = keras.Sequential([keras.Input((), dtype="string"), table])
    groups = [{id(each) for each in group} for group in embedding_table.list_groups(model)]
    for shard, group in zip(table.parts, groups, strict=True):
        assert {id(each) for each in (shard.free, shard.room, shard.earlier, shard.window)} < group
    assert {id(each) for each in made} == set.union(*groups)
    assert sum(map(len, groups)) == len(made) == 2 * 10

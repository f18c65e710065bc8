<<<<<<< HEAD
"""Two towers over pairs of ids: the score, the tables, and what is refused."""

from __future__ import annotations

=======
"""The recommender: its answers, its tables, what it takes, and that it finds planted tastes."""

from __future__ import annotations

import keras
>>>>>>> strategies
import numpy as np
import pytest
import tensorflow as tf

from trainer.config import ModelConfig
<<<<<<< HEAD
from trainer.errors import ConfigError
from trainer.models import registry
from trainer.models.spec import InputSpec

ROWS = {"user": 7, "item": 5}
PAIRS = InputSpec(
    shape={"user": (), "item": ()}, dtype={"user": "int64", "item": "int32"}, num_classes=2
)


def build(spec=PAIRS, seed=0, **args):
    return registry.build(ModelConfig(name="two_tower", args={"rows": ROWS, **args}), spec, seed)


def pairs(users, items):
    return {"user": tf.constant(users, tf.int64), "item": tf.constant(items, tf.int32)}


def refused(spec=PAIRS, **args):
    with pytest.raises(ConfigError) as caught:
        build(spec, **args)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix("model two_tower: ")
=======
from trainer.config_file import parse
from trainer.data import clicks
from trainer.errors import ConfigError
from trainer.models import registry
from trainer.models.spec import InputSpec
from trainer.optimizers import build_optimizer
from trainer.strategies.interface import step_of

PAIRS = InputSpec(
    shape={"item": (), "user": ()}, dtype={"item": "int64", "user": "int64"}, num_classes=2
)
ROWS = {"user": 7, "item": 5}


def build(spec=PAIRS, seed=0, **args):
    return registry.build(ModelConfig(name="two_tower", args=args), spec, seed)
>>>>>>> strategies


def weights(model):
    return {variable.path: variable.numpy() for variable in model.variables}


<<<<<<< HEAD
def table(model, name, shards=2):
    held = weights(model)
    rows = np.zeros((ROWS[name], 16), np.float32)
    for shard in range(shards):
        rows[shard::shards] = held[f"{name}_embedding/shard_{shard}"]
    return rows


def test_the_score_is_the_match_of_two_vectors_and_a_bias():
    model = build()
    held, users, items = weights(model), [0, 3, 6, 6], [4, 1, 0, 4]
    user, item = table(model, "user")[users], table(model, "item")[items]
    vectors = [
        rows @ held[f"{name}_vector/kernel"] + held[f"{name}_vector/bias"]
        for name, rows in (("user", user), ("item", item))
    ]
    both = np.concatenate([user, item], axis=1)
    score = (vectors[0] * vectors[1]).sum(axis=1)
    score += (both @ held["bias/kernel"] + held["bias/bias"])[:, 0]
    logits = model(pairs(users, items)).numpy()
    assert logits.dtype == np.float32
    np.testing.assert_array_equal(logits[:, 0], 0)
    np.testing.assert_allclose(logits[:, 1], score, rtol=1e-5, atol=1e-6)


def test_a_gradient_has_the_rows_that_were_asked_for_once_each():
    model = build()
    with tf.GradientTape() as tape:
        score = tf.reduce_sum(model(pairs([1, 1, 3], [0, 0, 2]))[:, 1])
    shards = [v for v in model.trainable_variables if "user_embedding" in v.path]
    found = tape.gradient(score, [v.value for v in shards])
    assert all(isinstance(each, tf.IndexedSlices) for each in found)
    # Users 1 and 3 are rows 0 and 1 of the odd shard; the even one was not asked for.
    assert [sorted(each.indices.numpy()) for each in found] == [[], [0, 1]]


def test_the_same_seed_gives_the_same_model_and_another_one_another():
    first, again, other = weights(build(seed=1)), weights(build(seed=1)), weights(build(seed=2))
    assert list(first) == list(again) == list(other)
    assert all(np.array_equal(first[path], again[path]) for path in first)
    assert not np.array_equal(first["user_vector/kernel"], other["user_vector/kernel"])


def test_hidden_layers_and_sizes_are_as_asked_for():
    model = build(dimension=4, hidden_units=[6], output=3, shards=9)
    shapes = {variable.path: tuple(variable.shape) for variable in model.variables}
    assert shapes["user_hidden_0/kernel"] == (4, 6)
    assert shapes["item_vector/kernel"] == (6, 3)
    # No more shards than rows.
    assert shapes["item_embedding/shard_4"] == (1, 4)
    assert "item_embedding/shard_5" not in shapes


@pytest.mark.parametrize("user", [-1, 7])
def test_an_id_outside_of_its_table_is_an_error(user):
    with pytest.raises(tf.errors.InvalidArgumentError, match="ids outside of 0 to 6"):
        build()(pairs([user], [0]))


@pytest.mark.parametrize(("user", "row"), [(7, 0), (-1, 6), (20, 6)])
def test_an_id_outside_of_its_table_may_wrap(user, row):
    model = build(unknown="wrap")
    logits = model(pairs([user, row], [0, 0])).numpy()
    np.testing.assert_array_equal(logits[0], logits[1])


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            InputSpec(shape=PAIRS.shape, dtype=PAIRS.dtype, num_classes=3),
            "takes 2 classes, the dataset has 3",
        ),
        (
=======
def pairs(users, items):
    return {"user": np.array(users), "item": np.array(items)}


def test_its_score_is_the_match_of_both_towers_and_a_bias():
    model = build(rows=ROWS, dimension=3)
    found = weights(model)
    # Biases begin at zero, and would hide a mistake.
    for variable in model.variables:
        if variable.path.endswith("bias"):
            variable.assign(np.arange(1.0, 1.0 + variable.shape[0]) / 7)
            found[variable.path] = variable.numpy()
    user, item = found["user_embedding/shard_1"][2], found["item_embedding/shard_0"][1]
    vectors = [
        row @ found[f"{name}_vector/kernel"] + found[f"{name}_vector/bias"]
        for name, row in {"user": user, "item": item}.items()
    ]
    both = np.concatenate([item, user]) @ found["bias/kernel"] + found["bias/bias"]
    np.testing.assert_allclose(
        model(pairs([5], [2])).numpy(), [[0, vectors[0] @ vectors[1] + both[0]]], rtol=1e-5
    )


def test_its_tables_are_in_as_many_shards_as_were_asked_for():
    shapes = {path: value.shape for path, value in weights(build(rows=ROWS, shards=3)).items()}
    assert [shapes[f"user_embedding/shard_{n}"] for n in range(3)] == [(3, 16), (2, 16), (2, 16)]
    assert [shapes[f"item_embedding/shard_{n}"] for n in range(3)] == [(2, 16), (2, 16), (1, 16)]


def test_a_small_table_has_no_more_shards_than_rows():
    paths = weights(build(rows={"user": 7, "item": 1}, shards=2))
    assert {path for path in paths if path.startswith("item_embedding")} == {
        "item_embedding/shard_0"
    }


def test_towers_have_the_hidden_layers_that_were_asked_for():
    shapes = {path: v.shape for path, v in weights(build(rows=ROWS, hidden_units=[6, 4])).items()}
    assert shapes["user_hidden_0/kernel"] == (16, 6)
    assert shapes["item_hidden_1/kernel"] == (6, 4)
    assert shapes["item_vector/kernel"] == (4, 16)


def test_same_seed_gives_the_same_weights():
    first, second, other = build(rows=ROWS), build(rows=ROWS), build(rows=ROWS, seed=1)
    assert list(weights(first)) == list(weights(second))
    for path, value in weights(first).items():
        np.testing.assert_array_equal(value, weights(second)[path])
    assert (weights(first)["bias/kernel"] != weights(other)["bias/kernel"]).any()


def test_unknown_ids_may_share_a_row():
    model = build(rows=ROWS, unknown="wrap")
    np.testing.assert_array_equal(model(pairs([9], [-1])), model(pairs([2], [4])))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
>>>>>>> strategies
            InputSpec(shape=(8, 8, 1), dtype="uint8", num_classes=2),
            "takes 2 input features, the dataset has one, uint8 of shape (8, 8, 1)",
        ),
        (
<<<<<<< HEAD
            InputSpec(shape=PAIRS.shape, dtype={"user": "string", "item": "int32"}, num_classes=2),
            "takes one whole number as 'user', which is user (string of shape ()), "
            "item (int32 of shape ())",
        ),
    ],
)
def test_other_data_is_refused(spec, said):
    assert refused(spec) == said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"rows": {"user": 7}}, "rows: {'user': 7} is not allowed; it has to be {user: ..., item:"),
        ({"rows": {"user": 0, "item": 5}}, "rows of user: 0 is not allowed"),
        ({"dimension": 0}, "dimension: 0 is not allowed"),
        ({"shards": 0}, "shards: 0 is not allowed"),
        ({"output": 1.5}, "output: 1.5 is not allowed"),
        ({"hidden_units": [0]}, "hidden_units: [0] is not allowed"),
        ({"unknown": "zero"}, "unknown: 'zero' is not allowed; it is one of error, wrap"),
    ],
)
def test_wrong_arguments_are_named(args, said):
    assert refused(**args).startswith(said)
=======
            InputSpec(shape=PAIRS.shape, dtype=PAIRS.dtype, num_classes=10),
            "takes 2 classes, the dataset has 10",
        ),
        (
            InputSpec(shape={"item": (), "user": (2,)}, dtype=PAIRS.dtype, num_classes=2),
            "takes one whole number as 'user'; there is item (int64 of shape ()), "
            "user (int64 of shape (2,))",
        ),
        (
            InputSpec(shape=PAIRS.shape, dtype={"item": "string", "user": "int64"}, num_classes=2),
            "takes one whole number as 'item'; there is item (string of shape ()), "
            "user (int64 of shape ())",
        ),
    ],
)
def test_a_dataset_that_does_not_fit_is_refused(spec, message):
    with pytest.raises(ConfigError) as caught:
        build(spec, rows=ROWS)
    assert str(caught.value) == f"model two_tower: {message}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({}, "rows: None is not allowed; it has to be {item: COUNT, user: COUNT}"),
        (
            {"rows": {"user": 7}},
            "rows: {'user': 7} is not allowed; it has to be {item: COUNT, user: COUNT}",
        ),
        (
            {"rows": {"user": 7, "item": 0}},
            "rows of item: 0 is not allowed; it has to be a whole number of at least 1",
        ),
        (
            {"rows": ROWS, "dimension": 0},
            "dimension: 0 is not allowed; it has to be a whole number of at least 1",
        ),
        (
            {"rows": ROWS, "shards": 1.5},
            "shards: 1.5 is not allowed; it has to be a whole number of at least 1",
        ),
        (
            {"rows": ROWS, "hidden_units": 8},
            "hidden_units: 8 is not allowed; it has to be a list of whole numbers of at least 1",
        ),
        (
            {"rows": ROWS, "unknown": "zero"},
            "unknown: 'zero' is not allowed; it is one of error, wrap",
        ),
    ],
)
def test_wrong_arguments_are_named(args, message):
    with pytest.raises(ConfigError) as caught:
        build(**args)
    assert str(caught.value) == f"model two_tower: {message}"


def test_it_learns_tastes_that_popularity_does_not_show():
    users, items, labels = clicks.draw()
    model = build(rows={"user": clicks.USERS, "item": clicks.ITEMS}, dimension=8)
    training = parse({"training": {"optimizer": {"name": "adam", "learning_rate": 0.01}}}).training
    step = tf.function(
        step_of(
            model,
            build_optimizer(training),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )
    )
    examples = (pairs(users, items), labels)
    train = tf.data.Dataset.from_tensor_slices(examples).take(clicks.TRAINING)
    for batch in train.shuffle(clicks.TRAINING, seed=0).repeat().batch(512).take(250):
        step(batch)
    test = slice(clicks.TRAINING, None)
    answers = model(pairs(users[test], items[test])).numpy().argmax(axis=1)
    assert (answers == labels[test]).mean() > 0.7
>>>>>>> strategies

"""Two towers over pairs of ids: the score, the tables, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from trainer.config import ModelConfig
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


def weights(model):
    return {variable.path: variable.numpy() for variable in model.variables}


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
            InputSpec(shape=(8, 8, 1), dtype="uint8", num_classes=2),
            "takes 2 input features, the dataset has one, uint8 of shape (8, 8, 1)",
        ),
        (
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

"""Tests the two-tower recommender: outputs, tables, inputs, and that it learns preferences."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.model import ModelConfig
from flotilla.trainer.data.builders import embedded as clicks
from flotilla.trainer.features.statistics.statistics import FeatureStatistics
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.runtime.errors import ConfigError
from tests.trainer.models.known import learnt
from tests.trainer.objectives import cross_entropy
from tests.trainer.plain import build_step
from tests.trainer.refusal import refusal


def spec_of(shape=(), dtype="int64", output_shape=(2,), **dtypes):
    """Return the spec of an item and a user, whose types may be given by name."""
    return InputSpec(
        shape={"item": (), "user": shape},
        dtype={"item": dtype, "user": dtype, **dtypes},
        output_shape=output_shape,
    )


PAIRS = spec_of()
ROWS = {"user": 7, "item": 5}


def build(spec=PAIRS, seed=0, **args):
    # Skip the checks of `ModelConfig`: a user's function may pass any arguments to the model.
    config = ModelConfig.model_construct(name="two_tower", args=args)
    return registry.build(config, spec, seed)


def weights(model):
    return {variable.path: variable.numpy() for variable in model.variables}


def pairs(users, items):
    return {"user": np.array(users), "item": np.array(items)}


def test_its_score_is_the_match_of_both_towers_and_a_bias():
    model = build(rows=ROWS, dimension=3)
    found = weights(model)
    # Biases are 0 initially, which would hide a mistake.
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
    # A table has at most one shard per row.
    paths = weights(build(rows={"user": 7, "item": 1}, shards=3))
    assert {path for path in paths if "embedding" in path} == {
        "item_embedding/shard_0", *(f"user_embedding/shard_{n}" for n in range(3)),
    }  # fmt: skip


def test_towers_have_the_hidden_layers_that_were_asked_for():
    shapes = {path: v.shape for path, v in weights(build(rows=ROWS, hidden_units=[6, 4])).items()}
    assert shapes["user_hidden_0/kernel"] == (16, 6)
    assert shapes["item_hidden_1/kernel"] == (6, 4)
    assert shapes["item_vector/kernel"] == (4, 16)


def test_unknown_ids_may_share_a_row():
    model = build(rows=ROWS, unknown="wrap")
    np.testing.assert_array_equal(model(pairs([9], [-1])), model(pairs([2], [4])))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            InputSpec(shape=(8, 8, 1), dtype="uint8", output_shape=(2,)),
            "needs 2 input features, but the dataset has one, uint8 of shape (8, 8, 1); set "
            "data.inputs: [USER, ITEM]",
        ),
        (spec_of(output_shape=(10,)), "needs 2 classes, but the dataset has 10"),
        (
            spec_of((2,)),
            "needs one whole number as 'user', but the dataset has item (int64 of shape ()), "
            "user (int64 of shape (2,))",
        ),
        (
            spec_of(item="string"),
            "needs one whole number as 'item', but the dataset has item (string of shape ()), "
            "user (int64 of shape ())",
        ),
        (
            spec_of(user="float32"),
            "needs one whole number as 'user', but the dataset has item (int64 of shape ()), "
            "user (float32 of shape ()); whole numbers are read as floats if some are missing: "
            "fill the missing values",
        ),
    ],
)
def test_a_dataset_that_does_not_fit_is_refused(spec, message):
    assert refusal(build, spec, rows=ROWS) == f"model two_tower: the model {message}"


ROWS_OF = "it must be {item: COUNT, user: COUNT}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"rows": {"user": 7}}, f"rows: {{'user': 7}} is not allowed; {ROWS_OF}"),
        ({"rows": {"user": 7, "item": 0}}, "rows of item: 0 is not allowed; it must be a whole nu"),
        ({"rows": ROWS, "dimension": 0}, "dimension: 0 is not allowed; it must be a whole number"),
        ({"rows": ROWS, "shards": 1.5}, "shards: 1.5 is not allowed; it must be a whole number"),
        ({"rows": ROWS, "hidden_units": 8}, "hidden_units: 8 is not allowed; it must be a list of"),
        ({"rows": ROWS, "unknown": "zero"}, "unknown: 'zero' is not one of error, wrap"),
        (
            {"tables": {"user": {"capacity": 5}}},
            f"rows: None is not allowed; {ROWS_OF}, except for features with a capacity in tables "
            "({'user': {'capacity': 5}})",
        ),
    ],
)
def test_wrong_arguments_are_named(args, message):
    assert refusal(build, **args).startswith(f"model two_tower: {message}")


@pytest.mark.slow
def test_it_learns_tastes_that_popularity_does_not_show():
    users, items, labels = clicks.draw_clicks()
    model = build(rows={"user": clicks.USERS, "item": clicks.ITEMS}, dimension=8)
    training = parse_config(
        {"training": {"optimizer": {"name": "adam", "learning_rate": 0.01}}}
    ).training
    step = tf.function(build_step(model, build_optimizer(training), cross_entropy))
    examples = (pairs(users, items), labels)
    train = tf.data.Dataset.from_tensor_slices(examples).take(clicks.TRAINING)
    for batch in train.shuffle(clicks.TRAINING, seed=0).repeat().batch(512).take(250):
        step(batch)
    test = slice(clicks.TRAINING, None)
    answers = model(pairs(users[test], items[test])).numpy().argmax(axis=1)
    assert (answers == labels[test]).mean() > 0.7


def test_its_tables_may_grow():
    tables = {"user": {"capacity": 9, "shards": 3}}
    model = build(spec_of(user="string"), rows={"item": 5}, tables=tables)
    table = model.get_layer("user_embedding")
    assert (table.capacity, table.shards, table.keys) == (9, 3, "string")
    batch = {"user": tf.constant(["a", "b"]), "item": tf.constant([1, 4])}
    assert model(batch, training=True).shape == (2, 2)
    assert table.metrics()["rows"] == 2


def of_training(dtype, **of_each):
    known = {name: FeatureStatistics(examples=9, **each) for name, each in of_each.items()}
    dtypes = dict.fromkeys(of_each, dtype)
    return InputSpec(
        shape=dict.fromkeys(of_each, ()), dtype=dtypes, output_shape=(1,),
        names=tuple(of_each), targets=("rating",), learnt=learnt(known),
    )  # fmt: skip


def test_tables_are_as_large_as_the_training_split_asks_for():
    number = {"kind": "number", "mean": 3.0, "std": 1.0, "distinct": 3}
    model = build(of_training("int64", user={**number, "most": 4.0}, item={**number, "most": 2.0}))
    registry.require_readable("two_tower", model)
    rows = {path: value.shape[0] for path, value in weights(model).items() if "embedding" in path}
    assert sum(n for path, n in rows.items() if path.startswith("user")) == 4 + 2
    known, one, other = (model(pairs([each], [1])).numpy() for each in (4, 5, -7))
    assert one == other != known


def test_ids_that_are_texts_have_a_row_each():
    text = {"kind": "text", "distinct": 2}
    spec = of_training(
        "string", user={**text, "counts": {"u1": 5, "u2": 4}}, item={**text, "counts": {"a": 9}}
    )
    with pytest.raises(ConfigError, match=r"'item' has about 2 values, but .* keeps only 1 of"):
        build(spec)
    text = {"kind": "text", "distinct": 1, "counts": {"a": 9}}
    model = build(of_training("string", user=text, item=text))
    registry.require_readable("two_tower", model)
    found = [model({"user": tf.constant([u]), "item": tf.constant(["a"])}) for u in ("a", "b", "c")]
    assert found[0] != found[1]
    assert found[1] == found[2]


def test_ids_that_are_far_apart_are_better_texts():
    far = {"kind": "number", "mean": 3.0, "std": 1.0, "distinct": 3, "most": 9e8}
    with pytest.raises(ConfigError, match=r"ids up to 900000000.*set data\.types: \{user: text\}"):
        build(of_training("int64", user=far, item=far))

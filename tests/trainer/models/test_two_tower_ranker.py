"""Tests the retrieval and ranking model: outputs, both losses, inputs, and that it learns."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from clicks_large import Clickstream

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.model import ModelConfig
from flotilla.trainer.evaluation.predictions import measure_predictions
from flotilla.trainer.models import registry
from flotilla.trainer.models.spec import InputSpec
from flotilla.trainer.optimizers.optimizers import build_optimizer
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.recommendation import Recommendation
from tests.trainer.plain import build_step
from tests.trainer.refusal import refusal
from tests.trainer.tasks.measuring import InParts, target

IDS = ("user", "item", "shown")
TABLES = {"user": {"capacity": 8}, "item": {"capacity": 8}}
ATTRIBUTES = {"user_attributes": ["segment"], "item_attributes": ["category"]}
BATCH = {
    "user": np.array([10**12, 3, 3, 5]),
    "item": np.array([4 * 10**12, 8, 9, 8]),
    "shown": np.array([0, 100, 3, 100]),
}
CLICKS = np.array([1, 0, 1, 1])


def spec_of(*names, dtype="int64", shape=()):
    given = dict.fromkeys(names or IDS)
    return InputSpec(
        shape=dict.fromkeys(given, shape), dtype=dict.fromkeys(given, dtype), output_shape=(-1,)
    )


def objective(labels=CLICKS):
    return Objective(Recommendation(target(labels), group="user", k=[1, 10]))


def build(spec=None, check=None, **args):
    given = {"tables": TABLES, "popularity": "shown", "dimension": 3, **args}
    # Skip the checks of `ModelConfig`: a user's function may pass any arguments to the model.
    config = ModelConfig.model_construct(name="two_tower_ranker", args=given)
    return registry.build(config, spec or spec_of(), 0, (check or objective()).accept)


def batch(**others):
    return {name: tf.constant(values) for name, values in (BATCH | others).items()}


def seen(model, inputs=None):
    """Return the model after a training step, which adds rows for the IDs that it looks up."""
    model(inputs or batch(), training=True)
    return model


def test_its_outputs_are_a_logit_and_both_vectors():
    model = seen(build(ranking_units=[]))
    outputs = model(batch()).numpy()
    assert outputs.shape == (4, 1 + 2 * 4)
    of_users, of_items = outputs[:, 1:5], outputs[:, 5:]
    np.testing.assert_array_equal(of_users[:, 3], 1)
    np.testing.assert_array_equal(of_users[1], of_users[2])
    np.testing.assert_array_equal(of_items[1], of_items[3])
    match = (of_users[:, :3] * of_items[:, :3]).sum(axis=1)
    rest = outputs[:, 0] - match
    # The rest of the logit is linear in the vectors and rows, so it stays small.
    assert np.abs(rest).max() < 10


def expected_loss(outputs, retrieval=1.0, weights=None):
    """Return the mean loss of the clicks plus the retrieval loss, one click at a time."""
    outputs = outputs.astype("float64")
    logits, of_users, of_items = outputs[:, 0], outputs[:, 1:5], outputs[:, 5:]
    each, scale = [], np.ones(4) if weights is None else weights
    for row in np.flatnonzero(CLICKS):
        scores = of_items @ of_users[row] - np.log1p(BATCH["shown"])
        others = BATCH["item"] != BATCH["item"][row]
        others[row] = True
        each.append(np.log(np.exp(scores[others]).sum()) - scores[row])
    click = np.logaddexp(0, np.where(CLICKS, -logits, logits)) * scale
    found = click.mean() + retrieval * np.average(each, weights=scale[CLICKS > 0])
    return pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize("weights", [None, np.array([1.0, 2.0, 0.5, 4.0], "float32")])
def test_its_loss_is_that_of_the_click_and_that_of_the_search(weights):
    own = objective()
    model = seen(build(check=own, retrieval=0.5))
    outputs = model(batch())
    given = (batch(), tf.constant(CLICKS), *([] if weights is None else [tf.constant(weights)]))
    assert float(own.loss(model, given, outputs)) == expected_loss(outputs.numpy(), 0.5, weights)


def test_a_batch_without_a_click_has_no_loss_of_the_search():
    own = objective()
    model = seen(build(check=own))
    outputs = model(batch())
    nothing = tf.zeros(4, tf.int64)
    logits = outputs.numpy()[:, 0]
    found = float(own.loss(model, (batch(), nothing), outputs))
    assert found == pytest.approx(np.logaddexp(0, logits).mean(), rel=1e-5)


def test_it_is_read_back_from_its_file(tmp_path):
    model = seen(build(ranking_units=[4], hidden_units=[6]))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert type(again) is type(model)
    np.testing.assert_allclose(again(batch()), model(batch()), rtol=1e-6)


def test_a_missing_popularity_counts_as_zero():
    kinds = {"user": "int64", "item": "int64", "shown": "float32"}
    spec = InputSpec(shape=dict.fromkeys(IDS, ()), dtype=kinds, output_shape=(-1,))
    known, missing = (
        batch(**{"shown": np.array([first, 100, 3, 100], np.float32)}) for first in (0, np.nan)
    )
    model = seen(build(spec), known)
    outputs = model(missing).numpy()
    np.testing.assert_array_equal(outputs, model(known).numpy())
    loss_of = model.get_layer("answer").loss
    losses = [
        loss_of(each, tf.constant(CLICKS), outputs, None).numpy() for each in (known, missing)
    ]
    assert np.isfinite(losses[0])
    assert losses[0] == losses[1]


def test_it_does_without_popularity():
    model = build(spec_of("user", "item"), popularity="")
    given = {name: tf.constant(BATCH[name]) for name in ("user", "item")}
    assert model(given).shape == (4, 9)


def with_attributes(**args):
    tables = TABLES | {"segment": {"capacity": 8}, "category": {"capacity": 8}}
    return build(spec_of(*IDS, "segment", "category"), tables=tables, **ATTRIBUTES, **args)


def test_an_id_without_a_row_is_judged_by_its_attributes():
    known = {"segment": np.array([1, 2, 1, 2]), "category": np.array([0, 0, 1, 1])}
    model = seen(with_attributes(), batch(**known))
    strangers = {name: np.array([-1, -2, -3, -4]) for name in ("user", "item")}
    strangers["shown"] = np.zeros(4, np.int64)
    outputs = model(batch(**strangers, **known)).numpy()
    of_users, of_items = outputs[:, 1:5], outputs[:, 5:]
    np.testing.assert_array_equal(of_users[[0, 1]], of_users[[2, 3]])
    np.testing.assert_array_equal(of_items[[0, 2]], of_items[[1, 3]])
    assert np.abs(of_users[0] - of_users[1]).max() > 1e-4
    assert np.abs(of_items[0] - of_items[2]).max() > 1e-4


def test_ids_may_be_texts():
    spec, own = spec_of(), objective()
    for name in ("user", "item"):
        spec.dtype[name] = "string"
    model = build(spec, own)
    texts = batch(**{name: BATCH[name].astype(str) for name in ("user", "item")})
    outputs = seen(model, texts)(texts)
    assert len(np.unique(outputs[:, 1:4], axis=0)) == 3
    found = float(own.loss(model, (texts, tf.constant(CLICKS)), outputs))
    assert found == expected_loss(outputs.numpy())


@pytest.mark.slow
def test_it_learns_what_is_clicked_and_what_is_found():
    world = Clickstream(
        users=300, items=200, new_users=0, new_items=0, events=60_000, zipf=0.7, drift=0
    )
    parts = [world.draw(0, split, 0) for split in (0, 1)]
    train, test = ({name: each[:40_000] for name, each in part.items()} for part in parts)
    own = objective(train["label"])
    tables = {name: {"capacity": 512} for name in ("user", "item", "segment", "category")}
    args = {"tables": tables, "dimension": 8, "ranking_units": [], **ATTRIBUTES}
    names = (*IDS, "segment", "category")
    model = build(spec_of(*names), own, **args)
    optimizer = {"name": "adam", "learning_rate": 0.02}
    training = parse_config({"training": {"optimizer": optimizer}}).training
    step = tf.function(build_step(model, build_optimizer(training), own.loss))
    for begin in range(0, 40_000, 500):
        rows = slice(begin, begin + 500)
        inputs = {name: tf.constant(train[name][rows]) for name in names}
        step((inputs, tf.constant(train["label"][rows])))
    outputs = model({name: tf.constant(test[name]) for name in names}).numpy()
    given = InParts(test["label"], outputs, user=test["user"], item=test["item"])
    found = measure_predictions(own, given)["metrics"]
    by_popularity = np.zeros_like(outputs)
    by_popularity[:, 4], by_popularity[:, -1] = 1, world.exposure(test["item"], 0)
    known = InParts(test["label"], by_popularity, user=test["user"], item=test["item"])
    assert found["query_auc"] > 0.65
    popular = measure_predictions(own, known)["metrics"]
    assert found["recall_at_10"] > 1.1 * popular["recall_at_10"]


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (
            {"tables": {"user": {"capacity": 7}}},
            "tables: {'user': {'capacity': 7}} is not allowed; it must be {user: {capacity: "
            "COUNT}, item: {capacity: COUNT}}",
        ),
        ({"tables": None}, "tables: None is not allowed; it must be {user: {capacity: COUNT}"),
        ({"item": "itme"}, "there is no input 'itme'; did you mean 'item'?"),
        ({"popularity": ""}, "the model does not use the input 'shown'; add it to user_attributes"),
        ({"item": "user"}, "'user' is named twice"),
        ({"item_attributes": ["shown"]}, "'shown' is named twice"),
        ({"user_attributes": "segment"}, "user_attributes: 'segment' is not allowed; it must be a"),
        ({"retrieval": -1}, "retrieval: -1 is not allowed; it must be 0 or more"),
        ({"dimension": 0}, "dimension: 0 is not allowed"),
    ],
)
def test_wrong_arguments_are_refused(args, line):
    assert refusal(build, **args).startswith(f"model two_tower_ranker: {line}")


@pytest.mark.parametrize(
    ("spec", "line"),
    [
        (spec_of(dtype="float32"), "tables.user: ids must be 64-bit whole numbers or strings"),
        (spec_of(shape=(2,)), "'user' must have one value per example, but is int64 of shape (2,)"),
        (
            InputSpec(shape=(), dtype="int64", output_shape=(-1,)),
            "the model needs several inputs; set data.inputs: [user, item, shown]",
        ),
        (spec_of(dtype="string"), "popularity: 'shown' is string, not a number"),
    ],
)
def test_inputs_have_to_be_ids(spec, line):
    assert refusal(build, spec).startswith(f"model two_tower_ranker: {line}")

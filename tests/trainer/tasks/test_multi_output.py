"""Tests that several outputs are trained and measured as Keras does with a dict of losses."""

from __future__ import annotations

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.schema import Config, TaskConfig
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks import registry
from flotilla.trainer.tasks.objective import Objective
from tests.trainer.refusal import refusal
from tests.trainer.tasks.measuring import InParts, check_validation, evaluated, measured
from tests.trainer.tasks.test_registry import dataset, feature

COUNT = 30
RANDOM = np.random.default_rng(0)
INPUTS = RANDOM.normal(size=(COUNT, 4)).astype("float32")
LABELS = {
    "income": RANDOM.normal(size=COUNT).astype("float32"),
    "city": RANDOM.integers(0, 3, COUNT),
    "owns": RANDOM.integers(0, 2, COUNT).astype(bool),
}
SIZES = {"income": 1, "city": 3, "owns": 1}


def source():
    found = dataset(
        income=feature("float32"), city=feature("int64", classes=3), owns=feature("bool")
    )
    found.target_counts = {"city": {"train": [9, 11, 10]}, "owns": {"train": [15, 15]}}
    found.target_moments = {"income": {"mean": 0.0, "std": 1.0, "min": -2.0, "max": 2.0}}
    return found


def created(outputs=None, **config):
    named = {"income": {"weight": 0.5}} if outputs is None else outputs
    return registry.create(TaskConfig(outputs=named, **config), source())


def case():
    """Return the task, and the outputs of an untrained model for `INPUTS`."""
    return created(), {name: np.asarray(each) for name, each in net()(INPUTS).items()}


def net(names=tuple(SIZES), activation=None):
    keras.utils.set_random_seed(0)
    given = keras.Input((4,))
    heads = {
        name: keras.layers.Dense(SIZES.get(name, 2), activation=activation, name=name)(given)
        for name in names
    }
    return keras.Model(given, heads)


def test_the_task_of_each_label_is_chosen_by_what_it_is():
    task = created()
    assert task.name == "multi_output"
    assert {name: part.name for name, part in task.parts.items()} == {
        "income": "regression",
        "city": "classification",
        "owns": "binary_classification",
    }
    assert task.output_shape == {"income": (1,), "city": (3,), "owns": (1,)}


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_the_loss_is_that_of_keras_with_the_same_losses_and_weights(weighted):
    weights = np.linspace(0.5, 1.5, COUNT, dtype="float32") if weighted else None
    batch = (INPUTS, LABELS) if weights is None else (INPUTS, LABELS, weights)
    every = dict.fromkeys(LABELS, weights) if weighted else None
    check_loss(Objective(created()), batch, every, {"income": 0.5, "city": 1.0, "owns": 1.0})


def check_loss(objective, batch, weights, loss_weights=None):
    """Check the loss of a batch against Keras's, with these weights of examples by output."""
    model, plain = net(), net()
    objective.accept(model, model.output)
    plain.compile(
        loss={
            "income": "mse",
            "city": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            "owns": keras.losses.BinaryCrossentropy(from_logits=True),
        },
        loss_weights=loss_weights,
    )
    expected = plain.evaluate(INPUTS, LABELS, sample_weight=weights, batch_size=COUNT, verbose=0)
    found = objective.loss(model, batch, model(INPUTS))
    np.testing.assert_allclose(found, expected if np.isscalar(expected) else expected[0], rtol=1e-5)


def objective_of(outputs, **training):
    config = Config.model_validate(
        {"task": {"outputs": outputs}, "training": {"class_weights": "", **training}}
    )
    return registry.make_objective(config, source())


def test_classes_weigh_in_the_loss_of_their_own_output():
    weights = np.linspace(0.5, 1.5, COUNT, dtype="float32")
    outputs = {"city": {"class_weights": "balanced"}, "owns": {"class_weights": {"1": 3.0}}}
    every = {
        "income": weights,
        "city": weights * np.array([30 / 27, 30 / 33, 1.0])[LABELS["city"]],
        "owns": weights * np.where(LABELS["owns"], 3.0, 1.0),
    }
    check_loss(objective_of(outputs), (INPUTS, LABELS, tf.constant(weights)), every)


@pytest.mark.parametrize(
    ("key", "outputs", "training", "words"),
    [
        (
            "income",
            {"class_weights": "balanced"},
            {},
            r"regression of 'income' \(one float32\) has no",
        ),
        ("city", {"class_weights": {"7": 2.0}}, {}, r"no class '7' \(the classes are 0, 1, 2\)"),
        (
            "<label>",
            {},
            {"class_weights": "balanced"},
            r"^training.class_weights: there are several labels \(income, city, owns\); set the ",
        ),
    ],
)
def test_weights_of_classes_are_refused_where_there_are_none(key, outputs, training, words):
    with pytest.raises(ConfigError, match=words) as caught:
        objective_of({key: outputs} if outputs else {}, **training)
    assert f"task.outputs.{key}.class_weights" in str(caught.value)


@pytest.mark.slow
def test_metrics_are_those_of_each_task_after_the_name_of_its_output():
    task, outputs = case()
    check_validation(task, LABELS, outputs, weighted=False)
    found = measured(task, InParts(LABELS, outputs))
    alone = measured(task.parts["city"], InParts(LABELS["city"], outputs["city"]))
    assert found["city_macro_f1"] == pytest.approx(alone["macro_f1"])


@pytest.mark.slow
def test_an_output_has_further_metrics_and_a_loss_of_its_own():
    own = {"loss": "mean_absolute_error", "metrics": ("mean_squared_logarithmic_error",)}
    named = TaskConfig(outputs={"income": {"weight": 0.5, **own}}).outputs

    def found_by(objective):
        objective.accept(model := net(), model.output)
        _, outputs = case()
        parts = InParts(LABELS, outputs).parts()
        return objective.means(np.sum([objective.sums(part) for part in parts], axis=0))

    found = found_by(Objective(created(), outputs=named))
    assert "income_mean_squared_logarithmic_error" in found
    assert found["loss"] - found_by(Objective(created()))["loss"] == pytest.approx(
        0.5 * (found["income_mean_absolute_error"] - found["income_mean_squared_error"]), rel=1e-4
    )


def test_what_is_said_besides_the_metrics_is_plain_data():
    task, outputs = case()
    details = evaluated(task, InParts(LABELS, outputs))
    assert json.loads(json.dumps(details, allow_nan=False)) == details
    assert details["charts"][0]["title"] == "income: Predictions over labels"
    assert len(details["outputs"]["city"]["confusion_matrix"]) == 3
    first, output = ({name: each[0] for name, each in of.items()} for of in (LABELS, outputs))
    label = task.described(first, output)["label"]
    assert label.startswith(f"income {LABELS['income'][0]:.4g}, city ")


def test_answers_give_the_outputs_back():
    task, outputs = case()
    answers = {name: np.asarray(each) for name, each in task.answers(outputs).items()}
    assert list(answers) == [
        "income_prediction", "city_logits", "city_probabilities", "owns_logit", "owns_probability",
    ]  # fmt: skip
    for name, values in task.outputs_of(answers).items():
        np.testing.assert_allclose(values, outputs[name], rtol=1e-6)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"outputs": {"incme": {}}}, ": there is no label 'incme'; did you mean 'income'?"),
        ({"outputs": {"owns": {"args": {"no": 1}}}}, ".owns.args: binary_classif"),
        ({"name": "regression", "outputs": {}}, "task.name: regression needs one label, but there"),
        ({"name": "regression"}, ": regression has one output; set task.name to multi"),
        ({"args": {"standardize": True}}, "task.args: there are several outputs; set args for"),
        (
            {"outputs": {"city": {"name": "binary_classification"}}},
            ".city binary_classification: the label must be true or false",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_by_name(config, words):
    key = "" if words.startswith("task.") else "task.outputs"
    assert refusal(created, **config).startswith(f"{key}{words}")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (net(["income", "city", "own"]), "city: ..., owns: ...}, but returns income"),
        (keras.Model(x := keras.Input((4,)), keras.layers.Dense(3)(x)), "not one output"),
        (net(activation="sigmoid"), "output 'owns': the model must return logits"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(model, words):
    assert words in refusal(Objective(created()).accept, model, model.output)


def test_labels_are_checked_by_output():
    found = source()
    found.target_counts["owns"] = {"train": [30, 0]}
    found.target_moments["owns"] = {}
    message = "^task.outputs.owns binary_classification: the split 'train' has no example"
    with pytest.raises(ConfigError, match=message):
        registry.create(TaskConfig(), found)

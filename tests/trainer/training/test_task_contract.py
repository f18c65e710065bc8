"""Tests that a user's learning task that breaks its contract is rejected before training."""

from types import SimpleNamespace
from typing import ClassVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import TASKS
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.tasks import registry
from flotilla.trainer.tasks.base import Tally, Target, Task
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.regression import Regression
from flotilla.trainer.training import dry_run, task_contract
from flotilla.trainer.training.task_contract import require_contract, require_task

NUMBER = Target(name="price", shape=(), dtype="float32")
TARGETS = {
    "classification": Target(name="label", shape=(), dtype="int64", num_classes=3),
    "binary_classification": Target(name="label", shape=(), dtype="bool"),
    "multilabel_classification": Target(name="label", shape=(5,), dtype="int64"),
    "regression": Target(
        name="label", shape=(2, 3), dtype="int32", moments={"min": -5, "max": 9, "std": 1}
    ),
    "ranking": Target(name="label", shape=(), dtype="int64", num_classes=2),
    "sequence_labelling": Target(name="label", shape=(5,), dtype="int64", num_classes=4),
    "sequence_to_label": Target(name="label", shape=(), dtype="int64", num_classes=3),
}
QUERY = {"query": SimpleNamespace(shape=(), dtype="string")}


@pytest.mark.slow
# A recommendation needs a model with two output vectors, not artificial outputs.
@pytest.mark.parametrize("name", sorted({*TASKS} - {"multi_output", "recommendation"}))
def test_a_task_built_in_keeps_it(name):
    args = {"group": "query"} if name == "ranking" else {}
    require_contract(registry._class(name)(TARGETS[name], **args), QUERY)


class Numbers(Task):
    name = "numbers"
    main_metric = "absolute"
    directions: ClassVar[dict[str, str]] = {"absolute": "lower"}
    output_shape = (1,)

    def loss(self):
        return keras.losses.MeanSquaredError()

    def chance_loss(self):
        return 1.0

    def metrics(self):
        return [keras.metrics.MeanAbsoluteError(name="absolute")]

    def answers(self, outputs):
        return {"prediction": outputs[:, 0]}

    def outputs_of(self, answers):
        return answers["prediction"][:, np.newaxis]

    def example_losses(self, labels, outputs):
        return (labels - outputs[:, 0]) ** 2

    def described(self, label, output):
        return {"label": float(label), "predicted": float(output[0])}


class Largest(keras.Metric):
    """A metric whose states do not add up."""

    def __init__(self):
        super().__init__(name="absolute")
        self.most = self.add_weight(name="most", initializer="zeros")

    def update_state(self, *values, **_):
        self.most.assign(tf.maximum(self.most, tf.reduce_max(tf.abs(values[1]))))

    def result(self):
        return self.most


class OneForAll(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return tf.reduce_mean(tf.square(y_pred[:, 0] - y_true))


class Other(Tally):
    def result(self):
        return {"metrics": {"absolut": 0.5}}


def gives(value):
    return lambda *_: value


def answered(**columns):
    return lambda *given: {name: make(given[-1]) for name, make in columns.items()}


def fails(*_):
    raise ValueError("not today")


BROKEN = {
    "name": ({"name": None}, "its attribute name must be a string"),
    "direction": ({"directions": {"absolute": "lowest"}},
        "directions: the direction of 'absolute' is 'lowest'; it must be 'higher' or 'lower', "
        "or None if neither is better; did you mean 'lower'?"),
    "main metric": ({"main_metric": "absolut"},
        "directions: the direction of main_metric 'absolut' is missing; did you mean 'absolute'?"),
    "main metric without a direction": ({"directions": {"absolute": None}},
        "directions: the direction of main_metric 'absolute' is missing"),
    "output shape": ({"output_shape": 1}, "output_shape is 1; it must be a tuple of whole"),
    "chance": ({"chance_loss": gives(0.0)}, "chance_loss() is 0.0; it must be a number"),
    "no loss": ({"loss": gives("mse")}, "loss() returns a str, not a keras.losses.Loss"),
    "loss of a batch": ({"loss": gives(OneForAll())},
        "its loss returns a value of shape () for 8 examples: call() must return one value per"),
    "loss that raises": ({"loss_labels": fails}, "loss() failed: ValueError: not today ("),
    "sum of losses": ({"loss": gives(keras.losses.MeanSquaredError(reduction="sum"))},
        "its loss of 8 examples is"),
    "losses of examples": ({"example_losses": lambda *given: (given[-2] - given[-1]) ** 2},
        "example_losses() has shape (8, 8) for 8 examples; it must be (8,)"),
    "no metric": ({"metrics": gives(["mse"])},
        "metrics() contains a str; each item must be a keras.Metric"),
    "metric without a direction": (
        {"metrics": gives([keras.metrics.MeanSquaredError(name="squared")])},
        "directions: the task measures 'squared', which has no direction",
    ),
    "metric that does not add up": ({"metrics": gives([Largest()])},
        "if they are evaluated in two parts; a state must be a sum"),
    "no columns": ({"answers": answered()},
        "answers() must return a mapping from column names to tensors"),
    "answers in numpy": ({"answers": answered(prediction=lambda outputs: outputs.numpy())},
        "answers() failed: AttributeError: "),
    "one answer for all": ({"answers": answered(prediction=tf.reduce_mean)},
        "answers(): the first axis of 'prediction' must have one entry for each example"),
    "rounded answers": ({"answers": answered(prediction=lambda outputs: tf.round(outputs[:, 0]))},
        "outputs_of(answers(outputs)) must give the same predictions as the outputs, because a"),
    "answers that are not read": ({"answers": answered(price=lambda outputs: outputs[:, 0])},
        "outputs_of() failed: KeyError: 'prediction'"),
    "cells": ({"described": gives({"true": 1.0})},
        "the result of described() lacks label and predicted"),
    "cells of numpy": ({"described": gives({"label": np.float32(1), "predicted": 0.0})},
        "described() must be plain data with finite Python numbers: "),
    "details that raise": ({"details": fails}, "details() failed: ValueError: not today ("),
    "details that are not finite": ({"details": gives({"tables": [], "worst": float("nan")})},
        "details() must be plain data with finite Python numbers: "),
    "a chart": ({"details": gives({"charts": [{"title": "a", "x": "b", "y": "c"}]})},
        "details(): an entry of charts lacks series"),
    "a metric of details": ({"details": gives({"metrics": {"r2": 0.5}})},
        "directions: details() measures 'r2'"),
    "a metric of slices": ({"tally": gives(Other())},
        "directions: tally() measures 'absolut', which has no direction; did you mean 'absolute'?"),
}  # fmt: skip


def test_the_plainest_task_keeps_it():
    require_task(Numbers(NUMBER), {})


@pytest.mark.slow
@pytest.mark.parametrize("case", BROKEN)
def test_what_is_not_kept_is_said_in_one_line(case):
    attributes, words = BROKEN[case]
    broken = type("Broken", (Numbers,), {**attributes, "__module__": __name__})
    with pytest.raises(ConfigError) as caught:
        require_task(broken(NUMBER), {})
    assert str(caught.value).startswith(f"task {__name__}:Broken: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


class Undrawn(Numbers):
    details = fails


def fitted_task(name, folder):
    tree = {"task": {"name": f"{__name__}:{name}"}, "training": {"strategy": "single"}}
    return dry_run.fit(parse_config({**tree, "gate": {"min": {}}}), folder)


def test_a_dry_run_tries_a_task_of_the_users(tmp_path):
    assert fitted_task("Numbers", tmp_path).task == "numbers"
    with pytest.raises(
        ConfigError, match=r":Undrawn: details\(\) failed: ValueError: not today \("
    ):
        fitted_task("Undrawn", tmp_path)


def test_one_of_several_outputs_is_named():
    broken = type("Broken", (Numbers,), {"details": fails, "__module__": __name__})
    task = MultiOutput({"price": broken(NUMBER), "days": Regression(NUMBER)}, {})
    with pytest.raises(ConfigError, match=r"^task.outputs.price \S+:Broken: details\(\) failed: "):
        require_task(task, {})


def test_tasks_built_in_are_left_to_their_tests():
    task = Regression(NUMBER)
    task.details = fails
    require_task(task, {})


def test_labels_are_within_what_is_known_of_them():
    found = task_contract._labels(TARGETS["regression"], np.random.default_rng(0))
    assert found.dtype == np.int32
    assert found.min() >= -5
    assert found.max() <= 9

"""Losses and metrics by name: Keras's own, and the user's."""

from __future__ import annotations

import sys
import textwrap

import keras
import pytest
import tensorflow as tf

from tests.trainer.tasks.test_compiled import accepted, measured, net
from trainer.errors import ConfigError
from trainer.tasks import named

LABELS, OUTPUTS = keras.KerasTensor((None,), "int64"), keras.KerasTensor((None, 3))
OWN = """
import keras

def third(labels, outputs):
    return keras.ops.mean(keras.ops.abs(outputs), -1) / 3

def made():
    return keras.metrics.SparseTopKCategoricalAccuracy(2, name="in_two")

class Kept(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean(y_pred ** 2, -1)

NUMBER = 3

def broken():
    raise ValueError("no such file")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_named.py").write_text(textwrap.dedent(OWN))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_named", raising=False)
    yield
    sys.modules.pop("own_named", None)


@pytest.mark.parametrize(
    ("name", "reported", "direction"),
    [
        ("accuracy", "accuracy", "higher"),
        ("AUC", "auc", "higher"),
        ("mae", "mae", "lower"),
        ("mean_absolute_error", "mean_absolute_error", "lower"),
        ("RootMeanSquaredError", "root_mean_squared_error", "lower"),
        ("r2_score", "r2_score", "higher"),
        ("sparse_categorical_crossentropy", "sparse_categorical_crossentropy", "lower"),
        ("false_positives", "false_positives", None),
        ("cosine_similarity", "cosine_similarity", "higher"),
        ("kl_divergence", "kl_divergence", "lower"),
    ],
)
def test_a_metric_of_keras_has_its_name_and_direction(name, reported, direction):
    found = named.metric(name, "task.metrics", LABELS, OUTPUTS)
    assert (found.name, named.direction_of(found)) == (reported, direction)


@pytest.mark.usefixtures("own")
def test_metrics_and_losses_of_the_users_own():
    function = named.metric("own_named:third", "task.metrics", LABELS, OUTPUTS)
    assert (function.name, named.direction_of(function)) == ("third", None)
    assert named.metric("own_named:made", "task.metrics", LABELS, OUTPUTS).name == "in_two"
    assert isinstance(named.loss("own_named:Kept", "task.loss", logits=True), keras.losses.Loss)
    model = net()
    found = measured(accepted(model, loss="own_named:third", metrics=["own_named:made"]), model)
    assert found["in_two"] >= found["accuracy"]


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("acuracy", "task.metrics: no metric 'acuracy'; did you mean 'accuracy'?"),
        ("xyzzy", "task.metrics: no metric 'xyzzy' (a name of keras.metrics, or package.module:"),
        ("Mean", "task.metrics: no metric 'Mean'"),
        ("MeanIoU", "task.metrics: MeanIoU cannot be made without arguments: TypeError: "),
        ("own_named:thrid", "task.metrics: own_named has no metric 'thrid'; did you mean 'third'?"),
        ("own_named:NUMBER", "task.metrics: own_named:NUMBER is a int, not a metric"),
        ("own_named:broken", "task.metrics: own_named:broken cannot be made without arguments: "),
        ("no_such:thing", "task.metrics: no_such:thing: cannot import no_such: "),
    ],
)
def test_another_metric_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError) as error:
        accepted(net(), metrics=[name])
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mean_sqared_error", "task.loss: no loss 'mean_sqared_error'; did you mean 'mean_squared"),
        ("own_named:NUMBER", "task.loss: own_named:NUMBER is a int, not a loss"),
    ],
)
def test_another_loss_is_refused_in_one_line(name, message):
    with pytest.raises(ConfigError) as error:
        accepted(net(), loss=name)
    assert str(error.value).startswith(message)


def test_a_metric_that_does_not_fit_the_labels_is_refused():
    with pytest.raises(ConfigError) as error:
        accepted(net(), metrics=["mean_squared_error"])
    assert str(error.value).startswith("its metrics do not fit labels and outputs: Invalid")
    assert "\n" not in str(error.value)


def test_a_further_metric_takes_predictions():
    model = net()
    objective = accepted(model, metrics=["sparse_categorical_crossentropy"])
    found = measured(objective, model)
    assert found["sparse_categorical_crossentropy"] == pytest.approx(found["loss"], rel=1e-5)
    assert objective.directions["sparse_categorical_crossentropy"] == "lower"


def test_variables_without_values_get_none_when_another_scope_ends():
    made = []

    def create(next_creator, **kwargs):
        made.append(kwargs["name"])
        return next_creator(**kwargs)

    with named.without_values():
        keras.metrics.Mean().update_state([1.0])
    with tf.variable_creator_scope(create), keras.StatelessScope():
        pass
    assert made == []

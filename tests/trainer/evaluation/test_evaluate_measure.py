"""Loss and accuracy of a model while it is trained."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer import small_run
from tests.trainer.objectives import of_classes
from trainer import storage
from trainer.errors import UserError
from trainer.evaluation import evaluate as evaluation


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run.small_run(tmp_path_factory.mktemp("run"))


def _batches(run, size=10):
    return tf.data.Dataset.from_tensor_slices((run.images, run.labels)).batch(size)


def measure(model, batches):
    return measurer(model)(batches)


def measurer(model):
    """Return a function from batches to the loss and the metrics of a model as it is then."""
    objective = of_classes(small_run.CLASSES)
    objective.attach(model)
    return lambda batches: objective.means(objective.totals(model, batches).numpy())


def test_measure_agrees_with_the_evaluation(run, tmp_path):
    output = storage.uri_of(tmp_path / "evaluation")
    whole = evaluation.evaluate(run.config, run.dataset, run.checkpoint, output, tmp_path)
    measured = measure(run.model, _batches(run))
    expected = {name: whole.metrics[name] for name in ("loss", "accuracy")}
    assert measured == pytest.approx(expected, rel=1e-5)
    assert {type(value) for value in measured.values()} == {float}


@pytest.mark.slow
def test_measure_weighs_the_last_batch_by_its_examples(run):
    by_one, by_all = (measure(run.model, _batches(run, size)) for size in (1, 96))
    assert by_one == pytest.approx(by_all, rel=1e-5)


def test_a_measurer_reads_the_weights_as_they_are(run):
    model = small_run.template_model(run.config, *small_run.digits())
    measured = measurer(model)
    before = measured(_batches(run))
    model.variables[0].assign(np.zeros((64, 10), np.float32))
    model.variables[1].assign(np.zeros(10, np.float32))
    assert measured(_batches(run))["loss"] == pytest.approx(np.log(10)) != before["loss"]


def test_measure_switches_dropout_off(run):
    dropout = keras.Sequential([keras.layers.Dropout(0.9), run.model])
    expected = measure(run.model, _batches(run))
    assert measure(dropout, _batches(run)) == pytest.approx(expected)


def test_measure_gives_a_loss_that_is_not_finite_as_it_is(run):
    model = small_run.template_model(run.config, *small_run.digits())
    model.variables[1].assign(np.full(10, np.nan, np.float32))
    assert np.isnan(measure(model, _batches(run))["loss"])


def test_measure_refuses_no_examples(run):
    with pytest.raises(UserError, match="no examples"):
        measure(run.model, _batches(run).take(0))


def test_measure_takes_labels_of_any_whole_type(run):
    for dtype in ("uint8", "int32"):
        batches = tf.data.Dataset.from_tensor_slices((run.images, run.labels.astype(dtype)))
        assert measure(run.model, batches.batch(50))["accuracy"] > 0.5

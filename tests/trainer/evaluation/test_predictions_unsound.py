"""Examples that no metric can be made of: one line each, and no file is left open."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.tasks.measuring import target
from trainer.data.spec import DatasetSpec, FeatureSpec
from trainer.evaluation.predictions import Writer, measured, predict
from trainer.tasks.base import SplitError
from trainer.tasks.binary_classification import BinaryClassification
from trainer.tasks.classification import Classification
from trainer.tasks.multi_output import MultiOutput
from trainer.tasks.multilabel_classification import MultilabelClassification
from trainer.tasks.objective import Objective
from trainer.tasks.regression import Regression
from trainer.tasks.sequences import SequenceLabelling

SPEC = DatasetSpec(
    features={
        "x": FeatureSpec(shape=(), dtype="float32", stored="float"),
        "w": FeatureSpec(shape=(), dtype="float32", stored="float"),
    },
    inputs=("x",),
    targets=("label",),
    weight="w",
    shards={},
)
THREE = Classification(target([0, 1, 2], num_classes=3))
NUMBER = Regression(target([0.0, 2.0]))
BOTH = MultiOutput({"kind": THREE, "size": NUMBER}, {"kind": 1.0, "size": 1.0})


def model_of(*shape):
    """Return a model that answers the input at every place of its output."""
    given = keras.Input(())
    ones = keras.layers.Reshape((1,) * len(shape))(given)
    return keras.Model(given, keras.layers.Lambda(lambda x: x * tf.ones(shape))(ones))


def predicted(task, model, tmp_path, labels, **given):
    count = len(tf.nest.flatten(labels)[0])
    inputs, weights = (
        np.asarray(given.get(name, [1] * count), np.float32) for name in ("x", "weights")
    )
    batches = tf.data.Dataset.from_tensor_slices(((inputs, labels, weights), {})).batch(2)
    with closing(Writer(tmp_path / "predictions", tmp_path / "columns", count)) as writer:
        return predict(Objective(task), model, SPEC, batches, writer)


def refusal(task, model, tmp_path, labels, **given):
    with pytest.raises(SplitError) as caught:
        predicted(task, model, tmp_path, labels, **given)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("task", "labels", "wanted"),
    [
        (THREE, np.array([0, 1, 3]), "the label 3, outside of 0 to 2; correct its builder"),
        (
            BinaryClassification(target([0, 1])),
            np.array([0, 1, 2]),
            "the label 2, which is neither 0 nor 1; correct its builder",
        ),
        (
            MultilabelClassification(target([[0, 1], [1, 0]])),
            np.array([[0, 1], [1, 1], [-1, 0]]),
            "the label -1, which is neither 0 nor 1; correct its builder",
        ),
        (
            NUMBER,
            np.array([0.5, 1.0, np.nan]),
            "the label nan, which is no finite number; correct its builder",
        ),
        (
            SequenceLabelling(target([[0, 1], [1, -1]], num_classes=2)),
            np.array([[0, 1], [-1, -1], [0, 2]]),
            "the label 2, outside of 0 to 1; correct its builder",
        ),
    ],
)
def test_a_label_that_the_task_does_not_know_is_refused(task, labels, wanted, tmp_path):
    assert refusal(task, model_of(*task.output_shape), tmp_path, labels) == wanted


def both():
    given = keras.Input(())
    kind, size = (model_of(n)(given) for n in (3, 1))
    return keras.Model(given, {"kind": kind, "size": size})


def test_of_several_outputs_the_one_with_the_label_is_named(tmp_path):
    labels = {"kind": np.array([0, 1]), "size": np.array([0.0, np.inf])}
    assert refusal(BOTH, both(), tmp_path, labels) == (
        "for the output 'size' the label inf, which is no finite number; correct its builder"
    )


def test_an_example_of_which_one_output_is_no_number_is_counted(tmp_path):
    labels = {"kind": np.array([0, 1, 2]), "size": np.zeros(3)}
    found = predicted(BOTH, both(), tmp_path, labels, x=[1, np.nan, 2])
    assert found.unsound == (1, 0)


def test_examples_that_all_weigh_nothing_are_refused(tmp_path):
    text = refusal(THREE, model_of(3), tmp_path, np.array([0, 1, 2]), weights=[0, 0, 0])
    assert text == "no example that weighs anything: 'w' of each is 0"
    found = predicted(THREE, model_of(3), tmp_path, np.array([0, 1, 2]), weights=[0, 0, 1])
    assert found.own.count == 3


def test_files_are_closed_where_an_example_is_refused(tmp_path):
    refusal(THREE, model_of(3), tmp_path, np.array([0, 1, 0, 3]))
    written = {*tmp_path.rglob("*.npy")}
    assert written
    assert not written & {link.resolve() for link in Path("/proc/self/fd").iterdir()}


def test_one_class_alone_has_areas_that_are_not_defined(tmp_path):
    task = BinaryClassification(target([0, 1]))
    found = predicted(task, model_of(1), tmp_path, np.zeros(3, int))
    metrics = measured(Objective(task), found.own)["metrics"]
    assert metrics["auc"] is metrics["pr_auc"] is None
    assert metrics["accuracy"] == 0


def test_sequences_that_are_all_padding_have_a_loss_and_no_accuracy(tmp_path):
    task = SequenceLabelling(target([[0, 1], [1, -1]], num_classes=2))
    found = predicted(task, model_of(2, 2), tmp_path, np.full((3, 2), -1))
    metrics = measured(Objective(task), found.own)["metrics"]
    assert metrics["accuracy"] is metrics["macro_f1"] is None
    assert metrics["loss"] == 0

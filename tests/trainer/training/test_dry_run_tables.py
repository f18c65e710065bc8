"""Tests which tables a configuration and a model reject, given the first rows or all rows."""

import sys
from dataclasses import replace

import pytest

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.training import dry_run
from tests.trainer.training import own_models
from tests.trainer.training.test_dry_run import SAVED_ALONE, SPEC


@pytest.fixture(autouse=True)
def _own_models(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_models", own_models)


def churn(*labels, **features):
    """Return a dataset of a table whose label has these classes in the first rows."""
    number = FeatureSpec(shape=(), dtype="float32", stored="float")
    label = replace(SPEC.features["label"], num_classes=len(labels), labels=labels)
    inputs = {"age": number, **features}
    return DatasetSpec(
        features={**inputs, "churn": label},
        inputs=tuple(inputs),
        targets=("churn",),
        shards={},
        target_counts={"churn": {"train": [1] * len(labels)}},
        target_moments={"churn": {"min": 0.0, "max": 0.0, "mean": 0.0, "std": 0.0}},
    )


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Return a function that returns the error for a dataset and a configuration, or ""."""

    def said(dataset, tree, *, whole=False, tries=False):
        if not tries:
            monkeypatch.setattr(dry_run, "_try_out", lambda *_: None)
        monkeypatch.setattr(dry_run, "find_dataset", lambda *_: dataset)
        training = {"strategy": "single", **tree.pop("training", {})}
        config = parse_config({"model": {"name": "tabular"}, **tree, "training": training})
        try:
            dry_run.fit(config, tmp_path, whole=whole)
        except ConfigError as error:
            return str(error)
        return ""

    return said


@pytest.mark.parametrize(
    ("labels", "tree", "whole_said"),
    [
        (("no",), {}, "task classification: all examples of the split 'train' have the same"),
        (("no",), {"task": {"positive": "yes"}}, "task.positive: "),
        (("no", "yes"), {"gate": {"min": {"macro_f1": 0.1}}}, "gate.min.macro_f1: "),
        (("no", "yes"), {"gate": {"min": {"accuracy@churn=maybe": 0.1}}},
         "gate.min.accuracy@churn=maybe: 'churn' has no class 'maybe'; did you mean 'yes'?"),
        (("a", "b", "c"), {"training": {"class_weights": {"d": 2.0}}},
         "training.class_weights: there is no class 'd'"),
        (("a", "b", "c"), {"training": {"class_weights": "balanced"}}, ""),
        (("a", "b", "c"), {"model": {"name": "own_models:seven"}},
         "model own_models:seven: the output must be floats of shape (batch, 3) for class"),
    ],
)  # fmt: skip
def test_classes_that_first_rows_do_not_have_are_no_reason(refused, labels, tree, whole_said):
    assert refused(churn(*labels), dict(tree)) == ""
    assert refused(churn(*labels), dict(tree), whole=True).startswith(whole_said)


@pytest.mark.parametrize(
    ("labels", "tree"),
    [
        (("1", "2"), {"task": {"name": "regression"}}),
        (("0",), {"gate": {"max": {"mean_absolute_error": 1.0}}}),
    ],
)
def test_classes_that_are_whole_numbers_may_be_a_quantity(refused, labels, tree):
    tree["data"] = {"source": "t.csv"}
    assert refused(churn(*labels), dict(tree)) == ""
    assert refused(churn(*labels), dict(tree), whole=True)
    assert refused(churn("no", "yes"), dict(tree))
    tree["data"] = {"source": "t.csv", "types": {"churn": "class"}}
    assert refused(churn(*labels), dict(tree))


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"task": {"positive": "maybe"}}, "task.positive: 'churn' has no class 'maybe'; did you "),
        ({"gate": {"min": {"macro_f2": 0.1}}}, "gate.min.macro_f2: binary_classification and "),
        ({"gate": {"min": {"pr_auc": 0.1}}}, "gate.min.pr_auc: binary_classification and the "),
        ({"gate": {"champion": {"metric": "f1", "better": "lower"}}},
         "gate.champion.better: f1 is better when higher; leave the key out"),
        ({"evaluation": {"slices": ["aeg"]}},
         "evaluation.slices: 'aeg' is not a feature of the da"),
        ({"training": {"optimizer": {"args": {"beta": 1}}}}, "training.optimizer.args.beta: "),
        ({"training": {"strategy": "own_models:net"}}, "training.strategy: 'own_models:net' is"),
        ({"data": {"buckets": [4]}}, "data.buckets: no input or label varies in length; "),
        ({"model": {"name": "own_models:leaves"}}, "model own_models:leaves: SystemExit: 3 ("),
        ({"model": {"name": "own_models:seven"}, "task": {"name": "binary_classification"}},
         "model own_models:seven: the output must be floats of shape (batch, 1) for binary_"),
        ({"model": {"name": "own_models:chance"}, **SAVED_ALONE},
         "export.formats: after saving as saved_model and loading again, predictions differ by "),
        ({"task": {"name": "own_models:Failing"}},
         "task own_models:Failing failed: ValueError: not today ("),
        ({"task": {"name": "own_models:Asking"}},
         "task.args: own_models:Asking needs 'scale' (it takes scale) ("),
        ({"model": {"name": "own_models:certain"}},
         "model own_models:certain: the last layer is a"),
        ({"model": {"name": "own_models:choice"}},
         "model own_models:choice does not accept the dataset's input of shape () and type "
         "float32: OperatorNotAllowedInGraphError: Using a symbolic `tf.Tensor` as a Python"),
        ({"model": {"name": "own_models:table"}, **SAVED_ALONE},
         "export.formats: the model cannot be saved as saved_model and loaded again: it uses"),
        ({"model": {"name": "own_models:python", "args": {"units": 1}}, **SAVED_ALONE},
         "export.formats: the model calls Python through tf.py_function or "
         "tf.numpy_function, which"),
    ],
)  # fmt: skip
# Keras warns about a softmax over an axis of length 1.
@pytest.mark.filterwarnings("ignore:You are using a softmax over axis -1")
def test_what_no_further_rows_can_change_is_refused_by_first_ones(refused, tree, said):
    tries = "export" in tree
    assert refused(churn("no", "yes"), tree, tries=tries).startswith(said)


def test_of_several_readings_the_one_that_fits_best_says_what_is_wrong(refused):
    tree = {"gate": {"min": {"accuracy@churn=maybe": 0.1, "recall": 0.1}}}
    # The first rows lack the class "maybe".
    assert refused(churn("no"), tree).startswith("gate.min.recall: classification and the model")


@pytest.mark.parametrize(
    ("name", "shape", "stored"), [("tabular", (), "bytes"), ("sequence", (None,), "sequence")]
)
def test_texts_are_refused_for_tensorflow_lite(refused, name, shape, stored):
    city = FeatureSpec(shape=shape, dtype="string", stored=stored)
    tree = {"model": {"name": name}, "export": {"formats": ["saved_model", "tflite"]}}
    assert refused(churn("no", "yes", city=city), tree) == (
        "export.formats: TensorFlow Lite does not support string operations, which "
        "city_vocabulary needs to look up known texts; remove tflite, or drop the column"
    )

"""Tests that the threshold maximizes F1 on the validation split."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as scores

from flotilla.trainer import storage
from flotilla.trainer.config.schema import TaskConfig
from flotilla.trainer.evaluation.threshold import best, read_thresholds
from flotilla.trainer.prediction.exported_model import fetch_model
from flotilla.trainer.prediction.output import make_columns as answers_columns
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.evaluation.two_classes import TwoClasses, source
from tests.trainer.small_run import publish_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

EXAMPLES = st.lists(
    st.tuples(
        st.booleans(),
        st.sampled_from([0.0, 1e-30, 0.2, 0.20000002, 0.5, 0.7, 0.99999994, 1.0]),
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
    ),
    max_size=12,
)


def columns(examples):
    positive, sure, weights = zip(*examples, strict=True) if examples else ((), (), ())
    return np.array(positive, bool), np.array(sure, np.float32), np.array(weights, np.float64)


@given(EXAMPLES)
@settings(max_examples=60, deadline=None)
def test_no_other_threshold_that_tells_examples_apart_has_a_larger_f1(examples):
    positive, sure, weights = columns(examples)
    found = best(positive, sure, weights)
    kept = weights > 0
    others = np.unique(sure[kept])[:-1]
    if not len(others) or not weights[positive].sum():
        assert found is None
        return

    def f1(threshold):
        taken = sure > np.float32(threshold)
        return scores.f1_score(positive, taken, sample_weight=weights, zero_division=0)

    assert f1(found) == pytest.approx(max(map(f1, others)))
    # Even in single precision, the threshold separates the examples.
    assert 0 < (sure[kept] > np.float32(found)).sum() < kept.sum()


@pytest.mark.parametrize(
    ("examples", "expected"),
    [
        # The threshold is halfway between the classes if they are separable.
        ([(True, 0.75, 1), (False, 0.25, 1)], 0.5),
        # Of several best thresholds, the one closest to 0.5 is chosen.
        ([(True, 0.9, 1), (True, 0.7, 0), (False, 0.1, 1)], 0.5),
        # Cases: inverted scores, equal scores, no positive example, no weight, no example.
        ([(False, 0.75, 1), (True, 0.5, 1), (False, 0.25, 1)], 0.375),
        ([(True, 0.3, 1), (False, 0.3, 1)], None),
        ([(False, 0.3, 1), (False, 0.4, 1)], None),
        ([(True, 0.3, 0), (False, 0.4, 0)], None),
        ([], None),
        # Examples without a finite score are ignored.
        ([(True, np.nan, 1), (True, 0.75, 1), (False, 0.25, 1)], 0.5),
        # There is no number between these two in single precision.
        ([(True, 0.20000002, 1), (False, 0.2, 1)], pytest.approx(0.2)),
    ],
)
def test_what_is_chosen(examples, expected):
    assert best(*columns(examples)) == expected


def test_a_model_of_before_decides_at_one_half():
    assert read_thresholds({}, [""])[""].value == 0.5
    assert read_thresholds({"threshold": 0.25}, [""])[""].value == 0.25
    found = read_thresholds({"threshold": {"a": 0.25}}, ["a", "b"])
    assert {name: each.value for name, each in found.items()} == {"a": 0.25, "b": 0.5}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    root = tmp_path_factory.mktemp("leavers")
    return TwoClasses.of(root, source(root / "files"))


@pytest.fixture(scope="module")
def measured(run):
    return run.evaluation(run.checkpoint())


def columns_of(uri):
    folder = Path(storage.local_path(uri), "predictions")
    return [np.load(folder / f"{name}.npy").ravel() for name in ("label", "output", "weight")]


def test_metrics_are_of_the_rarer_class_at_the_threshold_of_validation(measured):
    uri, found = measured
    positive, logits, weights = columns_of(uri)
    threshold = found["threshold"]
    assert (found["task"], found["positive"]) == ("binary_classification", "leaves")
    assert (threshold["chosen_on"], found["labels"]) == ("validation", ["stays", "leaves"])
    sure = 1 / (1 + np.exp(-logits.astype(np.float64)))
    taken, given = sure > threshold["value"], {"sample_weight": weights}
    assert found["metrics"] == pytest.approx(
        found["metrics"]
        | {
            "accuracy": scores.accuracy_score(positive, taken, **given),
            "precision": scores.precision_score(positive, taken, **given),
            "recall": scores.recall_score(positive, taken, **given),
            "f1": scores.f1_score(positive, taken, **given),
            "auc": scores.roc_auc_score(positive, sure, **given),
            "average_precision": scores.average_precision_score(positive, sure, **given),
            "brier_score": scores.brier_score_loss(positive, sure, **given),
            "log_loss": scores.log_loss(positive, sure, **given),
        },
        abs=1e-6,
    )
    matrix = scores.confusion_matrix(positive, taken, **given)
    np.testing.assert_allclose(found["confusion_matrix"], matrix)
    assert threshold["value"] != 0.5
    assert {row["value"] for row in found["slices"]["status"]} == {"stays", "leaves"}
    [own] = [row for row in found["slices"]["status"] if row["value"] == "leaves"]
    assert own["metrics"]["accuracy"] == pytest.approx(found["metrics"]["recall"], abs=1e-6)
    assert sum(each["examples"] for each in found["calibration"]) == pytest.approx(weights.sum())


def test_the_other_class_may_be_positive(run, measured, tmp_path):
    other = replace(run, root=tmp_path, config=with_task(run, positive="Stays "))
    with pytest.raises(UserError, match=r"has no class 'Stays '; did you mean 'stays'\?"):
        other.checkpoint()
    other = replace(other, config=with_task(run, positive=" stays"))
    _, found = other.evaluation(other.checkpoint(-1.0))
    assert (found["positive"], found["labels"]) == ("stays", ["leaves", "stays"])
    assert found["metrics"]["auc"] == pytest.approx(measured[1]["metrics"]["auc"], abs=1e-6)
    with pytest.raises(UserError, match=r"was trained for the positive class 'leaves', but"):
        other.evaluation(run.checkpoint())


def with_task(run, **keys):
    return run.config.model_copy(update={"task": TaskConfig(**keys)})


@pytest.fixture(scope="module")
def model(run):
    return run.model(run.checkpoint())


def test_a_model_takes_its_threshold_and_its_positive_class_with_it(run, measured, model):
    fields = storage.read_manifest(model).fields
    threshold = measured[1]["threshold"]["value"]
    assert (fields["positive"], fields["threshold"]) == ("leaves", threshold)
    card = storage.read_file(model, "model_card.md").decode()
    assert f"`probability` is that of leaves, which is predicted above {threshold:.6g}." in card
    exported = fetch_model(model, run.root / "fetched")
    answers = exported.ask({"calls": np.linspace(-3, 6, 50, dtype=np.float32)})
    found = answers_columns(exported, answers, None)["prediction"].to_pylist()
    taken = answers["probability"] > threshold
    assert found == ["leaves" if each else "stays" for each in taken]
    assert (answers["probability"] > 0.5).sum() != taken.sum() != 0


def test_a_champion_is_measured_at_its_own_threshold(run, measured, model):
    _, found = run.evaluation(run.checkpoint(0.25), model)
    champion = found["champion"]["metrics"]
    assert found["threshold"]["value"] != measured[1]["threshold"]["value"]
    assert champion == pytest.approx(measured[1]["metrics"], abs=1e-5)


@pytest.mark.slow
def test_a_champion_of_the_other_class_is_compared_by_this_one(run, model, measured, tmp_path):
    other = replace(run, root=tmp_path, config=with_task(run, positive="stays"))
    _, found = other.evaluation(other.checkpoint(-1.0), model)
    assert found["champion"]["incomparable"] == ""
    mine = measured[1]["metrics"]
    assert found["champion"]["metrics"]["auc"] == pytest.approx(mine["auc"], abs=1e-6)
    assert found["champion"]["metrics"]["accuracy"] == pytest.approx(mine["accuracy"], abs=1e-6)
    assert found["champion"]["metrics"]["loss"] == pytest.approx(mine["loss"], abs=1e-6)


@pytest.mark.slow
def test_a_champion_of_before_with_two_logits_is_compared(run, measured, tmp_path):
    before = replace(run, root=tmp_path, config=with_task(run, name="classification"))
    champion = before.model_of_before([[[1.0, 0.0]], [-1.5, 0.0]])
    assert storage.read_file(champion, "labels.txt") == b"leaves\nstays"
    _, found = run.evaluation(run.checkpoint(), champion)
    # The champion gives equal outputs but uses the threshold 0.5, so only these metrics agree.
    mine, theirs = measured[1]["metrics"], found["champion"]["metrics"]
    assert {name: theirs[name] for name in ("auc", "log_loss")} == pytest.approx(
        {name: mine[name] for name in ("auc", "log_loss")}, abs=1e-5
    )
    assert theirs["accuracy"] != mine["accuracy"]


def test_a_checkpoint_of_before_with_two_logits_says_what_to_set(run, tmp_path):
    before = replace(run, root=tmp_path, config=with_task(run, name="classification"))
    checkpoint = publish_checkpoint(tmp_path / "checkpoints", before.built()[2])
    with pytest.raises(
        UserError, match=r"set task\.name: classification, because the checkpoint has one logit"
    ):
        run.evaluation(checkpoint)

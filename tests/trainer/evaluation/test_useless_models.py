"""Tests that useless models are refused with a reason and weak but useful ones are blessed.

Each test passes a model's predictions through the real evaluation and the real gate.
"""

import json

import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.evaluation.baselines import is_beaten
from flotilla.trainer.evaluation.champion import Champion, compare_champion
from flotilla.trainer.evaluation.evaluate import summarize_predictions
from flotilla.trainer.evaluation.predictions import Predictions, unsound
from flotilla.trainer.promotion import gate
from flotilla.trainer.report.headline import CLASS_MARGIN, CONSTANT, MARGIN
from flotilla.trainer.tasks.base import Part, Task, Whole
from flotilla.trainer.tasks.classification import (
    BinaryClassification,
    Classification,
    MultilabelClassification,
)
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.ranking import Ranking
from flotilla.trainer.tasks.recommendation import Recommendation
from flotilla.trainer.tasks.regression import Regression
from flotilla.trainer.tasks.sequences import SequenceLabelling
from tests.trainer.tasks.measuring import target

DRAW = np.random.default_rng(17)
COUNT, RARE_COUNT = 1200, 5600
YES = (DRAW.random(COUNT) < 0.4).astype("int64")
# 57 of 5600 examples (1 %) are positive. A test split like this is a fifth of 28,000 rows.
RARE = np.zeros(RARE_COUNT, "int64")
RARE[DRAW.permutation(RARE_COUNT)[:57]] = 1
CLASS = DRAW.choice(4, COUNT, p=[0.4, 0.3, 0.2, 0.1])
ROWS = (DRAW.random((COUNT, 3)) < [0.6, 0.3, 0.1]).astype("int64")
SIZES = DRAW.gamma(2, 10, COUNT).astype("float32")
PLACES = np.where(DRAW.random((COUNT, 6)) < 0.2, -1, DRAW.integers(0, 3, (COUNT, 6)))
QUERIES = np.repeat(np.arange(COUNT // 8), 8)
USERS, ITEMS = DRAW.integers(0, 100, COUNT), DRAW.integers(0, 40, COUNT)
# Some items are popular with most users, and each user has individual preferences.
LIKED = DRAW.normal(size=40)
TASTE = DRAW.normal(size=(100, 40))
TAKEN = (LIKED[ITEMS] + TASTE[USERS, ITEMS] > 0.5).astype("int64")


class OwnTask(Regression):
    """A user's task that defines no best constant."""

    constants = Task.constants


def noise(*shape, count=COUNT):
    return np.random.default_rng(3).normal(size=(count, *shape)).astype("float32")


def one_hot(classes, count):
    return np.eye(count, dtype="float32")[classes]


def logits(labels, strength, centre=0.0):
    """Return logits whose means differ by `strength` standard deviations between the labels."""
    found = centre + noise(count=len(labels)) + strength * labels
    return found[:, np.newaxis].astype("float32")


BINARY = BinaryClassification(target(YES, num_classes=2))
OF_RARE = BinaryClassification(target(RARE, num_classes=2))
CLASSES = Classification(target(CLASS, num_classes=4))
NUMBERS = Regression(target(SIZES))


def recommender():
    task = Recommendation(target(TAKEN, num_classes=2), group="user", item="item", k=[5])
    items = np.repeat(np.arange(40), 200)
    taken = (LIKED[items] + np.random.default_rng(4).normal(size=8000) > 0.5).astype("int64")
    task.learn([{"item": items, task.target.name: taken}])
    return task


def decided(folder, task, labels, outputs, *, champion=None, columns=None, **rules):  # noqa: PLR0913
    config = parse_config({"gate": rules})
    objective = Objective(task)
    own, other = (
        None if given is None else Whole(Part(labels, given, None, columns or {}))
        for given in (outputs, champion)
    )
    bad = tuple(0 if each is None else unsound(each) for each in (outputs, champion))
    found = Predictions(own=own, champion=other, unsound=bad, worst=None)
    summary = summarize_predictions(None, objective, found, ())
    if champion is not None:
        there = Champion(uri="file:///champion", answer=None, incomparable="")
        summary["champion"] = compare_champion(there, objective, found, config.gate.champion)
        beaten = is_beaten(summary["constant"], summary["champion"]["metrics"])
        summary["constant"]["champion"] = beaten
    (folder / "measured").mkdir()
    (folder / "measured" / "metrics.json").write_text(json.dumps(summary))
    evaluation = storage.uri_of(folder / "evaluation")
    storage.publish(folder / "measured", evaluation, kind="evaluation")
    return gate.check(config, evaluation, storage.uri_of(folder / "decision"))


def fitted_to_noise(labels):
    """Return logits for new rows from a model that memorized random labels of its training rows."""
    generator = np.random.default_rng(8)
    inputs = generator.normal(size=(2, len(labels), 40))
    weights, *_ = np.linalg.lstsq(inputs[0], generator.permutation(labels) - labels.mean())
    return (inputs[1] @ weights)[:, np.newaxis].astype("float32")


USELESS = {
    "the most frequent class, rarely another": (
        CLASSES, CLASS, one_hot(np.where(np.arange(COUNT) % 50, 0, 2), 4),
    ),
    "never the rare class": (OF_RARE, RARE, np.full((RARE_COUNT, 1), -5, "float32")),
    "inverted labels": (BINARY, YES, -logits(YES, 2)),
    "trained on noise": (OF_RARE, RARE, fitted_to_noise(RARE)),
    "probabilities all 0.5": (BINARY, YES, np.zeros((COUNT, 1), "float32")),
    "shifted by one row, of numbers": (NUMBERS, SIZES, np.roll(SIZES, 1)[:, np.newaxis]),
    "the mean only": (NUMBERS, SIZES, np.full((COUNT, 1), SIZES.mean())),
    "the median and a little noise": (NUMBERS, SIZES, np.median(SIZES) + noise(1) / 10),
    "the shares of a row of classes": (
        MultilabelClassification(target(ROWS)), ROWS, np.log([[1.5, 0.43, 0.11]]) + noise(3) / 10,
    ),
    "classes of places at random": (
        SequenceLabelling(target(PLACES, num_classes=3)), PLACES, noise(6, 3),
    ),
    "a task of the user's, the mean": (OwnTask(target(SIZES)), SIZES, 30 + noise(1) / 100),
    "scores at random": (
        Ranking(target(YES, num_classes=2), group="query"), YES, noise(1), {"query": QUERIES},
    ),
    "popularity only": (
        recommender(), TAKEN,
        np.stack([LIKED[ITEMS], np.ones(COUNT), LIKED[ITEMS]], axis=1).astype("float32"),
        {"user": USERS, "item": ITEMS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USELESS)
def test_what_finds_nothing_is_refused_for_it_does_not_beat_a_constant(tmp_path, name):
    task, labels, outputs, *columns = USELESS[name]
    decision = decided(tmp_path, task, labels, np.float32(outputs), columns=dict(*columns))
    assert not decision.blessed
    [rule] = decision.rules
    assert rule.key == CONSTANT
    assert "a constant" in decision.reasons[0]


def test_a_main_metric_that_the_examples_do_not_define_passes_nothing(tmp_path):
    outputs = logits(YES, 2)
    decision = decided(tmp_path, BINARY, np.zeros_like(YES), outputs, min={"accuracy": 0.1})
    assert [rule.key for rule in decision.rules if not rule.passed] == [CONSTANT]
    assert decision.reasons == (
        "AUC cannot be compared with a constant on these examples (gate.constant).",
    )


def test_the_share_of_the_largest_class_is_the_same_number_as_that_of_the_constant(tmp_path):
    outputs = np.tile(np.float32([5, 0, 0, 0]), (COUNT, 1))
    decision = decided(tmp_path, CLASSES, CLASS, outputs)
    assert not decision.blessed
    assert decision.measured["value"] == decision.measured["constant"]


# Scores of a recommender that knows each user's preferences with as much noise as signal.
GUESSED = TASTE + np.random.default_rng(6).normal(size=TASTE.shape)
WELL_KNOWN = LIKED[ITEMS] + GUESSED[USERS, ITEMS] / 2
# Eight of the 57 positives are found, and all other examples are ranked at random.
FEW_FOUND = 9 * (RARE * (np.cumsum(RARE) <= 8))[:, np.newaxis] + noise(1, count=RARE_COUNT)
USEFUL = {
    "a rare class, weakly": (OF_RARE, RARE, logits(RARE, 0.8, -5)),
    "a rare class, a few at the top": (OF_RARE, RARE, FEW_FOUND),
    "a frequent class, weakly": (BINARY, YES, logits(YES, 0.25)),
    "classes": (CLASSES, CLASS, 0.7 * one_hot(CLASS, 4) + noise(4) + np.log([4, 3, 2, 1])),
    "numbers": (NUMBERS, SIZES, 17 + (SIZES[:, np.newaxis] - 20) / 3 + 5 * noise(1)),
    "rows of classes": (
        MultilabelClassification(target(ROWS)), ROWS, 2 * ROWS + [[0.3, -0.8, -2]] + noise(3) / 3,
    ),
    "places": (
        SequenceLabelling(target(PLACES, num_classes=3)), PLACES,
        one_hot(PLACES, 3) / 3 + noise(6, 3),
    ),
    "a task of the user's": (OwnTask(target(SIZES)), SIZES, SIZES[:, np.newaxis] + 10 * noise(1)),
    "scores": (
        Ranking(target(YES, num_classes=2), group="query"), YES, logits(YES, 0.4),
        {"query": QUERIES},
    ),
    "tastes besides popularity": (
        recommender(), TAKEN,
        np.stack([WELL_KNOWN, np.ones(COUNT), LIKED[ITEMS]], axis=1),
        {"user": USERS, "item": ITEMS},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", USEFUL)
def test_what_finds_little_is_blessed(tmp_path, name):
    task, labels, outputs, *columns = USEFUL[name]
    decision = decided(tmp_path, task, labels, np.float32(outputs), columns=dict(*columns))
    assert decision.blessed, decision.reasons


def test_several_outputs_have_to_beat_their_constants_together(tmp_path):
    task = MultiOutput({"kind": CLASSES, "size": NUMBERS}, {"kind": 1.0, "size": 0.01})
    labels = {"kind": CLASS, "size": SIZES}
    for name, strength, blessed in (("nothing", 0, False), ("little", 0.7, True)):
        (tmp_path / name).mkdir()
        kind = strength * one_hot(CLASS, 4) + np.log([4, 3, 2, 1], dtype="float32")
        size = 20 + strength * (SIZES[:, np.newaxis] - 20)
        decision = decided(tmp_path / name, task, labels, {"kind": kind, "size": size})
        assert decision.blessed is blessed, decision.reasons


FINDS = logits(RARE, 4, -6)
FINDS_NOTHING = noise(1, count=RARE_COUNT)[::-1] - 6


def test_a_model_that_finds_nothing_does_not_take_the_place_of_one_that_finds_something(tmp_path):
    (tmp_path / "first").mkdir()
    first = decided(tmp_path / "first", OF_RARE, RARE, FINDS)
    assert first.blessed
    assert first.rules[0].metric == "average_precision_over_constant"
    decision = decided(tmp_path, OF_RARE, RARE, FINDS_NOTHING, champion=FINDS)
    assert not decision.blessed
    failed = {rule.key for rule in decision.rules if not rule.passed}
    assert {CONSTANT, MARGIN} <= failed
    assert "it does not beat a constant" in decision.headline


def test_a_class_that_the_champion_finds_is_not_lost(tmp_path):
    champion = 4 * one_hot(CLASS, 4) + noise(4)
    # The challenger is better on all other examples, so the mean hides the lost class.
    challenger = 9 * one_hot(np.where(CLASS == 3, 0, CLASS), 4) + noise(4) / 9
    decision = decided(tmp_path, CLASSES, CLASS, challenger, champion=champion)
    failed = [rule for rule in decision.rules if not rule.passed]
    assert [rule.key for rule in failed if rule.found.get("label") == "3"] == [CLASS_MARGIN]


def test_a_champion_that_does_not_beat_a_constant_is_said_to_be_so(tmp_path):
    nothing = np.zeros((COUNT, 1), "float32")
    decision = decided(tmp_path, BINARY, YES, logits(YES, 2), champion=nothing)
    assert decision.blessed, decision.reasons
    assert any("The champion does not beat a constant in AUC" in note for note in decision.notes)

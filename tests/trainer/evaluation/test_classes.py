"""Tests that a challenger may not lose a class that the champion finds in enough examples."""

import numpy as np
import pytest

from flotilla.trainer.config.thresholds import ChampionRule
from flotilla.trainer.evaluation import classes
from flotilla.trainer.evaluation.classes import MOST_ROWS, Recalls, compare_classes, verdicts
from flotilla.trainer.evaluation.comparison import Opponents
from flotilla.trainer.tasks.classification import (
    BinaryClassification,
    Classification,
    MultilabelClassification,
)
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.regression import Regression
from flotilla.trainer.tasks.sequences import SequenceLabelling
from tests.trainer.tasks.measuring import InParts, target

RULE = ChampionRule()


def found(task, labels, own, other, **more):
    own, other = (InParts(labels, each, more.get("weights")) for each in (own, other))
    opponents = Opponents(objective=Objective(task), own=own, other=other)
    return compare_classes(opponents, more.get("rule", RULE))


def logits(predicted, count):
    return np.eye(count, dtype="float32")[predicted] * 5


def classified(labels, own, other, count, **more):
    task = Classification(target(labels, num_classes=count))
    return found(task, labels, logits(own, count), logits(other, count), **more)


def rows(result):
    return {row["label"]: row for row in result["classes"]}


def some(generator, labels, wrong, count):
    """Return the labels as predictions, with a share of them replaced by wrong classes."""
    other = (labels + generator.integers(1, count, len(labels))) % count
    return np.where(generator.random(len(labels)) < wrong, other, labels)


LABELS = np.repeat([0, 1, 2], [400, 150, 50])


def test_equal_models_lose_nothing():
    generator = np.random.default_rng(0)
    own, other = (some(generator, LABELS, 0.1, 3) for _ in range(2))
    result = classified(LABELS, own, other, 3)
    assert result["class_counts"] == {"judged": 3, "not_judged": 0, "lost": 0}
    row = rows(result)["2"]
    assert row["examples"] == 50
    assert row["own"] == (own == 2)[LABELS == 2].mean()
    assert row["champion"] == (other == 2)[LABELS == 2].mean()
    assert row["margin"] == pytest.approx(row["champion"] / 2)
    assert -row["margin"] < row["bound"] < row["own"] - row["champion"]


def test_a_class_that_is_not_found_any_more_is_lost_whatever_the_others_gain():
    other = some(np.random.default_rng(0), LABELS, 0.1, 3)
    own = np.where(LABELS == 2, 1, LABELS)
    result = classified(LABELS, own, other, 3)
    assert result["class_counts"]["lost"] == 1
    assert result["classes"][0]["label"] == "2"
    assert result["classes"][0]["lost"]


def test_a_class_that_the_champion_does_not_find_cannot_be_lost():
    generator = np.random.default_rng(0)
    other = np.where(LABELS == 2, generator.integers(0, 3, 600), LABELS)
    other[:200] = 2
    result = classified(LABELS, np.zeros(600, int), other, 3)
    assert "2" not in rows(result)
    assert rows(result)["1"]["lost"]


def test_nothing_is_lost_by_a_champion_that_is_constant():
    result = classified(LABELS, np.ones(600, int), np.zeros(600, int), 3)
    assert result == {"classes": [], "class_counts": {"judged": 0, "not_judged": 0, "lost": 0}}


def test_too_few_examples_judge_nothing_unless_the_loss_is_proved():
    labels = np.repeat([0, 1, 2], [400, 3, 12])
    own = np.where(labels > 0, 0, labels)
    other = np.where(np.arange(415) == 414, 0, labels)
    result = classified(labels, own, other, 3)
    assert not rows(result)["1"]["judged"]
    assert not rows(result)["1"]["lost"], "three lost of three may be chance"
    assert rows(result)["2"]["lost"]


def test_a_margin_of_all_loses_nothing():
    result = classified(
        LABELS, np.zeros(600, int), LABELS, 3, rule=ChampionRule(class_margin="100%")
    )
    assert result["class_counts"]["lost"] == 0


def test_a_margin_may_be_a_number():
    own = np.where(np.arange(600) % 5 == 0, (LABELS + 1) % 3, LABELS)
    lost = [
        classified(LABELS, own, LABELS, 3, rule=ChampionRule(class_margin=each))["class_counts"][
            "lost"
        ]
        for each in (0.1, 0.45)
    ]
    assert lost == [3, 0]


def test_equal_weights_are_none_and_one_heavy_example_is_one():
    generator = np.random.default_rng(0)
    own, other = (some(generator, LABELS, 0.3, 3) for _ in range(2))
    plain = classified(LABELS, own, other, 3)
    same = classified(LABELS, own, other, 3, weights=np.full(600, 0.2, "float32"))
    for a, b in zip(plain["classes"], same["classes"], strict=True):
        assert a == pytest.approx(b, abs=1e-6)
    heavy = np.where(np.arange(600) == 599, 1e6, 1).astype("float32")
    assert not rows(classified(LABELS, LABELS, LABELS, 3, weights=heavy))["2"]["judged"]


def test_both_classes_of_two_are_kept():
    labels = (np.arange(2000) % 50 == 0).astype("int64")
    other = np.where(labels[:, None] == 1, 3, -3).astype("float32")
    none = np.full((2000, 1), -3, "float32")
    task = BinaryClassification(target(labels, num_classes=2, labels=("stays", "leaves")))
    result = found(task, labels, none, other)
    assert result["classes"][0]["label"] == "leaves"
    assert result["class_counts"]["lost"] == 1


def test_each_label_of_several_is_kept():
    generator = np.random.default_rng(0)
    labels = (generator.random((600, 3)) < 0.2).astype("int64")
    other = np.where(labels == 1, 3, -3).astype("float32")
    own = other.copy()
    own[:, 1] = -3
    result = found(MultilabelClassification(target(labels)), labels, own, other)
    assert [row["label"] for row in result["classes"] if row["lost"]] == ["1"]


def test_places_of_one_example_count_as_one():
    labels = np.repeat([[0, 0, 1, 1, -1]], 40, axis=0)
    task = SequenceLabelling(target(np.maximum(labels, 0), num_classes=2))
    right, wrong = (logits(np.maximum(each, 0), 2) for each in (labels, 0 * labels))
    result = found(task, labels, wrong, right)
    assert rows(result)["1"]["examples"] == 80
    assert rows(result)["1"]["lost"]
    few = found(task, labels[:3], wrong[:3], right[:3])
    assert not rows(few)["1"]["judged"], "six places of three examples"


def test_classes_of_several_outputs_have_their_names_before_them():
    labels = {"kind": LABELS, "size": np.arange(600).astype("float32")}
    task = MultiOutput(
        {
            "kind": Classification(target(LABELS, num_classes=3)),
            "size": Regression(target(labels["size"])),
        },
        {"kind": 1.0, "size": 1.0},
    )
    size = labels["size"][:, None]
    right, wrong = (
        {"kind": logits(each, 3), "size": size}
        for each in (LABELS, np.where(LABELS == 1, 0, LABELS))
    )
    assert [r["label"] for r in found(task, labels, wrong, right)["classes"] if r["lost"]] == [
        "kind=1"
    ]


def test_a_task_without_classes_says_nothing_of_them():
    values = np.arange(30).astype("float32")
    assert found(Regression(target(values)), values, values[:, None], values[:, None]) == {}


def test_of_thousands_of_classes_few_are_listed_and_all_are_counted():
    count = 10_000
    labels = np.repeat(np.arange(count), 12)
    recalls = Recalls(
        **{name: np.full(count, 12.0) for name in ("examples", "worth")},
        own=np.zeros(count), champion=np.ones(count), alone=np.zeros(count),
        lost=np.full(count, 12.0) * (np.arange(count) % 2), chance=np.full(count, 1e-4),
    )  # fmt: skip
    result = classes._judge([str(each) for each in labels[::12]], recalls, RULE)
    assert len(result["classes"]) == MOST_ROWS
    assert sum(result["class_counts"][name] for name in ("judged", "not_judged")) == count


def test_a_class_that_lost_the_margin_is_seldom_kept_and_an_equal_one_seldom_lost():
    generator, nights, worth, recall = np.random.default_rng(0), 4000, 60, 0.95
    # The models share half of their random draws, so their predictions are correlated.
    first, second = generator.random((2, nights, worth))
    second = np.where(generator.random((nights, worth)) < 0.5, second, first)
    other = first < recall
    kept = []
    for own in (second < recall / 2, second < recall):
        sums = [each.sum(axis=1).astype(float) for each in (own, other, own & ~other, other & ~own)]
        same = np.full(nights, float(worth))
        each = Recalls(same, same, sums[0] / worth, sums[1] / worth, *sums[2:], same / 1200)
        kept.append(1 - verdicts(each, RULE, 2).lost.mean())
    assert kept[0] <= 0.015
    assert kept[1] >= 0.9

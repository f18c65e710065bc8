"""Tests recommendations: ranking metrics of offered items, and retrieval by vectors."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer.config.schema import TaskConfig
from flotilla.trainer.config.thresholds import ChampionRule
from flotilla.trainer.evaluation.comparison import Opponents, compare
from flotilla.trainer.evaluation.slices import slice_metrics
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.tasks import registry
from flotilla.trainer.tasks.objective import Objective
from flotilla.trainer.tasks.ranking import Ranking
from flotilla.trainer.tasks.recommendation import Recommendation, Search, Vectors
from tests.trainer.refusal import refusal
from tests.trainer.tasks.measuring import InParts, evaluated, measured, target
from tests.trainer.tasks.test_registry import dataset, feature

RANDOM = np.random.default_rng(0)
SIZE = 3


def case(count=120, users=9, items=30, noise=1.0):
    """Return labels, outputs that partly predict them, and the columns of users and items."""
    who, what = RANDOM.integers(0, users, count), RANDOM.integers(0, items, count)
    of_users, of_items = (RANDOM.normal(size=(n, SIZE)) for n in (users, items))
    match = (of_users[who] * of_items[what]).sum(axis=1)
    labels = (match + RANDOM.normal(size=count) > 1).astype(np.int64)
    score = match + noise * RANDOM.normal(size=count)
    outputs = np.column_stack([score, of_users[who], of_items[what]]).astype("float32")
    return labels, outputs, {"user": who, "item": what}


def task_of(labels, **args):
    return Recommendation(target(labels), group="user", **{"k": [3, 10], **args})


@pytest.mark.slow
def test_an_evaluation_has_the_metrics_of_a_ranking_and_the_recalls():
    labels, outputs, columns = case()
    task = task_of(labels)
    details = evaluated(task, InParts(labels, outputs, **columns))
    plain = Ranking(target(labels), group="user")
    ranked = evaluated(plain, InParts(labels, outputs[:, :1], user=columns["user"]))
    assert details["metrics"].items() > ranked["metrics"].items()
    assert details["confusion_matrix"] == ranked["confusion_matrix"]
    search = Search()
    search.add(
        columns["user"], columns["item"], labels.astype(bool), outputs[:, 1:4], outputs[:, 4:]
    )
    for k, values in search.recalls([3, 10]).items():
        assert details["metrics"][f"recall_at_{k}"] == pytest.approx(values.mean())
        low, high = details["intervals"][f"recall_at_{k}"]
        assert 0 <= low <= values.mean() <= high <= 1
    sums = measured(task, InParts(labels, outputs))
    assert sums == pytest.approx(measured(plain, InParts(labels, outputs[:, :1])))
    assert {*details["metrics"], *sums} == set(task.directions)
    assert details["tables"][-1]["rows"] == [["all", len(np.unique(columns["item"]))]]


def test_the_answers_of_an_exported_model_are_its_outputs():
    labels, outputs, _ = case()
    task = task_of(labels)
    answers = {name: each.numpy() for name, each in task.answers(tf.constant(outputs)).items()}
    assert answers["user_vector"].shape == answers["item_vector"].shape == (len(labels), SIZE)
    np.testing.assert_allclose(answers["probability"], 1 / (1 + np.exp(-outputs[:, 0])), rtol=1e-5)
    np.testing.assert_array_equal(task.outputs_of(answers), outputs)


@pytest.mark.slow
def test_a_slice_is_an_evaluation_of_its_own():
    labels, outputs, columns = case()
    half = {**columns, "half": np.arange(len(labels)) % 2}
    task = task_of(labels)
    rows = slice_metrics(Objective(task), InParts(labels, outputs, **half), {"half": ()})["half"]
    for number, row in enumerate(rows):
        chosen = half["half"] == number
        own = {name: each[chosen] for name, each in columns.items()}
        found = evaluated(task, InParts(labels[chosen], outputs[chosen], **own))
        for name in ("ndcg", "query_auc", "recall_at_3"):
            assert row["metrics"][name] == pytest.approx(found["metrics"][name])
            assert row["intervals"][name] == pytest.approx(found["intervals"][name])


def test_what_a_slice_does_not_define_is_no_number():
    labels, outputs, columns = case(count=4)
    examples = InParts(labels * 0, outputs, **columns, a=labels * 0)
    (row,) = slice_metrics(Objective(task_of(np.array([0, 1]))), examples, {"a": ()})["a"]
    undefined = ("recall_at_3", "recall_at_10", "ndcg", "query_auc")
    assert {row["metrics"][name] for name in undefined} == {None}


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["recall_at_3", "query_auc"])
def test_a_champion_is_compared_by_what_is_found(metric):
    # With few users, one outlier could widen the bound, which is corrected for skewness.
    labels, outputs, columns = case(count=1500, users=100, noise=0)
    worse = outputs.copy()
    RANDOM.shuffle(worse)
    task = task_of(labels)
    own, other = (InParts(labels, each, **columns) for each in (outputs, worse))
    found = compare(
        Opponents(objective=Objective(task), own=own, other=other), ChampionRule(metric=metric)
    )
    assert (found["metric"], found["better"]) == (metric, "higher")
    assert 0 < found["bound"] < found["difference"]


def test_more_than_the_candidates_cannot_be_found():
    labels, outputs, columns = case()
    task = task_of(labels, k=[1000])
    with pytest.raises(UserError, match=r"task.args.k: recall at 1000 needs more than the \d+ "):
        evaluated(task, InParts(labels, outputs, **columns))


def refused(group="user", **args):
    ids = {name: feature() for name in ("user", "item")}
    known = dataset(ids, label=feature(classes=2))
    known.group = group
    return refusal(registry.create, TaskConfig(name="recommendation", args=args), known)


def test_numbers_and_features_that_do_not_fit_are_refused():
    for k in ([0], [-1], [10, 0.5], [True], ["10"]):
        line = f"k: {k[-1]!r} is not allowed; it must be a whole number of at least 1"
        assert refused(k=k) == f"task recommendation: {line}"
    assert "k: 10 is not allowed; write a list of numbers, such as [10, 100]" in refused(k=10)
    assert "k: [] is not allowed" in refused(k=[])
    # A user and an item have to be named.
    assert "set data.group" in refused(group="")
    assert "there is no feature 'itme'; did you mean 'item'?" in refused(item="itme")


def test_outputs_have_to_be_a_logit_and_two_vectors():
    labels, _, _ = case()
    task = task_of(labels)
    task.check_output(keras.KerasTensor((None, 7)), None)
    for width in (1, 2, 6):
        with pytest.raises(ConfigError, match="a logit and two vectors of the same size"):
            task.check_output(keras.KerasTensor((None, width)), None)


def examples(count=300, users=40, items=60, *, rounded=False):
    """Return examples with large, sparse IDs. The vector of a user or item depends on its ID."""
    who, what = RANDOM.integers(0, users, count), RANDOM.integers(0, items, count)
    of_users, of_items = (RANDOM.normal(size=(n, SIZE)).astype("float32") for n in (users, items))
    if rounded:
        of_users, of_items = np.round(of_users), np.round(of_items)
    taken = RANDOM.random(count) < 0.3
    # A user took an item three times, and another user took nothing.
    who[:3], what[:3], taken[:3] = 0, 0, True
    taken &= who != 1
    return who * 10**12, what * 10**13 + 7, taken, of_users[who], of_items[what]


def counted(given, k):
    """Return the recall of each user with a positive example, computed by its definition.

    If only some of the items with equal scores are retrieved, each counts with its probability.
    """
    who, what, taken, of_users, of_items = given
    vector = {item: of_items[np.flatnonzero(what == item)[0]] for item in np.unique(what)}
    found = []
    for user in np.unique(who[taken]):
        own = of_users[np.flatnonzero(who == user)[0]]
        scores = {item: own @ each for item, each in vector.items()}
        relevant = np.unique(what[taken & (who == user)])
        hits = 0
        for item in relevant:
            better, equal = (
                sum(as_good(score, scores[item]) for score in scores.values())
                for as_good in (np.greater, np.equal)
            )
            hits += np.clip((k - better) / equal, 0, 1)
        found.append(hits / len(relevant))
    return found


def search_of(given, size=50):
    search = Search()
    for begin in range(0, len(given[0]), size):
        search.add(*(each[begin : begin + size] for each in given))
    return search


@pytest.mark.parametrize("rounded", [False, True], ids=["distinct", "ties"])
@pytest.mark.parametrize("at_once", [1, 200, 1 << 24], ids=["a user", "some", "all"])
def test_it_is_what_counting_finds(rounded, at_once):
    given = examples(rounded=rounded)
    search, items = search_of(given), len(np.unique(given[1]))
    found = search.recalls([1, 5, 20, items, items + 1], at_once)
    assert search.candidates == items
    # Recall is not defined for more items than there are.
    assert list(found) == [1, 5, 20, items]
    for k, values in found.items():
        np.testing.assert_allclose(values, counted(given, k), err_msg=f"at {k}")
    assert 0 < found[5].mean() < found[20].mean() < found[items].min() == 1


@pytest.mark.parametrize("value", [0, 1 / 3])
def test_a_model_that_scores_all_alike_finds_what_a_random_order_does(value):
    who, what, taken, of_users, of_items = examples()
    # All items have the same vector, so rounding changes all scores equally.
    search = search_of((who, what, taken, of_users, np.full_like(of_items, value)))
    np.testing.assert_allclose(search.recalls([10])[10], 10 / search.candidates)


def test_a_user_weighs_as_its_examples_do_and_what_weighs_nothing_is_no_candidate():
    labels, outputs, columns = case()
    weights = RANDOM.random(len(labels)) * (RANDOM.random(len(labels)) < 0.7)
    task, some = task_of(labels), weights > 0
    found = evaluated(task, InParts(labels, outputs, weights, **columns))["metrics"]
    own = {name: each[some] for name, each in columns.items()}
    left = evaluated(task, InParts(labels[some], outputs[some], weights[some], **own))["metrics"]
    assert found == pytest.approx({**left, "loss": found["loss"]})
    who, what = own["user"], own["item"]
    given = (who, what, labels[some] > 0, outputs[some, 1:4], outputs[some, 4:])
    takers = np.unique(who[labels[some] > 0])
    heavy = [weights[some][who == user].mean() for user in takers]
    expected = np.average(counted(given, 3), weights=heavy)
    assert found["recall_at_3"] == pytest.approx(expected)


def test_without_a_taken_item_there_is_no_recall():
    who, what, taken, *vectors = examples()
    search = search_of((who, what, np.zeros_like(taken), *vectors))
    assert len(search.recalls([5])[5]) == 0


def test_texts_are_ids_too_and_the_first_vector_of_an_id_is_its_own():
    vectors = Vectors()
    names = np.array([b"b", b"a", b"b"], object)
    vectors.add(names, np.array([[1.0], [2.0], [3.0]]))
    vectors.add(names[::-1], np.array([[4.0], [5.0], [6.0]]))
    ids, found = vectors.all()
    assert ids.tolist() == [b"a", b"b"]
    np.testing.assert_array_equal(found, [[2.0], [1.0]])

"""Tests that ranking metrics per query equal scikit-learn's."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from sklearn import metrics as scores

from flotilla.trainer.config.schema import TaskConfig
from flotilla.trainer.tasks import registry
from flotilla.trainer.tasks.ranking import Ranking, measure_queries
from tests.trainer.tasks.measuring import InParts, evaluated, target
from tests.trainer.tasks.test_registry import dataset, feature

RANDOM = np.random.default_rng(0)


def case(count=80, queries=12):
    groups = RANDOM.integers(0, queries, count)
    labels = RANDOM.integers(0, 2, count)
    outputs = (RANDOM.normal(size=(count, 1)) + labels[:, np.newaxis]).astype("float32")
    return groups, labels, outputs


def expected(true, score):
    """Return NDCG and reciprocal rank, averaged over all orders of tied items, and the AUC."""
    found = []
    for order in permutations(range(len(true))):
        ranked = true[list(order)]
        if all(a >= b for a, b in pairwise(score[list(order)])):
            gain = ranked @ (1 / np.log2(np.arange(len(true)) + 2))
            found.append((gain, 1 / (np.flatnonzero(ranked)[0] + 1)))
    best = (1 / np.log2(np.arange(true.sum()) + 2)).sum()
    area = scores.roc_auc_score(true, score) if not true.all() else None
    return np.mean(found, axis=0) / [best, 1], area


@pytest.mark.parametrize("levels", [1, 2, 3, 100])
def test_equal_scores_count_as_the_mean_over_their_orders(levels):
    groups, labels = RANDOM.integers(0, 12, 60), RANDOM.integers(0, 2, 60)
    given = RANDOM.integers(0, levels, 60).astype("float32")
    found = measure_queries(groups, labels.astype(bool), given)
    each = []
    for query in np.unique(groups[labels == 1]):
        rows = np.flatnonzero(groups == query)[:6]
        each.append(measure_queries(groups[rows], labels[rows].astype(bool), given[rows]))
        if not labels[rows].any():
            continue
        (gain, first), area = expected(labels[rows], given[rows])
        np.testing.assert_allclose(each[-1]["ndcg"].values, gain)
        np.testing.assert_allclose(each[-1]["mrr"].values, first)
        assert each[-1]["query_auc"].values.tolist() == pytest.approx(
            [one for one in [area] if one is not None]
        )
    assert len(found["ndcg"].values) == len(np.unique(groups[labels == 1]))


def test_many_equal_scores_are_ranked_as_scikit_learn_does():
    groups, labels, outputs = case(count=4000, queries=5)
    given = np.round(outputs[:, 0])
    weights = RANDOM.random(4000) * (RANDOM.random(4000) < 0.8)
    found = measure_queries(groups, labels.astype(bool), given, weights)
    rows = [np.flatnonzero((groups == query) & (weights > 0)) for query in range(5)]
    for place, some in enumerate(rows):
        true, score = labels[some], given[some]
        assert found["ndcg"].values[place] == pytest.approx(scores.ndcg_score([true], [score]))
        area = scores.roc_auc_score(true, score)
        assert found["query_auc"].values[place] == pytest.approx(area)
    heavy = [weights[some].mean() for some in rows]
    np.testing.assert_allclose(found["ndcg"].weights, heavy)
    assert found["ndcg"].mean == pytest.approx(np.average(found["ndcg"].values, weights=heavy))


def test_one_score_for_all_has_what_a_random_order_has():
    groups, labels, _ = case(count=300, queries=6)
    alike = measure_queries(groups, labels.astype(bool), np.zeros(300))
    drawn = [measure_queries(groups, labels.astype(bool), RANDOM.random(300)) for _ in range(300)]
    for name, each in alike.items():
        assert each.mean == pytest.approx(np.mean([one[name].mean for one in drawn]), abs=0.01)


def test_an_evaluation_has_metrics_by_query_in_parts_of_any_size():
    groups, labels, outputs = case()
    task = Ranking(target(labels), group="query")
    assert task.columns == ("query",)
    found = evaluated(task, InParts(labels, outputs, query=groups))
    for name, each in measure_queries(groups, labels.astype(bool), outputs[:, 0]).items():
        assert found["metrics"][name] == pytest.approx(each.mean)
        low, high = found["intervals"][name]
        assert 0 <= low <= each.mean <= high <= 1
    assert set(found["metrics"]) == set(task.directions)
    assert found["tables"][0]["rows"][0] == ["all", len(np.unique(groups))]


def test_without_a_group_it_measures_examples_alone_and_the_group_is_the_datasets():
    _, labels, outputs = case()
    task = Ranking(target(labels))
    assert task.columns == ()
    assert "ndcg" not in evaluated(task, InParts(labels, outputs))["metrics"]
    found = dataset(label=feature(classes=2))
    found.group = "query"
    task = registry.create(TaskConfig(name="ranking"), found)
    assert (task.columns, task.output_shape) == (("query",), (1,))


def test_texts_name_queries_and_a_query_of_one_kind_has_no_area():
    groups = np.array([b"a", b"a", b"b", b"c"], dtype=object)
    found = measure_queries(
        groups, np.array([True, False, True, False]), np.array([1.0, 2.0, 0.0, 0.0])
    )
    assert found["mrr"].values.tolist() == [0.5, 1]
    assert found["query_auc"].values.tolist() == [0]

"""What is taken of what is shown, by query: as scikit-learn ranks each of them."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics as scores

from tests.trainer.tasks.measuring import InParts, measured, target
from tests.trainer.tasks.test_registry import dataset, feature
from trainer.config.schema import TaskConfig
from trainer.tasks import registry
from trainer.tasks.ranking import Ranking, by_query

RANDOM = np.random.default_rng(0)


def case(count=80, queries=12):
    groups = RANDOM.integers(0, queries, count)
    labels = RANDOM.integers(0, 2, count)
    outputs = (RANDOM.normal(size=(count, 1)) + labels[:, np.newaxis]).astype("float32")
    return groups, labels, outputs


@pytest.mark.parametrize("rounded", [False, True])
def test_each_query_is_ranked_as_scikit_learn_does(rounded):
    groups, labels, outputs = case()
    given = np.round(outputs[:, 0]) if rounded else outputs[:, 0]
    found = by_query(groups, labels.astype(bool), given)
    areas, gains, firsts = [], [], []
    for query in np.unique(groups):
        true, score = labels[groups == query], given[groups == query]
        if not true.any():
            continue
        # Equal scores in the worst order.
        order = np.lexsort((true, -score))
        gain = (true[order] / np.log2(np.arange(len(true)) + 2)).sum()
        gains.append(gain / (1 / np.log2(np.arange(true.sum()) + 2)).sum())
        firsts.append(1 / (np.flatnonzero(true[order])[0] + 1))
        if not true.all():
            areas.append(scores.roc_auc_score(true, score))
        if not rounded and len(true) > 1:
            assert gains[-1] == pytest.approx(scores.ndcg_score([true], [score]))
    np.testing.assert_allclose(found["ndcg"], gains)
    np.testing.assert_allclose(found["mrr"], firsts)
    np.testing.assert_allclose(found["query_auc"], areas)


def test_an_evaluation_has_metrics_by_query_in_parts_of_any_size():
    groups, labels, outputs = case()
    task = Ranking(target(labels), group="query")
    assert task.columns == ("query",)
    details = task.details(InParts(labels, outputs, query=groups))
    expected = by_query(groups, labels.astype(bool), outputs[:, 0])
    assert details["metrics"] == pytest.approx(
        {name: each.mean() for name, each in expected.items()}
    )
    for name, (low, high) in details["intervals"].items():
        assert 0 <= low <= details["metrics"][name] <= high <= 1
    every = {**measured(task, InParts(labels, outputs)), **details["metrics"]}
    assert set(every) == set(task.directions)
    assert details["tables"][0]["rows"][0] == ["all", len(np.unique(groups))]


def test_without_a_group_it_measures_examples_alone():
    _, labels, outputs = case()
    task = Ranking(target(labels))
    assert task.columns == ()
    assert "metrics" not in task.details(InParts(labels, outputs))


def test_texts_name_queries_and_a_query_of_one_kind_has_no_area():
    groups = np.array([b"a", b"a", b"b", b"c"], dtype=object)
    found = by_query(groups, np.array([True, False, True, False]), np.array([1.0, 2.0, 0.0, 0.0]))
    assert found["mrr"].tolist() == [0.5, 1]
    assert found["query_auc"].tolist() == [0]


def test_the_group_is_that_of_the_dataset():
    found = dataset(label=feature(classes=2))
    found.group = "query"
    task = registry.create(TaskConfig(name="ranking"), found)
    assert task.columns == ("query",)
    assert task.output_shape == (1,)

"""Tests how the metric that compares models is read from evaluations and registered models."""

from __future__ import annotations

import math

import pytest

from flotilla.trainer.config.main_metric import MainMetric, main_first

AUC = MainMetric(name="auc", better="higher")
ERROR = MainMetric(name="error", better="lower")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"main_metric": "auc", "directions": {"auc": "higher", "loss": "lower"}}, AUC),
        ({"main_metric": "error", "directions": {"error": "lower"}}, ERROR),
        # These models were registered before directions were recorded.
        ({"main_metric": "auc"}, AUC),
        ({"main_metric": "error"}, ERROR),
        ({"main_metric": "loss", "metrics": {"accuracy": 0.5}}, MainMetric()),
        # Evaluations of earlier versions name no main metric.
        ({"metrics": {"loss": 0.5, "accuracy": 0.9}}, MainMetric(name="accuracy", better="higher")),
        ({"metrics": {"loss": 0.5}}, MainMetric()),
        ({}, MainMetric()),
        # These records are damaged.
        ({"main_metric": "auc", "directions": ["auc"], "metrics": None}, AUC),
        ({"main_metric": "auc", "directions": {"auc": {}}}, AUC),
    ],
)
def test_what_was_written_says_it(said, expected):
    assert MainMetric.of(said) == expected


ROWS = {
    "best": {"validation_auc": 0.9, "validation_error": 1.0, "validation_loss": 0.5},
    "tie, of a higher loss": {
        "validation_auc": 0.9, "validation_error": 1.0, "validation_loss": 0.6,
    },
    "worse, of the lowest loss": {
        "validation_auc": 0.8, "validation_error": 2.0, "validation_loss": 0.1,
    },
    "not measured": {"validation_loss": 0.2},
    "neither finite": {
        "validation_auc": math.nan, "validation_error": -math.inf, "validation_loss": 0.3,
    },
    "nothing": {},
}  # fmt: skip


@pytest.mark.parametrize("main", [AUC, ERROR])
def test_rows_are_sorted_by_it_then_by_their_loss_and_nothing_infinite_wins(main):
    orders = [main.order(row) for row in ROWS.values()]
    assert orders == sorted(orders)
    assert len(set(orders)) == len(ROWS)


def test_rows_are_sorted_by_it_or_by_the_loss():
    ndcg = MainMetric(name="ndcg", better="higher")
    names = sorted(ROWS, key=lambda name: ndcg.order(ROWS[name]))
    losses = [ROWS[name].get("validation_loss", math.inf) for name in names]
    assert losses == sorted(losses)
    metrics = {"accuracy": 1, "loss": 2, "auc": 3}
    assert [*main_first(metrics, "auc")] == ["auc", "loss", "accuracy"]
    assert [*main_first(metrics, "ndcg")] == ["loss", "accuracy", "auc"]

"""Local steps and examples by worker, and how stale the updates were."""

from __future__ import annotations

import json

import pytest

from trainer.strategies.parameter_server import NUMBER_FILE, worker_number
from trainer.strategies.visits import STALENESS_WINDOW, Tally


def test_nothing_was_done_yet():
    assert Tally(batch_size=8).metrics() == {"workers": {}}


def test_steps_and_examples_add_up_by_worker():
    tally = Tally(batch_size=8)
    for worker, steps in [("worker-1", 3), ("worker-0", 5), ("worker-1", 4)]:
        tally.add(worker, steps)
    metrics = tally.metrics()
    assert metrics == {
        "workers": {
            "worker-0": {"local_steps": 5, "examples": 40},
            "worker-1": {"local_steps": 7, "examples": 56},
        }
    }
    assert list(metrics["workers"]) == ["worker-0", "worker-1"]


def test_staleness_is_reported_as_its_mean_and_its_95th_percentile():
    tally = Tally(batch_size=8)
    for value in range(101):
        tally.add("worker-0", 1, staleness=float(value))
    metrics = tally.metrics()
    assert metrics["staleness_mean"] == pytest.approx(50)
    assert metrics["staleness_p95"] == pytest.approx(95)


def test_nothing_is_as_good_a_staleness_as_any():
    tally = Tally(batch_size=8)
    tally.add("worker-0", 1, staleness=0.0)
    assert tally.metrics()["staleness_mean"] == 0


def test_only_the_last_updates_tell_the_staleness_but_all_of_them_count():
    tally = Tally(batch_size=1)
    for value in [1e6] * 50 + [2.0] * STALENESS_WINDOW:
        tally.add("worker-0", 1, staleness=value)
    metrics = tally.metrics()
    assert (metrics["staleness_mean"], metrics["staleness_p95"]) == (2, 2)
    assert metrics["workers"]["worker-0"]["local_steps"] == STALENESS_WINDOW + 50


def test_the_metrics_are_json():
    tally = Tally(batch_size=8)
    tally.add("worker-0", 2, staleness=1.5)
    assert json.loads(json.dumps(tally.metrics())) == tally.metrics()


def test_a_worker_knows_its_number_from_its_working_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / NUMBER_FILE).write_text("3", encoding="utf-8")
    assert worker_number().numpy() == 3

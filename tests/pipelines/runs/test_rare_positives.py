"""Tests a model for rare positives: one in a hundred customers leaves.

A champion that finds most of them must not be replaced by a model that finds fewer.
"""

import csv

import numpy as np
import pytest
import yaml

from tests.pipelines.called import call, content, setting

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]

CUSTOMERS, MORE, SHARE = 28_000, 2_000, 0.01


def write(path, count=CUSTOMERS, *, shift=0, shuffled=False):
    """Write customers; the first customers are the same for any count.

    Of ten customers, one is in the validation split and two are in the test split; `shift` selects
    which. With `shuffled`, the labels outside the test split are shuffled.
    """
    rng = np.random.default_rng(11)
    total = CUSTOMERS + MORE
    months, calls = rng.exponential(30, total).round(1), rng.poisson(1.2, total)
    plans = rng.choice(["basic", "family", "pro", "trial"], total, p=[0.5, 0.3, 0.15, 0.05])
    paid = rng.gamma(2.0, 40.0, total).round(2)
    reason = 1.9 * calls - 0.06 * months + 2.2 * (plans == "trial") + 0.02 * paid
    reason += rng.logistic(0, 0.6, total)
    left = (reason > np.quantile(reason, 1 - SHARE)).astype(int)
    parts = np.repeat(["train", "validation", "test"], [7, 1, 2])[(np.arange(total) + shift) % 10]
    if shuffled:
        known = np.flatnonzero(parts != "test")
        left[known] = rng.permutation(left[known])
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["months", "calls", "plan", "paid", "part", "left"])
        rows.writerows(list(zip(months, calls, plans, paid, parts, left, strict=True))[:count])


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    """Return a function that runs one night on these customers; all nights share a workdir."""
    folder = tmp_path_factory.mktemp("rare")
    config = {
        "name": "leaving",
        "data": {
            "source": str(folder / "customers.csv"),
            "label": "left",
            "splits": {"column": "part"},
        },
        # Use a small model. A larger model may rank customers better than chance, even if its
        # training labels are shuffled.
        "model": {"name": "tabular", "args": {"pieces": 0, "hidden_units": [64, 32], "dropout": 0}},
        "training": {
            "strategy": "single",
            "steps": 400,
            "batch_size": 256,
            "optimizer": {"name": "adam", "learning_rate": 0.01},
        },
        "export": {"formats": ["saved_model"]},
    }
    path = folder / "leaving.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")

    def run(*settings, **written):
        write(folder / "customers.csv", **written)
        called = call("run", folder / "runs", str(path), *settings, cwd=folder)
        assert called.answer["status"] != "failed", called.err
        return called

    return run


@pytest.fixture(scope="module")
def champion(night):
    found = night()
    assert found.code == 0, found.err
    return found


def registered(called):
    home = called.workdir / "registry" / "models" / "leaving"
    return {name: content(home / name) for name in ("versions", "promotions")}


def test_a_champion_that_finds_most_of_them_is_blessed(champion):
    metrics = champion.answer["metrics"]
    assert metrics["recall"] > 0.5
    measured = champion.read("evaluation", "metrics.json")
    assert measured["task"] == "binary_classification"
    assert (measured["positive"], measured["main_metric"]) == ("1", "average_precision")
    assert 0.005 < measured["constant"]["metrics"]["average_precision"] < 0.02
    assert measured["remarks"] == []


def test_a_model_that_learns_nothing_is_refused_and_the_registry_stays(night, champion):
    before = registered(champion)
    found = night(*setting(data__gate__rules="{association: warn}"), shuffled=True)
    assert found.code == 3
    decision = found.read("decision", "decision.json")
    assert decision["decision"] == "refused"
    failed = {each["key"] for each in decision["rules"] if not each["passed"]}
    assert {"gate.constant", "gate.champion.margin"} <= failed
    assert registered(champion) == before
    assert found.statuses().keys().isdisjoint({"export_model", "register_model"})


@pytest.mark.usefixtures("champion")
def test_a_champion_that_was_trained_on_what_judges_it_is_noted(night):
    found = night(shift=5)
    measured = found.read("evaluation", "metrics.json")
    remark = measured["champion"]["remarks"][0]
    count, whole = (int(remark.split()[place]) for place in (0, 2))
    assert whole == measured["examples"]
    # Test examples that also occur in this model's own training split are not counted, but there
    # are few of them.
    assert whole - 20 < count <= whole
    assert "were in the champion's training split" in remark
    assert remark in found.read("decision", "decision.json")["notes"]


def test_more_customers_are_judged_fairly(night, champion):
    measured = night(count=CUSTOMERS + MORE).read("evaluation", "metrics.json")
    assert measured["champion"]["remarks"] == []
    assert measured["examples"] > champion.read("evaluation", "metrics.json")["examples"]

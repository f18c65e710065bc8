"""Tests that an input that determines the label is reported and an informative one is not."""

import numpy as np
import pytest
from sklearn import datasets

from flotilla.trainer.data_gate import leaks
from tests.trainer.data_gate.tables import profile, question, split_of

ROWS = 900


def found(columns, champion=None, classes=("kept", "refund"), **config):
    tables = [profile(split_of(each), classes=classes) if each else None
              for each in (columns, champion)]  # fmt: skip
    return list(leaks.label_leakage(question(*tables, **config)))


def with_label(make, seed=0, rows=ROWS):
    rng = np.random.default_rng(seed)
    x = make(rng, rows)
    return {"noise": rng.normal(size=rows), **x}


def days(rng, rows):
    return rng.uniform(0, 30, rows)


def by_threshold(at=15.0, draw=days):
    def make(rng, rows):
        x = draw(rng, rows)
        return {"days": x, "label": (x < at).astype(int)}

    return make


def by_band(rng, rows):
    x = rng.normal(size=rows)
    return {"days": x, "label": (np.abs(x) < 0.5).astype(int)}


def nearly_by_threshold(rng, rows):
    x, wrong = rng.uniform(0, 30, rows), rng.random(rows) < 0.002
    return {"days": x, "label": ((x < 15) != wrong).astype(int)}


def missing_in_one(rng, rows):
    label = rng.integers(0, 2, rows)
    return {"days": np.where(label, rng.uniform(0, 30, rows), np.nan), "label": label}


def zero_in_one(rng, rows):
    label = rng.integers(0, 2, rows)
    return {"days": np.where(label, rng.lognormal(3, 1, rows), 0.0), "label": label}


def in_order_of_files(_rng, rows):
    return {"days": np.arange(rows), "label": (np.arange(rows) >= rows // 3).astype(int)}


def in_turn(_rng, rows):
    return {"days": np.arange(1, rows + 1), "label": (np.arange(rows) % 3 == 1).astype(int)}


def by_category(rng, rows):
    label = rng.integers(0, 2, rows)
    return {"days": np.array(["open", "closed", "gone"])[label * rng.integers(1, 3, rows)],
            "label": label}  # fmt: skip


def by_number_of_store(rng, rows):
    store = rng.integers(0, 30, rows)
    return {"days": store, "label": np.isin(store, [2, 7, 11, 12, 20, 29]).astype(int)}


def copied(rng, rows):
    label = rng.integers(0, 2, rows)
    return {"days": label + 0.01 * rng.normal(size=rows), "label": label}


LEAKS = {
    "threshold": by_threshold(), "rare": by_threshold(0.6),
    "of a bell": by_threshold(1.0, lambda rng, rows: rng.normal(size=rows)),
    "of whole numbers": by_threshold(40, lambda rng, rows: rng.integers(18, 90, rows)),
    "of a skewed amount": by_threshold(30.0, lambda rng, rows: rng.lognormal(3, 1, rows)),
    "band": by_band, "with few errors": nearly_by_threshold, "missing": missing_in_one,
    "zero": zero_in_one, "order": in_order_of_files, "turns": in_turn, "category": by_category,
    "store": by_number_of_store, "copy": copied,
}  # fmt: skip


@pytest.mark.parametrize("rows", [250, 4000])
@pytest.mark.parametrize("name", LEAKS)
def test_a_feature_that_decides_a_class_is_named(name, rows):
    # With 250 rows, these two leaks cannot be detected with certainty.
    if rows > 250 or name not in ("rare", "with few errors"):
        (said,) = found(with_label(LEAKS[name], rows=rows))
        assert said.feature == "days"
        assert "set data.drop: [days]" in said.says


def test_thresholds_and_classes_by_thresholds_are_named():
    (said,) = found(with_label(by_threshold(40, lambda rng, rows: rng.integers(18, 90, rows))))
    assert "'days' determines 'label' ('refund' up to 39, 'kept' from 40)" in said.says

    def make(rng, rows):
        x = rng.uniform(0, 100, rows)
        return {"days": x, "label": np.digitize(x, [50, 65, 80, 90])}

    assert found(with_label(make), classes=tuple("edcba"))


def test_what_is_no_news_or_within_the_limit_is_left_alone():
    columns = with_label(LEAKS["threshold"])
    assert not found(columns, champion=with_label(LEAKS["threshold"], 1))
    other = {**with_label(LEAKS["threshold"], 1), "days": np.random.default_rng(2).random(ROWS)}
    assert found(columns, champion=other)

    def make(rng, rows):
        x = rng.uniform(0, 30, rows)
        return {"days": x, "label": ((x < 15) != (rng.random(rows) < 0.01)).astype(int)}

    assert not found(with_label(make))
    assert found(with_label(make), limits={"label_leakage": 0.97})


def numbers(make, seed=0, rows=400):
    rng = np.random.default_rng(seed)
    y = rng.lognormal(3, 1, rows)
    return found({"noise": rng.normal(size=rows), "x": make(rng, y), "label": y})


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda _, y: y * 100, True), (lambda _, y: np.round(5 - y, 1), True),
        (lambda _, y: np.log(y), True), (lambda _, y: np.where(y > 5, y, np.nan), True),
        (lambda rng, y: y + 0.05 * y.std() * rng.normal(size=len(y)), False),
        (lambda _, y: np.where(y > y.mean(), 1.0, 0.0), False),
    ],
)  # fmt: skip
def test_a_number_that_is_the_label_in_other_words_is_named(make, named):
    assert bool(numbers(make)) is named


@pytest.mark.parametrize("load", ["iris", "wine", "breast_cancer"])
def test_easy_tables_have_none_for_any_of_their_classes(load):
    data = getattr(datasets, f"load_{load}")()
    order = np.random.default_rng(0).permutation(len(data.target))
    columns = {f"x{place}": data.data[order, place] for place in range(data.data.shape[1])}
    assert not found({**columns, "label": data.target[order]}, classes=tuple(data.target_names))
    for one in range(len(data.target_names)):
        assert not found({**columns, "label": (data.target[order] == one).astype(int)})


def far_apart(rng, rows):
    label = rng.integers(0, 2, rows)
    return {"x": 8 * label + rng.normal(size=rows), "label": label}


def strong(rng, rows):
    label = rng.integers(0, 2, rows)
    return {"x": 4 * label + rng.normal(size=rows), "label": label}


def ids_of_users(rng, rows):
    user = rng.integers(0, rows // 2, rows)
    return {"x": user, "label": rng.integers(0, 2, rows)}


def unique_texts(rng, rows):
    return {"x": np.array([f"ticket {n}" for n in range(rows)]), "label": rng.integers(0, 2, rows)}


def rare_category(rng, rows):
    label = (np.arange(rows) % 90 == 0).astype(int)
    return {"x": np.where(label & (rng.random(rows) < 0.5), "yes", "no"), "label": label}


def mostly_missing(rng, rows):
    x = np.where(rng.random(rows) < 0.1, rng.integers(0, 5, rows), np.nan)
    return {"x": x, "label": rng.integers(0, 2, rows)}


@pytest.mark.parametrize(
    "make", [far_apart, strong, ids_of_users, unique_texts, rare_category, mostly_missing]
)
def test_what_says_much_of_a_label_or_nothing_is_left_alone(make):
    for seed in range(0, 20, 4):
        assert not found(with_label(make, seed, 150 + 100 * seed))

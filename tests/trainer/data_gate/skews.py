"""Kinds of errors in data, each with the rules that detect it.

A skew takes a random generator and the splits of a clean dataset, and returns changed splits.
"""

from __future__ import annotations

import numpy as np

CITIES = np.array(["Aachen", "Bonn", "Celle", "Dessau", "Essen", "Fulda"])
SHARES = np.array([0.3, 0.25, 0.2, 0.15, 0.07, 0.03])


def table(rng, size, width=5):
    """Return clean rows: two categorical features, several numeric ones, and a binary label."""
    common = rng.normal(size=size)
    columns = {
        "city": rng.choice(CITIES, size, p=SHARES),
        "plan": rng.choice(["basic", "plus", "pro"], size, p=[0.6, 0.3, 0.1]),
        "age": np.round(rng.gamma(9, 5, size)),
        "income": rng.lognormal(10, 0.6, size),
        "height": 170 + 9 * rng.normal(size=size),
    }
    columns["income"][rng.random(size) < 0.02] = np.nan
    for place in range(width - len(columns)):
        # A common factor correlates these columns.
        columns[f"x{place}"] = 0.5 * common + rng.normal(size=size)
    rise = (columns["height"] - 170) / 9 + 0.05 * (columns["age"] - 45) + common * (width > 5)
    rise += np.where(columns["city"] == "Bonn", 1.0, 0.0) - 0.6
    columns["label"] = (rise + rng.logistic(scale=0.4, size=size) > 0).astype(int)
    return columns


def _on(name, change):
    def skew(rng, splits):
        for columns in splits.values():
            columns[name] = change(rng, columns[name].copy())
        return splits

    return skew


def _where(share, value):
    def change(rng, column):
        chosen = rng.random(len(column)) < share
        if column.dtype.kind == "U":
            column = column.astype(object)
        column[chosen] = value
        return column.astype("U") if column.dtype == object else column

    return change


def _without(name):
    def skew(_rng, splits):
        return {
            split: {key: column for key, column in columns.items() if key != name}
            for split, columns in splits.items()
        }

    return skew


def _rows(choose, only=None):
    def skew(rng, splits):
        found = {}
        for split, columns in splits.items():
            kept = (
                choose(rng, columns) if only in (None, split) else np.arange(len(columns["label"]))
            )
            found[split] = {name: column[kept] for name, column in columns.items()}
        return found

    return skew


def _fewer_yes(share):
    def choose(rng, columns):
        return np.flatnonzero((columns["label"] == 0) | (rng.random(len(columns["label"])) < share))

    return choose


def _copied(into, source, share):
    """Return a skew that replaces a share of one split with examples of another."""

    def skew(rng, splits):
        target, origin = splits[into], splits[source]
        size = len(target["label"])
        count = round(share * size)
        rows = rng.choice(len(origin["label"]), count, replace=into != source)
        if into == source:
            rows = np.repeat(rows[: count // 2], 2)
        for name, column in target.items():
            column[: len(rows)] = origin[name][rows]
        return splits

    return skew


def _shuffled(only=None):
    def skew(rng, splits):
        for split, columns in splits.items():
            if only in (None, split):
                columns["label"] = rng.permutation(columns["label"])
        return splits

    return skew


def _many(amount):
    def skew(_rng, splits):
        for columns in splits.values():
            for place, name in enumerate(columns):
                column = columns[name]
                if column.dtype.kind == "f":
                    columns[name] = column + (-1) ** place * amount * np.nanstd(column)
        return splits

    return skew


def _every_row_twice(_rng, splits):
    return {
        split: {name: np.repeat(column, 2) for name, column in columns.items()}
        for split, columns in splits.items()
    }


def _leaking(_rng, splits):
    for columns in splits.values():
        columns["height"] = columns["label"] * 2.0
    return splits


def _other_type(_rng, splits):
    for columns in splits.values():
        columns["age"] = columns["age"].astype(int).astype("U")
    return splits


def _new_column(rng, splits):
    for columns in splits.values():
        columns["id"] = rng.random(len(columns["label"]))
    return splits


SKEWS = {
    "missing column": (_without("income"), {"missing_feature"}),
    "new column": (_new_column, {"new_feature"}),
    "number as text": (_other_type, {"type"}),
    "unit times 1,000": (_on("income", lambda _, x: x * 1000), {"unit"}),
    "unit by 1,000": (_on("height", lambda _, x: x / 1000), {"unit"}),
    "centimetres as inches": (_on("height", lambda _, x: x / 2.54), {"unit"}),
    "fahrenheit": (_on("height", lambda _, x: x * 1.8 + 32), {"unit"}),
    "shuffled labels": (_shuffled(), {"association"}),
    "shuffled labels of the test split": (_shuffled("test"), {"association"}),
    "inverted labels": (_on("label", lambda _, x: 1 - x), {"balance"}),
    "class gone": (_rows(lambda _, c: np.flatnonzero(c["label"] == 0)), {"class_gone"}),
    "class gone from the test split": (
        _rows(lambda _, c: np.flatnonzero(c["label"] == 0), "test"), {"class_gone"}),
    "class rare": (
        _rows(_fewer_yes(0.01)),
        {"imbalance", "balance"}),
    "labels at chance": (
        _rows(_fewer_yes(0.5)),
        {"balance"}),
    "duplicated test rows": (_copied("test", "test", 0.3), {"duplicates"}),
    "duplicated training rows": (_copied("train", "train", 0.2), {"duplicates"}),
    "every row twice": (_every_row_twice, {"duplicates"}),
    "test rows in training": (_copied("test", "train", 0.1), {"leakage"}),
    "validation is training": (_copied("validation", "train", 0.9), {"leakage"}),
    "label among the inputs": (_leaking, {"label_leakage"}),
    "drift of a number": (_on("height", lambda _, x: x + 7), {"drift"}),
    "wider spread": (_on("height", lambda _, x: 170 + (x - 170) * 2), {"drift", "unit"}),
    "drift of a category": (_on("plan", _where(0.3, "pro")), {"drift"}),
    "many small drifts": (_many(0.09), {"drift_together"}),
    "new category": (_on("city", _where(0.08, "Gera")), {"new_values"}),
    "misspelt category": (_on("plan", _where(0.15, "Basic")), {"new_values"}),
    "constant number": (_on("age", lambda _, x: np.full_like(x, 40.0)), {"constant"}),
    "constant category": (_on("city", lambda _, x: np.full_like(x, "Bonn")), {"constant"}),
    "missing values": (_on("income", _where(0.3, np.nan)), {"missing_values"}),
    "column all missing": (_on("income", _where(1.1, np.nan)), {"empty"}),
    "999 for missing": (_on("age", _where(0.08, 999.0)), {"range"}),
    "a quarter of the rows": (_rows(lambda _, c: np.arange(len(c["label"]) // 4)), {"size"}),
    "test split of another place": (
        _rows(lambda _, c: np.flatnonzero(c["height"] > 172), "test"), {"splits_differ"}),
}  # fmt: skip

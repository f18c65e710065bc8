"""Tests baselines for tables, text and recommendation: what they learn, and that none fails."""

from dataclasses import replace

import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.baselines import baselines
from flotilla.trainer.baselines.baselines import fit_baselines
from flotilla.trainer.baselines.rows import Clock, Rows, Splits
from flotilla.trainer.data.preparation.shards import write_shards
from flotilla.trainer.features.dataset_spec import BLOCK_ROWS, SCHEMA, DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.storage import Manifest
from flotilla.trainer.tasks.base import Target
from flotilla.trainer.tasks.classification import (
    BinaryClassification,
    Classification,
    MultilabelClassification,
)
from flotilla.trainer.tasks.multi_output import MultiOutput
from flotilla.trainer.tasks.recommendation import Recommendation
from flotilla.trainer.tasks.regression import Regression
from tests.trainer.objectives import NO_ROLES

RANDOM = np.random.default_rng(7)
ROWS, TEST = 400, 120


@pytest.fixture(autouse=True)
def _few_trees_and_much_time(monkeypatch):
    monkeypatch.setattr(baselines, "_MOST_ITERATIONS", 30)
    # Even on a busy machine, no baseline may be left out for lack of time.
    monkeypatch.setattr(baselines, "Clock", lambda seconds: Clock(100 * seconds))


def feature(values):
    values = np.asarray(values)
    if values.dtype.kind in "OSU":
        return FeatureSpec(shape=values.shape[1:], dtype="string", stored="bytes")
    plain = {"i": "int", "f": "float"}.get(values.dtype.kind) if values.ndim == 1 else None
    stored = plain if values.dtype in (np.int64, np.float32) else None
    return FeatureSpec(shape=values.shape[1:], dtype=values.dtype.name, stored=stored or "raw")


def described(columns, targets, shards, roles):
    return {
        "dataset_schema": SCHEMA,
        "block_rows": BLOCK_ROWS,
        "splits": {
            split: {"examples": sum(each), "shards": each} for split, each in shards.items()
        },
        "features": {name: feature(each).to_json() for name, each in columns.items()},
        "inputs": [name for name in columns if name not in {*targets, *roles.values()}],
        "targets": list(targets),
        **NO_ROLES,
        **roles,
    }


def published(folder, columns, targets=("label",), *, test=TEST, **roles):
    """Publish columns as a dataset: the first rows are for testing, all others for training."""
    source = folder / "source"
    source.mkdir(parents=True)
    found = {name: feature(each) for name, each in columns.items()}
    shards = {}
    for split, rows in (("train", slice(test, None)), ("test", slice(test))):
        some = {name: each[rows] for name, each in columns.items()}
        shards[split] = write_shards(source, split, found, some, count=2)
    uri = storage.uri_of(folder / "dataset")
    fields = described(columns, targets, shards, roles)
    storage.publish(source, uri, kind="dataset", fields=fields)
    spec = DatasetSpec.from_manifest(storage.read_manifest(uri))
    return Splits(spec=spec, uri=uri, scratch=folder / "scratch")


@pytest.fixture
def held(monkeypatch, tmp_path):
    """Return a function like `published` that keeps the rows in memory instead of in files."""

    def hold(columns, targets=("label",), *, test=TEST):
        def rows(names, place):
            labels = {name: columns[name][place] for name in targets}
            return Rows(
                columns={name: columns[name][place] for name in names},
                labels=labels if len(labels) > 1 else labels[targets[0]],
                weights=np.ones(len(labels[targets[0]])),
            )

        def train(_splits, names, most, _clock):
            return rows(names, slice(test, None)).first(most)

        monkeypatch.setattr(baselines, "training_rows", train)
        monkeypatch.setattr(baselines, "stage_shards", lambda *_: [])
        monkeypatch.setattr(
            baselines, "batches", lambda _, __, names, ___: [rows(names, slice(test))]
        )
        shards = {"train": [len(columns[targets[0]]) - test], "test": [test]}
        fields = described(columns, targets, shards, {})
        spec = DatasetSpec.from_manifest(Manifest("dataset", (), fields))
        return Splits(spec=spec, uri="", scratch=tmp_path)

    return hold


def numbers(rows=ROWS):
    return RANDOM.normal(size=rows).astype("float32")


def target(name="label", dtype="int64", shape=(), **facts):
    return Target(name=name, shape=shape, dtype=dtype, **facts)


def by_name(found):
    return {each.name: each for each in found}


def test_a_table_of_two_classes(tmp_path):
    x, town = numbers(), RANDOM.integers(3, size=ROWS)
    label = (x + (town == 1) * 2 > 0.5).astype("int64")
    towns = np.array([b"Rome", b"Oslo", b"Bonn"], object)[town]
    splits = published(tmp_path, {"x": x, "town": towns, "label": label})
    found = by_name(fit_baselines(BinaryClassification(target()), splits))
    assert list(found) == ["linear", "gradient boosting"]
    for each in found.values():
        assert each.skipped == ""
        assert (each.rows, each.of_rows) == (ROWS - TEST, ROWS - TEST)
        assert each.outputs.shape == (TEST, 1)
        assert ((each.outputs[:, 0] > 0) == label[:TEST]).mean() > 0.9
    assert found["linear"].made_by == "scikit-learn LogisticRegression"


def test_without_time_nothing_is_fitted(tmp_path):
    x = numbers()
    splits = published(tmp_path, {"x": x, "label": (x > 0).astype("int64")})
    (found,) = fit_baselines(BinaryClassification(target()), splits, 0.0)
    assert (found.name, found.skipped) == ("baseline", "the time limit was reached")


def test_a_class_that_training_has_not_seen_is_not_impossible(held):
    label = np.concatenate([np.arange(TEST) % 4, np.arange(ROWS - TEST) % 3])
    splits = held({"x": label + 0.1 * numbers(), "label": label})
    for each in fit_baselines(Classification(target(num_classes=5)), splits):
        assert each.skipped == ""
        assert each.outputs.shape == (TEST, 5)
        assert np.isfinite(each.outputs).all()
        sure = np.exp(each.outputs)
        np.testing.assert_allclose(sure.sum(axis=1), 1, atol=1e-4)
        assert (sure[:, 3:] < 1e-5).all()


def test_numbers_keep_their_units(held):
    x = numbers()
    label = (3e12 + 1e12 * x).astype("float32")
    splits = held({"x": x, "label": label})
    for standardize in (False, True):
        moments = {"mean": 3e12, "std": 1e12, "min": 0.0, "max": 6e12}
        task = Regression(target(dtype="float32", moments=moments), standardize=standardize)
        for each in fit_baselines(task, splits):
            assert (each.skipped, each.outputs.shape) == ("", (TEST, 1))
            error = np.asarray(task.predictions(each.outputs))[:, 0] - label[:TEST]
            assert np.abs(error).mean() < 1e11


def test_several_labels_are_learnt_one_by_one(held):
    x, y = numbers(), numbers()
    row = np.stack([x > 0, y > 0, x > y], axis=1).astype("int64")
    splits = held({"x": x, "y": y, "row": row, "sum": x + y}, ("row", "sum"))
    tasks = {
        "row": MultilabelClassification(target("row", shape=(3,))),
        "sum": Regression(target("sum", "float32")),
    }
    found = fit_baselines(MultiOutput(tasks, dict.fromkeys(tasks, 1.0)), splits)
    assert found[0].made_by == "scikit-learn LogisticRegression and Ridge"
    for each in found:
        assert each.skipped == ""
        assert ((each.outputs["row"] > 0) == row[:TEST]).mean() > 0.9
        assert np.abs(each.outputs["sum"][:, 0] - (x + y)[:TEST]).mean() < 0.5


WORDS = {
    "latin": (b"a good and lovely film", b"a bad and boring film"),
    "chinese": (
        "\u8fd9\u90e8\u7535\u5f71\u5f88\u597d".encode(),
        "\u8fd9\u90e8\u7535\u5f71\u4e0d\u597d".encode(),
    ),
    "japanese": (
        "\u7d20\u6674\u3089\u3057\u3044\u6620\u753b".encode(),
        "\u3064\u307e\u3089\u306a\u3044\u6620\u753b".encode(),
    ),
    "long": (b"yes " + b"x" * 1_000_000, b"no " + b"x" * 1_000_000),
    "bytes": (b"\xff\xfe good", b"\xff\xfe bad"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_texts(held, tmp_path, kind):
    rows, test = (30, 8) if kind == "long" else (ROWS, TEST)
    label = np.arange(rows) % 2
    texts = [b"%d " % number + WORDS[kind][each] for number, each in enumerate(label)]
    columns = {"text": np.array(texts, object), "label": label}
    is_read = kind in ("latin", "long", "bytes")
    splits = published(tmp_path, columns, test=test) if is_read else held(columns, test=test)
    (found,) = fit_baselines(BinaryClassification(target()), splits)
    assert (found.name, found.skipped) == ("TF-IDF, linear", "")
    assert found.made_by == "scikit-learn LogisticRegression on TF-IDF features"
    assert ((found.outputs[:, 0] > 0) == label[:test]).all()


def test_a_table_with_a_text_leaves_it_out_of_the_trees(held):
    x, label = numbers(), np.arange(ROWS) % 2
    texts = np.array([b"word%d is %d" % (n, each) for n, each in enumerate(label)], object)
    splits = held({"x": x, "note": texts, "label": label})
    found = by_name(fit_baselines(BinaryClassification(target()), splits))
    assert list(found) == ["linear", "gradient boosting"]
    assert found["gradient boosting"].made_by.endswith("Classifier, without note")
    assert ((found["linear"].outputs[:, 0] > 0) == label[:TEST]).all()


COLUMNS = {
    "constant": lambda: np.zeros(ROWS, "float32"),
    "missing": lambda: np.full(ROWS, np.nan, "float32"),
    "infinite": lambda: np.where(numbers() > 0, np.inf, -np.inf).astype("float32"),
    "huge": lambda: (numbers().clip(-3, 3) * 1e38).astype("float32"),
    "huge doubles": lambda: numbers().astype("float64") * 1e300,
    "ids": lambda: RANDOM.integers(-(2**62), 2**62, ROWS),
    "unsigned": lambda: RANDOM.integers(0, 2**63, ROWS).astype("uint64"),
    "truth": lambda: numbers() > 0,
    "empty texts": lambda: np.array([b""] * ROWS, object),
    "own texts": lambda: np.array([b"%d" % n for n in range(ROWS)], object),
    "vector": lambda: RANDOM.normal(size=(ROWS, 600)).astype("float32"),
    "picture": lambda: RANDOM.integers(0, 255, (ROWS, 8, 8, 1)).astype("uint8"),
    "halves": lambda: numbers().astype("float16"),
}


@pytest.mark.parametrize("kind", COLUMNS)
def test_no_column_alone_fails_it(held, monkeypatch, kind):
    monkeypatch.setattr(baselines, "_MOST_ITERATIONS", 5)
    splits = held({"odd": COLUMNS[kind](), "label": (numbers() > 0).astype("int64")})
    for each in fit_baselines(BinaryClassification(target()), splits):
        assert each.skipped == ""
        assert np.isfinite(each.outputs).all()


def test_odd_columns_do_not_hide_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "_MOST_ITERATIONS", 10)
    x = numbers()
    label = (x > 0).astype("int64")
    odd = {kind: make() for kind, make in COLUMNS.items()}
    splits = published(tmp_path, {"x": x, **odd, "label": label})
    for each in fit_baselines(BinaryClassification(target()), splits):
        assert each.skipped == ""
        # With 600 noise columns and 280 rows, a linear model does worse.
        if each.name != "linear":
            assert ((each.outputs[:, 0] > 0) == label[:TEST]).mean() > 0.8


@pytest.mark.parametrize("rows", [1, 20])
def test_few_rows(held, rows):
    x = numbers(TEST + rows)
    for each in fit_baselines(Regression(target(dtype="float32")), held({"x": x, "label": x})):
        assert each.skipped == ""
        assert each.outputs.shape == (TEST, 1)


def test_one_class_in_training_is_said(held):
    label = np.where(np.arange(ROWS) < TEST, np.arange(ROWS) % 2, 1)
    splits = held({"x": numbers(), "label": label})
    found = by_name(fit_baselines(BinaryClassification(target()), splits))
    assert "class" in found["linear"].skipped


def test_examples_without_weight_are_none(tmp_path):
    x = numbers()
    label, weight = (x > 0).astype("int64"), np.ones(ROWS, "float32")
    label[ROWS // 2 :], weight[ROWS // 2 :] = 1 - label[ROWS // 2 :], 0
    columns = {"x": x, "label": label, "weight": weight}
    splits = published(tmp_path, columns, weight="weight")
    for each in fit_baselines(BinaryClassification(target()), splits):
        assert (each.rows, each.of_rows) == (ROWS // 2 - TEST, ROWS - TEST)
        assert ((each.outputs[:, 0] > 0) == label[:TEST]).mean() > 0.9
    splits = published(tmp_path / "none", {**columns, "weight": weight * 0}, weight="weight")
    (found,) = fit_baselines(BinaryClassification(target()), splits)
    assert found.skipped == "the weights of all training examples are 0"


def test_a_sample_is_drawn_and_only_the_first_ones_are_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(baselines, "MOST_ROWS", 100)
    x = numbers()
    splits = published(tmp_path, {"x": x, "label": (x > 0).astype("int64")})
    monkeypatch.setattr(baselines, "_FEWEST_ROWS", 10)
    for each in fit_baselines(BinaryClassification(target()), splits):
        assert (each.rows, each.of_rows) == (100, ROWS - TEST)
        assert len(each.outputs) == 100
        assert ((each.outputs[:, 0] > 0) == (x[:100] > 0)).mean() > 0.9


def test_recommendations(tmp_path):
    users, items = 60, 30
    user, item = (each.ravel() for each in np.meshgrid(range(users), range(items), indexing="ij"))
    # Each half of the users chooses items that the other half does not choose.
    label = ((user % 2 == item % 2) & (RANDOM.random(len(user)) < 0.8)).astype("int64")
    order = RANDOM.permutation(len(user))
    columns = {
        "user": np.array([b"u%d" % each for each in user], object)[order],
        "item": item.astype("int64")[order],
        "label": label[order],
    }
    splits = published(tmp_path, columns, group="user")
    splits = replace(splits, spec=replace(splits.spec, inputs=("user", "item")))
    task = Recommendation(target(), group="user", item="item", k=[5])
    found = by_name(fit_baselines(task, splits))
    assert list(found) == ["popularity", "item-item"]
    assert [each.skipped for each in found.values()] == ["", ""]
    outputs = found["item-item"].outputs
    size = (outputs.shape[1] - 1) // 2
    fits = np.sum(outputs[:, 1 : 1 + size] * outputs[:, 1 + size :], axis=1)
    taken = columns["label"][:TEST].astype(bool)
    assert fits[taken].min() > np.median(fits[~taken])
    assert outputs[taken, 0].mean() > outputs[~taken, 0].mean() + 1
    assert found["popularity"].outputs.shape == (TEST, 3)


class Own(Classification):
    """A user's own task."""


def test_what_no_baseline_is_for(held):
    columns = {"x": numbers(), "label": np.arange(ROWS) % 2}
    splits = held(columns)
    (found,) = fit_baselines(Own(target(num_classes=2)), splits)
    assert (found.name, found.skipped) == ("baseline", "baselines do not support custom tasks")
    picture = RANDOM.integers(0, 255, (ROWS, 20, 20, 3)).astype("uint8")
    splits = held({"picture": picture, "label": columns["label"]})
    (found,) = fit_baselines(BinaryClassification(target()), splits)
    assert found.skipped == "none of the inputs is a number, a class or a string"


def test_a_failure_is_one_line(held, monkeypatch):
    def fails(*_, **__):
        raise MemoryError("no\nmemory")

    x = numbers()
    monkeypatch.setattr("sklearn.linear_model.LogisticRegression.fit", fails)
    splits = held({"x": x, "label": (x > 0).astype("int64")})
    found = by_name(fit_baselines(BinaryClassification(target()), splits))
    assert found["linear"].skipped.startswith("MemoryError: no (")
    assert found["gradient boosting"].skipped == ""

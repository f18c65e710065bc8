"""Tests that statistics do not depend on parts and batches, and the association of two columns."""

import dataclasses

import numpy as np
import pytest
from scipy import stats

from flotilla.trainer.data.columns import make_columns
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics import accumulator, one_pass
from flotilla.trainer.features.statistics.accumulator import Accumulator, measure_association

SPECS = {
    "age": FeatureSpec(shape=(), dtype="float32", stored="float"),
    "city": FeatureSpec(shape=(), dtype="string", stored="bytes"),
    "review": FeatureSpec(shape=(), dtype="string", stored="bytes"),
    "pixels": FeatureSpec(shape=(4, 2), dtype="uint8", stored="raw"),
    "row": FeatureSpec(shape=(2,), dtype="float32", stored="raw"),
    "label": FeatureSpec(
        shape=(), dtype="int64", stored="int", num_classes=2, labels=("no", "yes")
    ),
}
INPUTS = ("age", "city", "review", "pixels", "row")


def examples(count, seed=0):
    random = np.random.default_rng(seed)
    label = random.integers(0, 2, count)
    age = random.normal(30 + 10 * label, 5).astype(np.float32)
    age[::10] = np.nan
    cities = np.array([b"Rome", b"Oslo", b""], object)[random.integers(0, 3, count)]
    reviews = np.array([b"Good, good film!", b"bad film"], object)[1 - label]
    pixels = random.integers(0, 256, (count, 4, 2)).astype(np.uint8)
    row = np.stack([age, 1e6 + age * 1e3], axis=1).astype(np.float32)
    texts = {"city": cities, "review": reviews}
    return {"age": age, **texts, "pixels": pixels, "row": row, "label": label}


def accumulated(columns, cuts=(), seed=0):
    found = Accumulator(SPECS, INPUTS, ("label",), vocabulary=100, seed=seed)
    size = len(columns["label"])
    for start, end in zip((0, *cuts), (*cuts, size), strict=True):
        found.add(make_columns(SPECS, {name: each[start:end] for name, each in columns.items()}))
    return found


def test_numbers():
    columns = examples(2000)
    age = accumulated(columns).result().features["age"]
    there = columns["age"][np.isfinite(columns["age"])].astype(np.float64)
    assert (age.kind, age.examples, age.missing) == ("number", 2000, 200)
    assert age.mean == pytest.approx(there.mean())
    assert age.std == pytest.approx(there.std())
    assert (age.least, age.most) == (there.min(), there.max())
    assert age.quantiles[500] == pytest.approx(np.median(there))
    assert age.association["label"] == pytest.approx(0.7, abs=0.05)
    assert age.distinct == len(np.unique(there))


def test_texts():
    columns = examples(2000)
    found = accumulated(columns).result().features
    cities = columns["city"].tolist()
    city, review = found["city"], found["review"]
    assert city.counts == {
        name: cities.count(name.encode())
        for name in sorted(("Rome", "Oslo"), key=lambda each: -cities.count(each.encode()))
    }
    assert (city.kind, city.missing, city.distinct) == ("text", cities.count(b""), 2)
    # Words are counted once per text, however often they occur in it.
    assert review.words["film"] == 2000
    assert review.words["good"] == review.counts["Good, good film!"]
    assert city.words == {name.lower(): count for name, count in city.counts.items()}
    assert review.pairs["good film"] == review.counts["Good, good film!"]
    assert review.association["label"] == pytest.approx(1, abs=1e-3)


def test_tensors_and_classes():
    columns = examples(500)
    found = accumulated(columns).result().features
    pixels, label = found["pixels"], found["label"]
    assert pixels.kind == "tensor"
    assert pixels.mean == pytest.approx(columns["pixels"].mean())
    assert pixels.std == pytest.approx(columns["pixels"].std())
    means = columns["pixels"].reshape(500, -1).mean(1)
    assert (pixels.quantiles[0], pixels.quantiles[-1]) == (means.min(), means.max())
    assert pixels.means == ()
    row = columns["row"][np.isfinite(columns["row"][:, 0])].astype(np.float64)
    assert found["row"].missing == 50
    np.testing.assert_allclose(found["row"].means, row.mean(0))
    np.testing.assert_allclose(found["row"].stds, row.std(0))
    ones = int(columns["label"].sum())
    assert label.counts == {"yes": ones, "no": 500 - ones}


@pytest.mark.parametrize("cuts", [(100,), (1, 2, 1999), tuple(range(7, 2000, 7))])
def test_batches_change_nothing(cuts):
    columns = examples(2000)
    assert_same(accumulated(columns, cuts).result(), accumulated(columns).result())


def test_parts_change_nothing_but_the_draw():
    columns = examples(2000)
    merged = Accumulator(SPECS, INPUTS, ("label",), vocabulary=100)
    for part, places in enumerate(np.array_split(np.arange(2000), 3)):
        one = accumulated({name: each[places] for name, each in columns.items()}, seed=(part, 0))
        again = Accumulator(SPECS, INPUTS, ("label",), vocabulary=100)
        again.restore(one.arrays())
        merged.merge(again)
    whole = accumulated(columns)
    assert_same(merged.result(), whole.result())
    one, two = merged.sketch(), whole.sketch()
    assert one.hashes.tolist() == two.hashes.tolist()
    assert one.copies.tolist() == two.copies.tolist()
    assert one.is_whole
    assert sorted(one.sample["pixels"]) == sorted(two.sample["pixels"])


def assert_same(first, second):
    assert first.examples == second.examples
    for name, one in first.features.items():
        found, expected = dataclasses.asdict(one), dataclasses.asdict(second.features[name])
        for floats in ("mean", "std", "means", "stds", "quantiles", "association"):
            assert found.pop(floats) == pytest.approx(expected.pop(floats)), (name, floats)
        assert found == expected


def test_no_example_has_no_number():
    found = accumulated(examples(0)).result()
    assert found.examples == 0
    assert found.features["age"].mean is None
    assert found.features["age"].quantiles == ()


def test_a_column_of_gaps_alone():
    columns = examples(50)
    columns["age"][:] = np.nan
    age = accumulated(columns).result().features["age"]
    assert (age.missing, age.mean, age.quantiles, age.association["label"]) == (50, None, (), 0)
    assert age.distinct == 0


def test_sequences_of_any_length():
    specs = {
        "steps": FeatureSpec(shape=(None, 2), dtype="float32", stored="sequence"),
        "label": SPECS["label"],
    }
    rows = np.empty(3, object)
    rows[:] = [np.ones((each, 2), np.float32) * each for each in (1, 2, 0)]
    found = Accumulator(specs, ("steps",), ("label",), vocabulary=10)
    found.add(make_columns(specs, {"steps": rows, "label": np.array([0, 1, 1])}))
    steps = found.result().features["steps"]
    assert (steps.kind, steps.mean) == ("tensor", pytest.approx(10 / 6))
    assert (steps.least, steps.most) == (1, 2)


def test_texts_beyond_the_limit_are_estimated_whatever_the_parts(monkeypatch):
    monkeypatch.setattr(one_pass, "_MOST_PENDING", 100)
    specs = {"id": SPECS["city"]}
    merged = Accumulator(specs, ("id",), (), vocabulary=10)
    for part in range(3):
        one = Accumulator(specs, ("id",), (), vocabulary=10, seed=part)
        for start in range(0, 3000, 500):
            # All parts contain the same texts.
            ids = np.array([b"%d" % each for each in range(start, start + 500)], object)
            one.add(make_columns(specs, {"id": ids}))
        again = Accumulator(specs, ("id",), (), vocabulary=10)
        again.restore(one.arrays())
        merged.merge(again)
    assert merged.result().features["id"].distinct == 3000


def test_texts_that_are_a_dictionary_already_give_the_same():
    columns = make_columns(SPECS, examples(300))
    coded = {name: columns[name].dictionary_encode() for name in ("city", "review")}
    found = []
    for each in (columns, columns | coded):
        found.append(Accumulator(SPECS, tuple(SPECS), (), vocabulary=10))
        found[-1].add(each)
    assert_same(*(each.result() for each in found))
    first, second = (each.sketch() for each in found)
    assert first.hashes.tolist() == second.hashes.tolist()
    for name, column in first.sample.items():
        np.testing.assert_array_equal(column, second.sample[name])


def test_lists_of_texts_count_their_texts():
    specs = {"names": FeatureSpec(shape=(2,), dtype="string", stored="bytes")}
    found = Accumulator(specs, ("names",), (), vocabulary=10)
    names = np.array([[b"a", b""], [b"", b""], [b"a", b"b"]], object)
    found.add(make_columns(specs, {"names": names}))
    names = found.result().features["names"]
    assert (names.missing, names.distinct, names.counts) == (1, 2, {"a": 2, "b": 1})


RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.normal(size=2000)
CLASSES = RANDOM.integers(0, 3, 2000).astype(float)
KINDS = [(False, False), (False, True), (True, False), (True, True)]


def of(first, second, kinds):
    return measure_association(first, second, first_is_class=kinds[0], second_is_class=kinds[1])


@pytest.mark.parametrize("kinds", KINDS)
def test_what_is_independent_says_nothing_and_what_is_equal_all(kinds):
    assert of(CLASSES, RANDOM.permutation(CLASSES), kinds) < 0.1
    assert of(CLASSES, CLASSES, kinds) == pytest.approx(1, abs=1e-3)
    assert of(np.ones(2000), CLASSES, kinds) == 0
    # Missing values are left out.
    gaps = np.where(np.arange(2000) % 2, CLASSES, np.nan)
    assert of(gaps, CLASSES, kinds) == pytest.approx(1, abs=1e-2)
    assert of(np.full(2000, np.nan), CLASSES, kinds) == 0


FAR, OTHER_FAR, FAR_CLASS = (
    np.array([first, *RANDOM.permutation(values[1:])])
    for first, values in ((1e9, NUMBERS), (1e9, NUMBERS), (3, CLASSES))
)
EVEN, MANY = CLASSES - 1, np.arange(2000.0)


@pytest.mark.parametrize(
    ("first", "second", "kinds", "most"),
    [
        # One far value says nothing.
        (FAR, OTHER_FAR, (False, False), 0.1),
        (FAR, FAR_CLASS, (False, True), 0.1),
        # A square is seen by classes alone.
        (EVEN, EVEN**2, (False, False), 0.1),
        # Many classes say nothing by chance.
        (MANY, CLASSES, (True, True), 0.1),
        (MANY, NUMBERS, (True, False), 0.15),
    ],
)
def test_what_says_little(first, second, kinds, most):
    assert of(first, second, kinds) < most
    assert of(EVEN, EVEN**2, (True, False)) > 0.99


def test_it_is_the_correlation_of_ranks():
    other = NUMBERS + RANDOM.normal(size=2000)
    expected = abs(stats.spearmanr(NUMBERS, other).statistic)
    assert of(NUMBERS, other, (False, False)) == pytest.approx(expected)


def test_equal_values_have_the_mean_of_their_ranks():
    values = np.array([3.0, -1.0, 3.0, 0.0, 3.0, 0.0])
    assert accumulator._ranks(values).tolist() == stats.rankdata(values).tolist()

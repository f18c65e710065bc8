"""Tests which differences the rules of structure, values, examples and drift report."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from flotilla.trainer.config.data import SplitsConfig
from flotilla.trainer.data_gate import drift, leaks, values
from flotilla.trainer.data_gate.profile import FeatureProfile, SplitProfile
from flotilla.trainer.data_gate.validate import find_all
from tests.trainer.data_gate.skews import table
from tests.trainer.data_gate.tables import profile, question, split_of


def made(**columns):
    return profile(split_of({**table(np.random.default_rng(0), 100), **columns}))


def test_the_structure_is_compared_with_that_of_the_champion():
    old = made()
    new = made(hieght=np.ones(100))
    del new.specs["height"]
    bare = replace(new, splits={"train": replace(new.splits["train"], features={})})
    found = {each.rule: each.says for each in values.features(question(bare, old))}
    assert set(found) == {"missing_feature", "new_feature"}
    assert "did you mean 'hieght'?" in found["missing_feature"]
    old, new = made(id=np.arange(100)), made(id=np.arange(100.0))
    (found,) = values.features(question(new, old))
    assert found.rule == "type"
    assert "(whole numbers with missing values are read as floats)" in found.says
    (found,) = values.features(question(old, new))
    assert "missing" not in found.says
    new = made()
    splits = {**new.splits, "test": replace(new.splits["test"], examples=0)}
    (found,) = values.sizes(question(replace(new, splits=splits)))
    assert (found.rule, found.split) == ("empty", "test")


def rows(seed, **columns):
    rng = np.random.default_rng(seed)
    size = 800
    made = {name: make(rng, size) for name, make in columns.items()}
    return profile(split_of({**made, "label": (rng.random(size) < 0.5).astype(int)}))


def heights(factor, offset=0.0):
    return lambda rng, size: factor * (20 + 6 * rng.gamma(4, 1, size)) + offset


@pytest.mark.parametrize(
    ("factor", "offset", "says"),
    [
        (1000, 0, "times 1000 (thousands)"), (1e-3, 0, "divided by 1000 (thousands)"),
        (100, 0, "times 100 (hundreds"), (1 / 2.54, 0, "divided by 2.54 (inches)"),
        (1.8, 32, "times 1.8 (degrees Fahrenheit)"), (60, 0, "times 60 (minutes)"),
    ],
)  # fmt: skip
def test_the_unit_is_named(factor, offset, says):
    new, old = rows(1, x=heights(factor, offset)), rows(2, x=heights(1))
    (found,) = values.unit(question(new, old))
    assert says in found.says


def test_chance_is_no_unit_no_new_category_and_no_copy():
    assert not list(values.unit(question(rows(1, x=heights(1, 9)), rows(2, x=heights(1)))))

    def words(rng, size):
        return rng.zipf(1.5, size).astype("U")

    for seed in range(6):
        asked = question(rows(seed, word=words), rows(seed + 50, word=words))
        assert not list(values.new_values(asked))
    for seed in range(4):
        asked = question(answers(seed), answers(seed + 20))
        assert not [*leaks.duplicates(asked), *leaks.leakage(asked)]


def answers(seed, size=2000):
    rng = np.random.default_rng(seed)
    columns = {f"q{n}": rng.choice(["yes", "no", "?"], size) for n in range(4)}
    return profile(split_of({**columns, "label": (rng.random(size) < 0.5).astype(int)}))


def test_leakage_is_estimated_from_the_smallest_hashes():
    rng = np.random.default_rng(0)
    hashes = np.sort(rng.integers(0, 2**63, 30_000).astype(np.uint64))
    one = np.ones(10_000, np.int64)
    known = SplitProfile(examples=30_000, hashes=hashes[:10_000], copies=one, is_whole=False)
    tenth = hashes[::10]
    asked = SplitProfile(examples=3_000, hashes=tenth, copies=np.ones(3_000, np.int64))
    assert leaks.count_shared(asked, known) == (1000, 1000)
    other = SplitProfile(examples=3_000, hashes=tenth + np.uint64(1), copies=asked.copies)
    assert leaks.count_shared(other, known) == (1000, 0)


def dependent(seed, size=1000, width=40):
    rng = np.random.default_rng(seed)
    common = rng.normal(size=size)
    columns = {f"x{n}": common + 0.1 * rng.normal(size=size) for n in range(width)}
    return profile(split_of({**columns, "label": (rng.random(size) < 0.5).astype(int)}))


@pytest.mark.slow
def test_columns_that_repeat_each_other_count_as_one():
    found = [
        list(drift.compare_together(question(dependent(n), dependent(n + 100)))) for n in range(40)
    ]
    assert not any(found)


def test_few_features_and_few_rows_are_not_tested_together():
    assert not list(drift.compare_together(question(dependent(0, width=3), dependent(1, width=3))))
    assert not list(drift.compare_together(question(dependent(0, size=30), dependent(1, size=30))))


def test_the_tests_of_two_samples_are_those_of_scipy():
    rng = np.random.default_rng(0)
    new, old = np.sort(rng.normal(size=300)), np.sort(rng.normal(0.2, 1, size=200))
    size, chance = drift.kolmogorov_smirnov(new, old)
    known = stats.ks_2samp(new, old, method="asymp")
    assert size == pytest.approx(known.statistic)
    assert chance == pytest.approx(known.pvalue, rel=0.3)
    assert drift.exceeds(new, old) == pytest.approx(
        stats.mannwhitneyu(new, old).statistic / 300 / 200
    )
    exact = stats.fisher_exact([[8, 92], [2, 198]], alternative="greater").pvalue
    assert drift.fisher_test(8, 100, 2, 200) == pytest.approx(exact)
    assert drift.absence_test(3, 100, 100) == pytest.approx(0.123, abs=0.01)


def test_many_tests_are_corrected_and_rare_values_are_one():
    assert drift.holm({"a": 0.004, "b": 0.03, "c": 0.9}, 0.05) == {"a"}
    assert drift.holm({"a": 0.004, "b": 0.02, "c": 0.9}, 0.05) == {"a", "b"}
    assert drift.holm({}, 0.05) == set()
    old = {"a": 500, "b": 480, **{f"x{n}": 1 for n in range(20)}}
    new = {"a": 490, "b": 490, **{f"y{n}": 1 for n in range(20)}}
    _, chance = drift.homogeneity(new, old)
    assert chance > 0.1
    assert drift.homogeneity({"a": 1}, {"a": 9}) == (0.0, 1.0)
    moved, chance = drift.homogeneity({"a": 700, "b": 300}, {"a": 500, "b": 500})
    assert moved == pytest.approx(0.2)
    assert chance < 1e-10


def ordinary(seed):
    """Return a table without errors, with columns of many kinds independent of the label."""
    rng = np.random.default_rng(seed)
    size = int(rng.choice([150, 400, 1500]))
    kinds = [
        rng.normal(size=size), rng.lognormal(0, 2, size), rng.integers(18, 90, size),
        rng.normal(size=size).round(1), rng.choice(list("abcdefgh"), size), rng.permutation(size),
        np.array([f"text {n}" for n in range(size)]), rng.zipf(1.5, size).clip(0, 999).astype("U"),
        np.where(rng.random(size) < 0.9, np.nan, rng.normal(size=size)),
        np.where(rng.random(size) < 0.85, 0, rng.exponential(size=size)),
    ]  # fmt: skip
    columns = {f"x{n}": kinds[place] for n, place in enumerate(rng.integers(0, len(kinds), 12))}
    label = rng.integers(0, 2, size) if seed % 2 else rng.lognormal(size=size)
    return {**columns, "label": label}


def test_ordinary_tables_have_no_finding_and_few_different_rows_no_copies():
    for seed in range(12):
        assert not find_all(question(profile(split_of(ordinary(seed)))))
    rng = np.random.default_rng(0)
    for make in (lambda: rng.normal(size=700).round(2), lambda: rng.integers(18, 90, 700) / 1.0):
        columns = {"x": make(), "k": np.full(700, "a"), "label": rng.integers(0, 2, 700)}
        found = find_all(question(profile(split_of(columns))))
        assert {each.rule for each in found} == {"constant"}


def drawn_by_group(seed, **splits):
    rng = np.random.default_rng(seed)
    user = np.repeat(np.arange(40), 25)
    columns = {
        "user": user,
        "x": rng.normal(size=40)[user] + rng.normal(size=1000) / 9,
        "label": rng.integers(0, 2, 1000),
    }
    asked = question(profile(split_of(columns)))
    return {each.rule for each in find_all(replace(asked, splits=SplitsConfig(**splits)))}


def test_examples_of_a_group_count_as_one():
    assert any("splits_differ" in drawn_by_group(seed, column="other") for seed in range(9))
    assert not any(drawn_by_group(seed, group="user") for seed in range(5))


def test_what_makes_the_splits_is_not_compared():
    rng = np.random.default_rng(0)
    splits = split_of(
        {"x": rng.normal(size=900), "at": np.arange(900.0), "label": np.arange(900) % 2}
    )
    for name, columns in splits.items():
        columns["part"] = np.full(len(columns["x"]), name)
    asked = question(profile(splits))
    found = {each.rule for each in find_all(asked)}
    assert {"constant", "splits_differ"} <= found
    dropped = replace(asked, dataset=replace(asked.dataset, inputs=("x",)))
    assert not find_all(replace(dropped, splits=SplitsConfig(column="part")))
    assert not find_all(replace(dropped, splits=SplitsConfig(time="at")))


def test_a_feature_that_is_rarely_there_may_be_absent_from_the_test_split():
    columns = {**table(np.random.default_rng(0), 200), "rare": np.full(200, np.nan)}
    columns["rare"][[3, 50, 90]] = [1.0, 2.0, 3.0]
    assert "empty" not in {each.rule for each in find_all(question(profile(split_of(columns))))}
    columns["rare"][:150] = 1.5
    assert "empty" in {each.rule for each in find_all(question(profile(split_of(columns))))}


def test_unique_texts_are_alike_whether_all_are_counted_or_not():
    def made(count, start):
        spec = {"counts": {f"text {n}": 1 for n in range(start, start + min(count, 1000))}}
        return FeatureProfile(kind="text", examples=count, distinct=count, **spec)

    _, chance = drift.compare_samples(made(500, 0), made(9000, 5000))
    assert chance > 0.5

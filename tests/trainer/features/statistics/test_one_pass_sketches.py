"""Tests that a sample represents all examples, and the smallest hashes all hashes."""

import numpy as np
import pytest

from flotilla.trainer.features.statistics import one_pass
from flotilla.trainer.features.statistics.hashing import hashes
from flotilla.trainer.features.statistics.one_pass import Hashes, Sample


def sampled(values, seed):
    sample = Sample(["x"], seed)
    for part in np.array_split(values, 5):
        chosen = sample.choose(len(part))
        sample.keep({"x": part[chosen]})
    return sample


def test_few_examples_are_all_kept():
    found = sampled(np.arange(1000.0), 0).columns()["x"]
    assert sorted(found) == list(range(1000))


def test_every_example_is_as_likely_whichever_part_it_is_in(monkeypatch):
    monkeypatch.setattr(one_pass, "MOST_EXAMPLES", 2000)
    whole = Sample(["x"], 99)
    for part, values in enumerate(np.array_split(np.arange(40_000.0), 4)):
        again = Sample(["x"], 0)
        again.restore(sampled(values, (part, 0)).arrays())
        whole.merge(again)
    found = whole.columns()["x"]
    assert len(found) == len(set(found)) == 2000
    # The limit of 80 is about four standard deviations of the count in a quarter.
    quarters = np.histogram(found, 4, (0, 40_000))[0]
    assert np.abs(quarters - 500).max() < 80


def test_the_same_seed_draws_the_same():
    first, second = (sampled(np.arange(50_000.0), 7).columns()["x"] for _ in range(2))
    assert first.tolist() == second.tolist()


def test_few_hashes_are_whole_with_their_copies():
    hashes = Hashes()
    hashes.add(np.array([5, 3, 5], np.uint64))
    hashes.add(np.array([3, 9], np.uint64))
    found, copies = hashes.smallest()
    assert (found.tolist(), copies.tolist(), hashes.is_whole) == ([3, 5, 9], [2, 2, 1], True)


def test_the_smallest_of_many_are_those_of_all_parts(monkeypatch):
    monkeypatch.setattr(one_pass, "MOST_HASHES", 100)
    drawn = np.random.default_rng(0).integers(0, 5000, 20_000).astype(np.uint64)
    merged = Hashes()
    for part in np.array_split(drawn, 7):
        one = Hashes()
        for few in np.array_split(part, 3):
            one.add(few)
        again = Hashes()
        again.restore(one.arrays())
        merged.merge(again)
    found, copies = merged.smallest()
    values, counts = np.unique(drawn, return_counts=True)
    assert found.tolist() == values[: len(found)].tolist()
    assert copies.tolist() == counts[: len(found)].tolist()
    assert not merged.is_whole
    assert len(found) <= 100


def hashed(values, parts=5):
    whole = Hashes(1000)
    for part in np.array_split(values, parts):
        one = Hashes(1000)
        one.add(hashes({"": part}, 0))
        again = Hashes(1000)
        again.restore(one.arrays("x/"), "x/")
        whole.merge(again)
    return whole


@pytest.mark.parametrize("rows", [500, 50_000])
def test_few_values_are_counted_exactly_however_many_rows(rows):
    values = np.random.default_rng(0).integers(18, 90, rows)
    assert hashed(values).distinct(rows) == len(np.unique(values)) == 72


@pytest.mark.parametrize("power", [1, 4], ids=["even", "skewed"])
@pytest.mark.parametrize("values", [1001, 20_000, 10**9])
def test_many_values_are_counted_within_a_few_percent(values, power):
    drawn = (values * np.random.default_rng(1).random(100_000) ** power).astype(np.int64)
    known = len(np.unique(drawn))
    # The tolerance of 10 % is three standard errors of an estimate from 1,000 hashes.
    assert hashed(drawn).distinct(len(drawn)) == pytest.approx(known, rel=0.1)
    assert hashed(drawn).distinct() == pytest.approx(known, rel=0.1)


def test_values_that_are_all_different_are_as_many_as_the_rows():
    assert hashed(np.arange(30_000)).distinct(30_000) == 30_000

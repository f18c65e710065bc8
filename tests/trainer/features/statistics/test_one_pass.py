"""Tests counts up to a limit, one-pass moments, and samples and hashes of all examples."""

import numpy as np
import pyarrow as pa
import pytest

from flotilla.trainer.features.statistics import one_pass
from flotilla.trainer.features.statistics.hashing import hashes
from flotilla.trainer.features.statistics.one_pass import BoundedCounter, Hashes, Moments, Sample


def add(counter, *texts):
    counter.add(pa.array(texts, pa.large_binary()), np.ones(len(texts), np.int64))


def restored(counter, most):
    again = BoundedCounter(most)
    again.restore(counter.arrays("x/"), "x/")
    return again


def test_the_most_frequent_come_first_and_ties_by_value():
    counter = BoundedCounter(3)
    add(counter, b"b", b"a", b"c", b"c", b"d")
    assert list(counter.counts().items()) == [("c", 2), ("a", 1), ("b", 1)]
    assert (counter.distinct, counter.is_whole) == (4, True)


def test_parts_give_what_the_whole_gives():
    words = [b"%d" % each for each in np.random.default_rng(0).zipf(1.5, 2000)]
    whole, merged = BoundedCounter(2000), BoundedCounter(2000)
    add(whole, *words)
    for start in range(0, 2000, 300):
        part = BoundedCounter(2000)
        add(part, *words[start : start + 300])
        merged.merge(restored(part, 2000))
    assert merged.counts() == whole.counts()
    assert merged.distinct == whole.distinct == len(set(words))


def test_memory_is_bounded_and_the_frequent_stay(monkeypatch):
    monkeypatch.setattr(one_pass, "_MOST_PENDING", 50)
    counter = BoundedCounter(10)
    for start in range(0, 20_000, 100):
        add(counter, *[b"%d" % each for each in range(start, start + 100)])
        add(counter, *[b"often"] * 10)
    assert counter.distinct <= 40
    assert not counter.is_whole
    assert counter.counts()["often"] == 2000
    assert not restored(counter, 10).is_whole


def test_long_texts_do_not_wait_for_others(monkeypatch):
    monkeypatch.setattr(one_pass, "_MOST_BYTES", 1000)
    counter = BoundedCounter(1)
    for number in range(100):
        add(counter, b"%d" % number * 500)
        assert sum(each.nbytes for each, _ in counter._pending) <= 1000


def test_what_is_no_text_is_not_named():
    counter = BoundedCounter(10)
    add(counter, b"\xff\xfe", b"caf\xc3\xa9")
    assert counter.counts() == {"café": 1}


def test_any_bytes_survive_the_state():
    counter = BoundedCounter(10)
    add(counter, b"\x00\xff\n", b"\xc3\xa9", b"")
    found, again = counter.arrays("x/"), restored(counter, 10).arrays("x/")
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in again.items()
    }
    assert restored(BoundedCounter(10), 10).counts() == {}


def moments(*parts):
    found = Moments()
    for part in parts:
        found.add(part)
    assert np.ndim(found.mean) or Moments(*found.state()) == found
    return found


@pytest.mark.parametrize("cuts", [(), (1,), (0, 500), (10, 11, 12)])
def test_they_are_those_of_all_numbers(cuts):
    values = np.random.default_rng(0).normal(3, 2, 1000)
    found = Moments()
    for part in np.split(values, cuts):
        found.merge(moments(part))
    assert (found.count, found.least, found.most) == (1000, values.min(), values.max())
    assert found.mean == pytest.approx(values.mean())
    assert found.std == pytest.approx(values.std())


@pytest.mark.parametrize(
    ("parts", "std", "tolerance"),
    [
        # A large mean costs no digits, and a constant has no deviation.
        (np.split(1e9 + np.arange(100.0), 4), np.arange(100.0).std(), 1e-6),
        ([np.full(7, 0.1)] * 3, 0, 0),
        # Large integers have the spread of their last digits.
        (np.split(np.int64(10**18) + np.arange(1000), 2), np.arange(1000).std(), 0.2),
        ([np.int64(10**18) + np.arange(1000)], np.arange(1000).std(), 1e-7),
        ([np.array([-(2**63), 2**63 - 1])], 2.0**63, 1e-7),
        ([np.array([np.nan, -np.inf])], 0, 0),
    ],
)
def test_the_deviation_keeps_its_digits(parts, std, tolerance):
    np.testing.assert_allclose(moments(*parts).std, std, rtol=tolerance)


@pytest.mark.parametrize("kind", [np.float32, np.int64])
def test_moments_of_vectors_are_those_of_each_element(monkeypatch, kind):
    monkeypatch.setattr(one_pass, "_PART", 100)
    values = np.random.default_rng(0).normal(5, 100, (200, 3)).astype(kind)
    again = Moments(*map(np.array, moments(values[:50], values[50:]).state()))
    np.testing.assert_allclose(again.mean, values.mean(0, np.float64), rtol=1e-6)
    np.testing.assert_allclose(again.std, values.std(0, np.float64), rtol=1e-6)
    assert again.least.tolist() == values.min(0).tolist()
    # Values that are not finite are left out.
    found = moments(np.array([[1.0, np.nan], [3.0, np.inf], [5.0, 2.0]]))
    assert (found.count.tolist(), found.mean.tolist()) == ([3, 1], [3, 2])
    assert (found.least.tolist(), found.most.tolist()) == ([1, 2], [5, 2])


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

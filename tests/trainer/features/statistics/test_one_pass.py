"""Counts are exact up to a limit; one-pass means and deviations equal NumPy's two-pass ones."""

import numpy as np
import pytest

from flotilla.trainer.features.statistics.one_pass import BoundedCounter, Moments


def test_the_most_frequent_come_first_and_ties_by_value():
    counter = BoundedCounter(3)
    counter.add([b"b", b"a", b"c", b"c", b"d"])
    assert list(counter.counts().items()) == [("c", 2), ("a", 1), ("b", 1)]
    assert counter.distinct == 4


def test_parts_give_what_the_whole_gives():
    words = [b"%d" % each for each in np.random.default_rng(0).zipf(1.5, 2000)]
    whole, merged = BoundedCounter(2000), BoundedCounter(2000)
    whole.add(words)
    for start in range(0, 2000, 300):
        part = BoundedCounter(2000)
        part.add(words[start : start + 300])
        again = BoundedCounter(2000)
        again.restore(part.state())
        merged.merge(again)
    assert merged.counts() == whole.counts()
    assert merged.distinct == whole.distinct == len(set(words))


def test_memory_is_bounded_and_the_frequent_stay():
    counter = BoundedCounter(10)
    for start in range(0, 100_000, 100):
        counter.add([b"%d" % each for each in range(start, start + 100)])
        counter.add([b"often"] * 10)
    assert len(counter.state()["counts"]) <= 40
    assert counter.counts()["often"] == 10_000
    assert counter.distinct >= 100_001


def test_what_is_no_text_is_not_named():
    counter = BoundedCounter(10)
    counter.add([b"\xff\xfe", b"caf\xc3\xa9"])
    assert counter.counts() == {"café": 1}


def test_any_bytes_survive_the_state():
    counter, again = BoundedCounter(10), BoundedCounter(10)
    counter.add([b"\x00\xff\n", b"\xc3\xa9"])
    again.restore(counter.state())
    assert again.state() == counter.state()


def test_texts_that_come_again_after_they_were_left_out_count_once():
    whole = BoundedCounter(10)
    for _ in range(3):
        part, again = BoundedCounter(10), BoundedCounter(10)
        for number in range(5000):
            part.add([b"%d" % number])
        again.restore(part.state())
        whole.merge(again)
    assert whole.distinct == 5000


@pytest.mark.parametrize("cuts", [(), (1,), (0, 500), (10, 11, 12)])
def test_they_are_those_of_all_numbers(cuts):
    values = np.random.default_rng(0).normal(3, 2, 1000)
    found = Moments()
    for part in np.split(values, cuts):
        one = Moments()
        one.add(part)
        found.merge(one)
    assert (found.count, found.least, found.most) == (1000, values.min(), values.max())
    assert found.mean == pytest.approx(values.mean())
    assert found.std == pytest.approx(values.std())


def test_a_large_mean_costs_no_digits():
    found = Moments()
    for part in np.split(1e9 + np.arange(100.0), 4):
        found.add(part)
    assert found.std == pytest.approx(np.arange(100.0).std(), rel=1e-6)


def test_a_constant_has_no_deviation():
    found = Moments()
    for _ in range(3):
        found.add(np.full(7, 0.1))
    assert found.std == 0


def test_they_go_on_from_their_state():
    found = Moments()
    found.add(np.array([1.0, 2.0]))
    assert Moments(*found.state()) == found


def test_moments_of_large_integers_have_the_spread_of_their_last_digits():
    values = np.int64(10**18) + np.arange(1000)
    found = Moments()
    found.add(values[:500])
    found.add(values[500:])
    np.testing.assert_allclose(found.std, np.arange(1000).std(), rtol=0.2)
    alone = Moments()
    alone.add(values)
    np.testing.assert_allclose(alone.std, np.arange(1000).std())
    wide = Moments()
    wide.add(np.array([-(2**63), 2**63 - 1]))
    np.testing.assert_allclose(wide.std, 2.0**63)

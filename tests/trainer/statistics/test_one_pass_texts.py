"""Counts are exact up to a limit, and bounded above it."""

import numpy as np

from trainer.statistics.one_pass import BoundedCounter


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

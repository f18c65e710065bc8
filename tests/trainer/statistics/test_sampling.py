"""A sample stands for all examples, and the smallest hashes for all hashes."""

import numpy as np

from trainer.statistics import sampling
from trainer.statistics.sampling import Hashes, Sample


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
    monkeypatch.setattr(sampling, "MOST_EXAMPLES", 2000)
    whole = Sample(["x"], 99)
    for part, values in enumerate(np.array_split(np.arange(40_000.0), 4)):
        again = Sample(["x"], 0)
        again.restore(sampled(values, (part, 0)).arrays())
        whole.merge(again)
    found = whole.columns()["x"]
    assert len(found) == len(set(found)) == 2000
    # Four standard deviations of a quarter of 2,000 draws.
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
    monkeypatch.setattr(sampling, "MOST_HASHES", 100)
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

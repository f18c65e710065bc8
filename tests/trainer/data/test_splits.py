"""Tests that splits are disjoint, complete, balanced and reproducible from the seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.data.splits import TEST, TRAIN, VALIDATION, plan, shard_counts
from flotilla.trainer.features.dataset_spec import SPLITS
from flotilla.trainer.runtime.errors import UserError


def drawn(sizes, *, validation=0.1, seed=0):
    return plan("some", sizes, validation=validation, seed=seed)


def shards_of(found, shards):
    names = ("train", "validation", "test")
    counts = {name: count(found, which) for which, name in enumerate(names)}
    return shard_counts("some", counts, shards)


def count(found, which):
    return sum(int((targets == which).sum()) for targets in found.values())


OWN = {"train": 100, "test": 20, "validation": 30}


@pytest.mark.parametrize(
    ("sizes", "validation", "counts"),
    [
        ({"train": 100, "test": 20}, 0.1, [90, 10, 20]),
        # From 1 on, it is a count. A share is rounded, and never to nothing.
        ({"train": 100, "test": 20}, 1, [99, 1, 20]),
        ({"train": 1000, "test": 1}, 0.999, [1, 999, 1]),
        ({"train": 1000, "test": 1}, 0.001, [999, 1, 1]),
        ({"train": 1000, "test": 1}, 1e-9, [999, 1, 1]),
        ({"train": 1000, "test": 1}, 0.0125, [988, 12, 1]),
        ({"train": 100, "test": 20}, 0, [100, 0, 20]),
        # The source's own validation split is used whole, left out, or the test if there is none.
        (OWN, 0.1, [100, 30, 20]),
        (OWN, 0, [100, 0, 20]),
        ({"train": 100, "validation": 30}, 0.1, [90, 10, 30]),
        ({**OWN, "test": 0}, 0.1, [90, 10, 30]),
        # Without both, a test split as large as validation is drawn.
        ({"train": 100, "unsupervised": 50}, 0.2, [60, 20, 20]),
    ],
)
def test_splits_are_those_of_the_source_or_drawn(sizes, validation, counts):
    found = drawn(sizes, validation=validation)
    assert [count(found, which) for which in (TRAIN, VALIDATION, TEST)] == counts
    assert "unsupervised" not in found
    if "validation" in sizes and validation:
        assert (found["validation"] == (VALIDATION if sizes.get("test") else TEST)).all()
    assert ("validation" in shards_of(found, 1)) == bool(counts[1])


def test_the_draw_follows_the_seed():
    sizes = {"train": 1000, "test": 5}
    first, same, other = (drawn(sizes, seed=seed)["train"] for seed in (3, 3, 4))
    assert np.array_equal(first, same)
    assert not np.array_equal(first, other)


def test_the_draw_is_spread_over_the_source():
    chosen = np.flatnonzero(drawn({"train": 10_000, "test": 5})["train"] == VALIDATION)
    assert abs(chosen.mean() - 5000) < 500


def test_the_draw_never_changes():
    # The same seed must select the same examples with every version of the libraries.
    chosen = drawn({"train": 20, "test": 5}, validation=4, seed=7)["train"]
    assert np.flatnonzero(chosen == VALIDATION).tolist() == [1, 2, 5, 17]


@pytest.mark.parametrize(
    ("sizes", "options", "words"),
    [
        ({"test": 10, "extra": 3}, {}, ["no split 'train'", "test, extra", "builder"]),
        ({"train": 0, "test": 10}, {}, ["no split 'train'"]),
        ({}, {}, ["no split 'train'", "none"]),
        ({"train": 10, "test": 1}, {"validation": 10}, ["data.validation", "10 of the 10"]),
        ({"train": 10, "test": 1}, {"validation": 5000}, ["5000 of the 10", "smaller"]),
        ({"train": 1, "test": 1}, {"validation": 0.1}, ["1 of the 1"]),
        ({"train": 10}, {"validation": 5}, ["validation and test", "10 of the 10"]),
        ({"train": 10}, {"validation": 0}, ["data.validation is 0", "no test split", "0.1"]),
    ],
)
def test_what_cannot_be_split_is_refused(sizes, options, words):
    with pytest.raises(UserError) as caught:
        drawn(sizes, **options)
    message = str(caught.value)
    assert message.startswith("data.")
    assert "\n" not in message
    assert not [word for word in words if word not in message]


def test_what_cannot_be_sharded_is_refused():
    for counts, what in (((0, 0, 40), "to train on"), ((40, 0, 0), "for the test split")):
        with pytest.raises(
            UserError,
            match=rf"^data\.splits: one has no example {what} \({counts[0]}"
            " train.*; rows with equal inputs are always in one split",
        ):
            shard_counts("one", dict(zip(SPLITS, counts, strict=True)), 8)
    with pytest.raises(UserError, match=r"9 training .* into 10 shards; .* to 9 or less"):
        shards_of(drawn({"train": 10, "test": 1}), 10)


@pytest.mark.parametrize(
    ("sizes", "validation", "shards", "expected"),
    [
        ({"train": 10, "test": 5}, 1, 9, [9, 1, 5]),
        # Shards of other splits have about the same size.
        ({"train": 60_000, "test": 10_000}, 5000, 8, [8, 1, 2]),
        # No split has more shards than training.
        ({"train": 100, "test": 10_000}, 0.1, 4, [4, 1, 4]),
    ],
)
def test_the_number_of_shards(sizes, validation, shards, expected):
    assert [*shards_of(drawn(sizes, validation=validation), shards).values()] == expected


@settings(deadline=None, max_examples=60)
@given(
    train=st.integers(1, 400),
    test=st.integers(0, 50),
    validation=st.one_of(st.floats(0, 0.99), st.integers(1, 450)),
    shards=st.integers(1, 20),
    seed=st.integers(0, 2**31 - 1),
)
def test_every_example_goes_to_one_place(train, test, validation, shards, seed):
    sizes = {"train": train, "test": test}
    try:
        found = drawn(sizes, validation=validation, seed=seed)
        written = shards_of(found, shards)
    except UserError:
        return
    assert {name: len(targets) for name, targets in found.items()} == {
        name: size for name, size in sizes.items() if size
    }
    counts = {
        name: count(found, which) for which, name in enumerate(("train", "validation", "test"))
    }
    assert sum(counts.values()) == train + test
    assert counts["train"] >= shards
    assert counts["test"] == test or (not test and counts["test"] == counts["validation"])
    # No shard may be empty, because its reader would wait forever.
    assert all(1 <= written[name] <= counts[name] for name in written)
    assert set(written) == {name for name in counts if counts[name]}

"""Tests that splits are disjoint, complete, balanced and reproducible from the seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.data.splits import TEST, TRAIN, VALIDATION, plan, shard_counts
from flotilla.trainer.runtime.errors import UserError


def drawn(sizes, *, validation=0.1, seed=0):
    return plan("some", sizes, validation=validation, seed=seed)


def shards_of(found, shards):
    names = ("train", "validation", "test")
    counts = {name: count(found, which) for which, name in enumerate(names)}
    return shard_counts("some", counts, shards)


def count(found, which):
    return sum(int((targets == which).sum()) for targets in found.values())


def test_a_share_of_training_becomes_validation():
    found = drawn({"train": 100, "test": 20})
    assert [count(found, which) for which in (TRAIN, VALIDATION, TEST)] == [90, 10, 20]


def test_one_is_a_count():
    assert count(drawn({"train": 100, "test": 20}, validation=1), VALIDATION) == 1


@pytest.mark.parametrize(("share", "examples"), [(0.999, 999), (0.001, 1), (1e-9, 1), (0.0125, 12)])
def test_a_share_is_rounded_and_never_to_nothing(share, examples):
    assert count(drawn({"train": 1000, "test": 1}, validation=share), VALIDATION) == (examples)


def test_no_validation():
    found = drawn({"train": 100, "test": 20}, validation=0)
    assert count(found, VALIDATION) == 0
    assert "validation" not in shards_of(found, 2)


def test_the_sources_own_validation_split_is_used_whole():
    found = drawn({"train": 100, "test": 20, "validation": 30})
    assert [count(found, which) for which in (TRAIN, VALIDATION, TEST)] == [100, 30, 20]
    assert (found["validation"] == VALIDATION).all()


def test_no_validation_leaves_the_sources_own_out():
    found = drawn({"train": 100, "test": 20, "validation": 30}, validation=0)
    assert [count(found, which) for which in (TRAIN, VALIDATION, TEST)] == [100, 0, 20]


def test_the_sources_validation_is_the_test_where_there_is_no_other():
    found = drawn({"train": 100, "validation": 30})
    assert (found["validation"] == TEST).all()
    assert count(found, VALIDATION) == 10


def test_an_empty_test_split_is_none():
    assert (drawn({"train": 100, "test": 0, "validation": 30})["validation"] == TEST).all()


def test_test_is_drawn_from_training_as_large_as_validation():
    found = drawn({"train": 100, "unsupervised": 50}, validation=0.2)
    assert set(found) == {"train"}
    assert [count(found, which) for which in (TRAIN, VALIDATION, TEST)] == [60, 20, 20]


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


def test_nothing_to_train_on_is_refused():
    with pytest.raises(UserError, match=r"^data\.splits: one has no example to train on; add rows"):
        shard_counts("one", {"train": 0, "validation": 0, "test": 1}, 8)


def test_more_shards_than_examples_are_refused():
    with pytest.raises(UserError, match=r"9 training .* into 10 shards; .* to 9 or less"):
        shards_of(drawn({"train": 10, "test": 1}), 10)


def test_as_many_shards_as_examples_is_the_most():
    assert shards_of(drawn({"train": 10, "test": 5}, validation=1), 9)["train"] == 9


def test_other_splits_get_shards_of_the_same_size():
    found = drawn({"train": 60_000, "test": 10_000}, validation=5000)
    assert shards_of(found, 8) == {"train": 8, "validation": 1, "test": 2}


def test_no_split_has_more_shards_than_training():
    assert shards_of(drawn({"train": 100, "test": 10_000}), 4)["test"] == 4


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

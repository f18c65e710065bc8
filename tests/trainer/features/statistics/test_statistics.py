"""Tests that statistics are read as they were written and damaged files are reported."""

import dataclasses

import numpy as np
import pytest

from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.statistics import (
    NOTHING,
    ExampleSketch,
    FeatureStatistics,
    Learnt,
    SplitStatistics,
    Statistics,
)
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.odd_names import ODD

FOUND = Statistics(
    splits={
        "train": SplitStatistics(
            examples=3,
            features={
                "city": FeatureStatistics(kind="text", examples=3, counts={"Köln": 2, "": 1}),
                "age": FeatureStatistics(
                    kind="number", examples=3, mean=0.1, std=2.0, quantiles=(1.0, 2.0)
                ),
            },
        )
    }
)
SKETCH = ExampleSketch(
    hashes=np.array([1, 2**64 - 1], np.uint64),
    copies=np.array([1, 2]),
    is_whole=True,
    sample={"age": np.array([1.0, np.nan]), "image/std": np.array([0.5, 0.25])},
)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"schema": 99, "splits": {}}', b"\xff"])
def test_what_is_none_is_named(data):
    with pytest.raises(UserError, match=r"file:///d/statistics\.json has no statistics"):
        _ = Learnt(lambda: (data or b"{}x", "file:///d")).features


def test_sketches_survive_their_file():
    data = statistics.sketches_to_bytes({"train": SKETCH, "test": SKETCH})
    assert data == statistics.sketches_to_bytes({"train": SKETCH, "test": SKETCH})
    found = statistics.sketches_from_bytes(data, "file:///d")
    assert list(found) == ["train", "test"]
    for each in found.values():
        assert each.hashes.tolist() == SKETCH.hashes.tolist()
        assert each.copies.tolist() == SKETCH.copies.tolist()
        assert each.is_whole
        assert list(each.sample) == ["age", "image/std"]
        np.testing.assert_array_equal(each.sample["age"], SKETCH.sample["age"])


def test_a_sample_is_found_by_its_column_whatever_that_is_called():
    sample = {name: np.array([float(number)]) for number, name in enumerate((*ODD, "x.npy"))}
    data = statistics.sketches_to_bytes({"train": dataclasses.replace(SKETCH, sample=sample)})
    assert statistics.sketches_from_bytes(data, "file:///d")["train"].sample == sample


@pytest.mark.parametrize("length", [0, 1, 100, 400])
def test_a_damaged_file_is_named(length):
    data = statistics.sketches_to_bytes({"train": SKETCH})
    with pytest.raises(UserError, match=r"file:///d/examples\.npz is damaged"):
        statistics.sketches_from_bytes(data[:length], "file:///d")


def test_nothing_is_read_before_it_is_asked_for():
    read, data = [], statistics.to_bytes(FOUND)
    learnt = Learnt(lambda: read.append(1) or (data, "file:///d"))
    assert not learnt.data
    assert not read
    assert learnt.features == learnt.features == FOUND.splits["train"].features
    assert learnt.data == data
    assert len(read) == 1
    assert NOTHING.features == {}

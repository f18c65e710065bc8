"""Statistics are read once, and only where a model asks."""

import pytest

from trainer.errors import UserError
from trainer.statistics import statistics
from trainer.statistics.statistics import (
    NOTHING,
    FeatureStatistics,
    Learnt,
    SplitStatistics,
    Statistics,
)

AGE = FeatureStatistics(kind="number", examples=1, mean=1.0)
DATA = statistics.to_bytes(
    Statistics(splits={"train": SplitStatistics(examples=1, features={"age": AGE})})
)


def test_nothing_is_read_before_it_is_asked_for():
    read = []
    learnt = Learnt(lambda: read.append(1) or (DATA, "file:///d"))
    assert not learnt.data
    assert not read
    assert learnt.features == learnt.features == {"age": AGE}
    assert learnt.data == DATA
    assert len(read) == 1


def test_a_file_of_another_version_is_named():
    with pytest.raises(UserError, match=r"file:///d/statistics\.json"):
        _ = Learnt(lambda: (b"{}x", "file:///d")).features


def test_without_a_dataset_nothing_is_known():
    assert NOTHING.features == {}

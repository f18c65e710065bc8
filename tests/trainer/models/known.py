"""A dataset whose training split has given statistics."""

from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.statistics import Learnt, SplitStatistics, Statistics


def learnt(features, examples=9):
    found = Statistics(splits={"train": SplitStatistics(examples=examples, features=features)})
    return Learnt(lambda: (statistics.to_bytes(found), "file:///d"))

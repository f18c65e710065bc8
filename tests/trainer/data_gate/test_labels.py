"""Labels: a class that is gone by chance is not gone."""

import numpy as np

from tests.trainer.data_gate.tables import profile, question
from trainer.data_gate import labels


def counted(train, test):
    splits = {"train": train, "test": test}
    rows = {name: np.repeat(np.arange(len(each)), each) for name, each in splits.items()}
    return profile(
        {name: {"x": np.ones(len(each)), "label": each} for name, each in rows.items()},
        classes=("a", "b", "c"),
    )


def rules(new, old=None, **config):
    asked = question(new, old, **config)
    return {(each.rule, each.split) for rule in (labels.classes, labels.shares)
            for each in rule(asked)}  # fmt: skip


def test_a_rare_class_may_be_absent_from_a_small_split():
    assert rules(counted([500, 500, 120], [40, 40, 5])) == set()
    assert rules(counted([500, 500, 120], [20, 21, 0])) == set()
    assert rules(counted([500, 500, 120], [200, 200, 0])) == {("class_gone", "test")}


def test_shares_are_compared_with_the_champion():
    old = counted([500, 500, 120], [100, 100, 30])
    assert rules(counted([520, 490, 110], [100, 100, 30]), old) == set()
    assert rules(counted([700, 300, 120], [140, 60, 25]), old) == {("balance", "train")}
    assert rules(counted([700, 300, 120], [140, 60, 25]), old, limits={"balance": 0.5}) == set()


def test_many_classes_of_equal_size_are_not_rare():
    even = counted([10, 10, 10], [10, 10, 10])
    assert rules(even) == set()
    assert ("imbalance", "train") in rules(counted([990, 5, 5], [100, 1, 1]))

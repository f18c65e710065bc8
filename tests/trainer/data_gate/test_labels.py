"""Tests that label rules ignore classes absent by chance and associations that only weaken."""

from dataclasses import replace

import numpy as np
import pytest

from flotilla.trainer.config.thresholds import GateConfig
from flotilla.trainer.data_gate import labels
from flotilla.trainer.data_gate.validate import find_all
from tests.trainer.data_gate.skews import table
from tests.trainer.data_gate.tables import profile, question, split_of


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


def test_classes_that_are_rare_or_as_large_as_others():
    assert rules(counted([500, 500, 120], [40, 40, 5])) == set()
    assert rules(counted([500, 500, 120], [20, 21, 0])) == set()
    assert rules(counted([500, 500, 120], [200, 200, 0])) == {("class_gone", "test")}
    even = counted([10, 10, 10], [10, 10, 10])
    assert rules(even) == set()
    assert ("imbalance", "train") in rules(counted([990, 5, 5], [100, 1, 1]))


def test_shares_are_compared_with_the_champion():
    old = counted([500, 500, 120], [100, 100, 30])
    assert rules(counted([520, 490, 110], [100, 100, 30]), old) == set()
    assert rules(counted([700, 300, 120], [140, 60, 25]), old) == {("balance", "train")}
    assert rules(counted([700, 300, 120], [140, 60, 25]), old, limits={"balance": 0.5}) == set()


def test_a_split_of_one_class_is_refused_however_probable_it_is():
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=300), "label": (np.arange(300) == 5).astype(int)}
    found = [each for each in find_all(question(profile(split_of(columns)))) if
             each.rule == "class_gone"]  # fmt: skip
    assert {each.split for each in found} == {"validation", "test"}
    assert "label is 'no' in all 60 examples of test" in found[-1].says


@pytest.mark.parametrize(
    ("bounds", "warns"),
    [({}, True), ({"weighted_recall": 0.8}, True), ({"macro_recall": 0.8}, False),
     ({"recall": 0.8}, False)],
)  # fmt: skip
def test_a_rare_class_is_a_warning_unless_a_metric_sees_it(bounds, warns):
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=3000), "label": (np.arange(3000) % 100 == 5).astype(int)}
    asked = question(profile(split_of(columns)), gate=GateConfig(min=bounds))
    found = [each.says for each in find_all(asked) if each.rule == "imbalance"]
    assert len(found) == warns
    assert all("gate.min: {accuracy@label: 0.8}" in says and "'yes'" in says for says in found)


def with_association(value, before, size):
    made = profile(split_of(table(np.random.default_rng(0), size)))
    found = []
    for strength in (value, before):
        splits = {
            name: replace(split, features={
                key: replace(each, association={"label": strength})
                for key, each in split.features.items()
            })
            for name, split in made.splits.items()
        }  # fmt: skip
        found.append(replace(made, splits=splits))
    return question(*found)


def gone(value, before, size=2000):
    return bool(list(labels.association(with_association(value, before, size))))


def test_it_is_gone_where_little_is_left_of_it():
    assert gone(0.02, 0.6)
    assert not gone(0.5, 0.6)
    assert not gone(0.0, 0.1)
    # With so few rows, the difference may be chance.
    assert not gone(0.1, 0.3, size=100)

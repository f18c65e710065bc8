"""Features and labels: an association that is weaker by chance is not gone."""

from dataclasses import replace

import numpy as np

from tests.trainer.data_gate.skews import table
from tests.trainer.data_gate.tables import profile, question, split_of
from trainer.data_gate import relations


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
    return bool(list(relations.association(with_association(value, before, size))))


def test_it_is_gone_where_little_is_left_of_it():
    assert gone(0.02, 0.6)
    assert not gone(0.5, 0.6)
    assert not gone(0.0, 0.1)
    # So few rows do not say it.
    assert not gone(0.1, 0.3, size=100)


def test_a_feature_that_determined_the_label_before_is_no_news():
    asked = with_association(1.0, 0.3, 500)
    assert {each.rule for each in relations.label_leakage(asked)} == {"label_leakage"}
    assert not list(relations.label_leakage(with_association(1.0, 1.0, 500)))

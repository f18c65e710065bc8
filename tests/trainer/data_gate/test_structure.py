"""Features, types and sizes next to those of the champion's dataset."""

from dataclasses import replace

import numpy as np

from tests.trainer.data_gate.skews import table
from tests.trainer.data_gate.tables import profile, question, split_of
from trainer.data_gate import structure


def made(**columns):
    return profile(split_of({**table(np.random.default_rng(0), 100), **columns}))


def test_names_and_types_are_compared_without_statistics():
    old = made()
    new = made(hieght=np.ones(100))
    del new.specs["height"]
    bare = replace(new, splits={"train": replace(new.splits["train"], features={})})
    found = {each.rule: each.says for each in structure.features(question(bare, old))}
    assert set(found) == {"missing_feature", "new_feature"}
    assert "did you mean 'hieght'?" in found["missing_feature"]


def test_whole_numbers_that_became_floats_may_have_gaps():
    old, new = made(id=np.arange(100)), made(id=np.arange(100.0))
    (found,) = structure.features(question(new, old))
    assert found.rule == "type"
    assert "(whole numbers are floats where some are missing)" in found.says
    (found,) = structure.features(question(old, new))
    assert "missing" not in found.says


def test_an_empty_split_is_named():
    new = made()
    splits = {**new.splits, "test": replace(new.splits["test"], examples=0)}
    (found,) = structure.sizes(question(replace(new, splits=splits)))
    assert (found.rule, found.split) == ("empty", "test")

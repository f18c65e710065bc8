"""Shards from mapped parts: complete, disjoint, as large, and mixed."""

import numpy as np
import pytest

from trainer.config.data import DataConfig
from trainer.data.preparation.assembly import assemble
from trainer.data.preparation.processes import map_parts
from trainer.errors import UserError


def test_every_example_is_in_its_split_once(prepared, source, numbers_of):
    dataset = prepared(source)
    by_split = {name: np.concatenate(numbers_of(dataset, name)) for name in ("train", "test")}
    assert sorted(by_split["test"]) == list(range(1, 100, 10))
    assert sorted(by_split["train"]) == [n for n in range(100) if n % 10 > 1]


def test_shards_are_mixed_over_the_parts_and_as_large(prepared, source, numbers_of):
    shards = numbers_of(prepared(source), "train")
    assert [len(each) for each in shards] == [40, 40]
    # Sorted files would give sorted shards.
    assert all((np.diff(each) < 0).sum() > 10 for each in shards)
    assert all({number // 20 for number in each.tolist()[:20]} == set(range(5)) for each in shards)


def test_counts_are_those_of_the_examples(prepared, source):
    counts = prepared(source).manifest.fields["target_counts"]["label"]
    assert counts == {"train": [20, 20, 20, 20], "validation": [5, 0, 5, 0], "test": [0, 5, 0, 5]}


@pytest.fixture
def parts(source, tmp_path):
    source.fetch()
    folder = tmp_path / "parts"
    config = DataConfig(runner={"processes": 1})
    map_parts(source, source.parts(), folder, config=config, done=lambda *_: None)
    return sorted(folder.iterdir())


def test_a_source_in_random_order_keeps_it(source, parts, tmp_path):
    source.is_shuffled = True
    kept, again, mixed = (tmp_path / name for name in ("kept", "again", "mixed"))
    for folder in (kept, again, mixed):
        folder.mkdir()
    first = assemble(source, parts, kept, DataConfig(shards=2, seed=0))
    assert (
        assemble(source, parts, again, DataConfig(shards=2, seed=1)).fingerprint
        == first.fingerprint
    )
    source.is_shuffled = False
    other = assemble(source, parts, mixed, DataConfig(shards=2, seed=0))
    assert other.fingerprint != first.fingerprint
    assert other.examples == first.examples
    assert first.examples == {"train": [40, 40], "validation": [10], "test": [10]}


def test_more_shards_than_examples(source, parts, tmp_path):
    with pytest.raises(UserError, match="81 shards for 80 training examples of numbers"):
        assemble(source, parts, tmp_path, DataConfig(shards=81))

"""Tests that the profile of a published dataset equals its statistics."""

from __future__ import annotations

import numpy as np
import pytest

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.data_gate.profile import make_profile
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.runtime.errors import UserError


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = tmp_path_factory.mktemp("things")
    rows = [f"{i / 7:.3f},{'' if i % 5 else i},{'ab'[i % 2]}x,{'yes' if i % 3 else 'no'}\n"
            for i in range(600)]  # fmt: skip
    (folder / "things.csv").write_text("size,gaps,kind,label\n" + "".join(rows))
    config = DataConfig(source=str(folder / "things.csv"), shards=2)
    return prepare(config, storage.uri_of(folder / "root"), folder / "scratch").uri


def test_features_have_their_statistics_and_equal_examples_are_seen(dataset):
    found = make_profile(dataset)
    train = found.features("train")
    assert {name: each.kind for name, each in train.items()} == {
        "size": "number", "gaps": "number", "kind": "text", "label": "class",
    }  # fmt: skip
    size, gaps = train["size"], train["gaps"]
    assert size.present == found.examples("train") == len(size.numbers)
    assert np.all(np.diff(size.numbers) >= 0)
    assert (size.numbers[0], size.numbers[-1]) == (size.least, size.most)
    assert size.distinct == size.present
    assert gaps.missing > 0.7 * gaps.examples
    assert set(train["kind"].counts) == {"ax", "bx"}
    assert found.count_classes("label", "train") == dict(train["label"].counts)
    splits = make_profile(dataset).splits
    assert all(each.is_whole for each in splits.values())
    assert sum(each.copies.sum() for each in splits.values()) == 600


@pytest.mark.parametrize("name", [statistics.FILE, statistics.EXAMPLES])
def test_damage_is_named(dataset, tmp_path, name):
    copy = storage.uri_of(tmp_path / "copy")
    storage.fetch(dataset, tmp_path / "files")
    storage.publish(
        tmp_path / "files", copy, kind="dataset", fields=storage.read_manifest(dataset).fields
    )
    (tmp_path / "copy" / name).write_bytes(b"{}")
    with pytest.raises(UserError, match=name):
        make_profile(copy)

"""A mapped part gives back its records and its sums."""

import numpy as np
import pytest

from tests.trainer.data.preparation.numbers import Numbers
from trainer.data.features import Selection
from trainer.data.preparation.parts import Sums, map_part, records_of, sums_of
from trainer.data.source import Batch
from trainer.data.spec import FeatureSpec
from trainer.errors import UserError


@pytest.fixture
def source(tmp_path):
    found = Numbers(seen=tmp_path / "seen")
    found.fetch()
    return found


def test_records_come_back_in_their_order(source, tmp_path):
    selection = source.select()
    map_part(source, selection, source.parts()[1], tmp_path / "part", vocabulary=10)
    counts = {name: len(list(records_of(tmp_path / "part", name))) for name in ("train", "test")}
    assert counts == {"train": 16, "test": 2}
    assert sums_of(tmp_path / "part", selection, vocabulary=10).examples == {
        **counts,
        "validation": 2,
    }


def price(values):
    return {"price": np.array(values, np.float32)}


def test_sums_of_parts_are_those_of_all(tmp_path):
    spec = FeatureSpec(shape=(), dtype="float32", stored="float")
    selection = Selection(
        inputs=("price",), targets=("price",), specs={"price": spec}, connectors={}, fits={}
    )
    whole, merged = (Sums(selection, vocabulary=10) for _ in range(2))
    values = np.random.RandomState(0).normal(1e6, 1.0, 300)
    whole.add(price(values), np.zeros(300, np.int8))
    for number, part in enumerate(np.split(values, 3)):
        each = Sums(selection, vocabulary=10, part=number)
        each.add(price(part), np.zeros(100, np.int8))
        each.save(tmp_path)
        merged.merge(sums_of(tmp_path, selection, vocabulary=10))
    assert merged.examples == whole.examples == {"train": 300, "validation": 0, "test": 0}
    expected = whole.targets["price"].moments()
    assert merged.targets["price"].moments() == pytest.approx(expected, rel=1e-9)


def test_a_label_that_is_none_names_its_split(source, tmp_path, monkeypatch):
    columns = {"number": np.arange(2), "label": np.array([0, -1])}
    batch = Batch(columns=columns, splits=np.zeros(2, np.int8))
    monkeypatch.setattr(source, "read", lambda *_: iter([batch]), raising=False)
    with pytest.raises(UserError, match="without a label"):
        map_part(source, source.select(), source.parts()[0], tmp_path / "part", vocabulary=10)


def test_statistics_of_parts_are_those_of_all(tmp_path):
    spec = FeatureSpec(shape=(), dtype="float32", stored="float")
    selection = Selection(
        inputs=("price",), targets=("price",), specs={"price": spec}, connectors={}, fits={}
    )
    merged = Sums(selection, vocabulary=10)
    for number in range(2):
        each = Sums(selection, vocabulary=10, part=number)
        each.add(price(range(number * 50, number * 50 + 50)), np.zeros(50, np.int8))
        each.save(tmp_path)
        merged.merge(sums_of(tmp_path, selection, vocabulary=10))
    found = merged.accumulators["train"].result().features["price"]
    assert (found.examples, found.least, found.most, found.mean) == (100, 0, 99, 49.5)
    assert found.quantiles[::500] == pytest.approx((0, 49.5, 99))

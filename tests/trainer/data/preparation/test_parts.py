"""Mapped parts, the shards that are made from all parts, and their reading in TensorFlow."""

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.preparation import shards as write
from flotilla.trainer.data.preparation.assembly import assemble
from flotilla.trainer.data.preparation.parts import Sums, map_part, read_part, read_sums
from flotilla.trainer.data.preparation.processes import map_parts
from flotilla.trainer.data.preparation.shards import ShardWriter
from flotilla.trainer.data.source import Batch
from flotilla.trainer.events.progress.work import Work
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.data.preparation.numbers import Numbers


@pytest.fixture
def source(tmp_path):
    found = Numbers(seen=tmp_path / "seen")
    found.fetch()
    return found


def test_records_come_back_in_their_order(source, tmp_path):
    selection = source.select()
    map_part(source, selection, source.parts()[1], tmp_path / "part", vocabulary=10)
    counts = {name: len(list(read_part(tmp_path / "part", name))) for name in ("train", "test")}
    assert counts == {"train": 16, "test": 2}
    assert read_sums(tmp_path / "part", selection, vocabulary=10).examples == {
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
        merged.merge(read_sums(tmp_path, selection, vocabulary=10))
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
        merged.merge(read_sums(tmp_path, selection, vocabulary=10))
    found = merged.accumulators["train"].result().features["price"]
    assert (found.examples, found.least, found.most, found.mean) == (100, 0, 99, 49.5)
    assert found.quantiles[::500] == pytest.approx((0, 49.5, 99))


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
    work = Work("encoding")
    map_parts(source, source.parts(), folder, config=config, work=work, done=lambda *_: None)
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


def read(path):
    return list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())


@pytest.fixture
def write_shards(tmp_path):
    def make(records, count, split="train"):
        writer = ShardWriter(tmp_path, split, count)
        for record in records:
            writer.add(record)
        writer.flush()
        return writer, sorted(tmp_path.glob(f"{split}-*"))

    return make


def test_tensorflow_reads_what_was_written(write_shards):
    records = [b"", b"a", bytes(range(256)) * 50, "ä".encode()]
    _, (path,) = write_shards(records, 1)
    assert read(path) == records


def test_tensorflow_writes_the_same_bytes(write_shards, tmp_path):
    records = [b"one", b"", b"\xff" * 1000]
    _, (path,) = write_shards(records, 1)
    with tf.io.TFRecordWriter(str(tmp_path / "theirs")) as theirs:
        for record in records:
            theirs.write(record)
    assert path.read_bytes() == (tmp_path / "theirs").read_bytes()


def test_records_are_dealt_out_in_turn(write_shards):
    _, paths = write_shards([bytes([value]) for value in range(8)], 3)
    assert [path.name for path in paths] == [
        f"train-{index:05d}-of-00003.tfrecord" for index in range(3)
    ]
    assert [[record[0] for record in read(path)] for path in paths] == [
        [0, 3, 6],
        [1, 4, 7],
        [2, 5],
    ]


@settings(deadline=None, max_examples=30)
@given(records=st.integers(1, 200), count=st.integers(1, 20))
def test_shards_differ_by_at_most_one(tmp_path_factory, records, count):
    writer = ShardWriter(tmp_path_factory.mktemp("shards"), "test", count)
    for value in range(records):
        writer.add(b"%d" % value)
    assert sum(writer.examples) == records
    assert max(writer.examples) - min(writer.examples) <= 1


def test_the_counts_are_those_of_the_files(write_shards):
    writer, paths = write_shards([b"x"] * 11, 4)
    assert writer.examples == [len(read(path)) for path in paths] == [3, 3, 3, 2]


def test_the_crcs_are_those_of_the_files(write_shards):
    writer, paths = write_shards([b"some", b"more", b"records"], 2)
    assert writer.crcs == [f"{google_crc32c.value(path.read_bytes()):08x}" for path in paths]


def test_memory_is_emptied_when_there_is_much_in_it(write_shards, monkeypatch):
    records = [b"%d" % value * 20 for value in range(100)]
    at_once, whole = write_shards(records, 3, "train")
    monkeypatch.setattr(write, "BUFFER_BYTES", 150)
    in_parts, parts = write_shards(records, 3, "test")
    assert [path.read_bytes() for path in whole] == [path.read_bytes() for path in parts]
    assert at_once.crcs == in_parts.crcs


def test_nothing_is_kept_after_a_flush(tmp_path):
    writer = ShardWriter(tmp_path, "train", 1)
    writer.add(b"once")
    writer.flush()
    writer.flush()
    assert read(tmp_path / "train-00000-of-00001.tfrecord") == [b"once"]


def test_a_thousand_shards_are_no_matter(write_shards):
    # More than files that a process may have open, by default.
    _, paths = write_shards([b"%d" % value for value in range(1500)], 1500)
    assert len(paths) == 1500
    assert read(paths[1499]) == [b"1499"]

"""Tests mapped parts, the shards assembled from them, and how TensorFlow reads the shards."""

from dataclasses import replace

import google_crc32c
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.blocks import parse_blocks
from flotilla.trainer.data.columns import make_table
from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.preparation import shards
from flotilla.trainer.data.preparation.runners import map_parts
from flotilla.trainer.data.preparation.shards import (
    ShardWriter,
    Sums,
    assemble,
    list_chunks,
    map_part,
    read_sums,
)
from flotilla.trainer.data.source import Batch
from flotilla.trainer.events.progress import Work
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.data.preparation.numbers import Numbers


@pytest.fixture
def source(tmp_path):
    found = Numbers(seen=tmp_path / "seen")
    found.fetch()
    return found


CONFIG = DataConfig(vocabulary=10)


def rows_of(folder, split):
    return [
        row for chunk in list_chunks(folder, split) for row in chunk.read(0, chunk.rows).to_pylist()
    ]


def test_rows_of_a_part_are_in_their_split_once(source, tmp_path):
    selection = source.select()
    map_part(source, selection, source.parts()[1], tmp_path / "part", config=CONFIG)
    rows = {name: rows_of(tmp_path / "part", name) for name in ("train", "test")}
    assert sorted(row["number"] for row in rows["test"]) == [21, 31]
    assert all(row["label"] == row["number"] % 4 for row in rows["train"])
    counts = {name: len(each) for name, each in rows.items()}
    assert counts == {"train": 16, "test": 2}
    assert read_sums(tmp_path / "part", selection, vocabulary=10).examples == {
        **counts,
        "validation": 2,
    }


def test_a_part_in_several_chunks_is_the_same_again(source, tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "CHUNK_BYTES", 1)
    for name in ("one", "other"):
        map_part(source, source.select(), source.parts()[1], tmp_path / name, config=CONFIG)
    assert len(list_chunks(tmp_path / "one", "train")) == 2
    assert rows_of(tmp_path / "one", "train") == rows_of(tmp_path / "other", "train")


def add_prices(sums, values):
    columns = {"price": np.array(values, np.float32)}
    sums.add("train", columns, make_table(sums_selection.specs, columns))


PRICE = FeatureSpec(shape=(), dtype="float32", stored="float")
sums_selection = Selection(
    inputs=("price",), targets=("price",), specs={"price": PRICE}, connectors={}, fits={}
)


def test_sums_of_parts_are_those_of_all(tmp_path):
    selection = sums_selection
    whole, merged = (Sums(selection, vocabulary=10) for _ in range(2))
    values = np.random.RandomState(0).normal(1e6, 1.0, 300)
    add_prices(whole, values)
    for number, part in enumerate(np.split(values, 3)):
        each = Sums(selection, vocabulary=10, part=number)
        add_prices(each, part)
        each.save(tmp_path)
        merged.merge(read_sums(tmp_path, selection, vocabulary=10))
    assert merged.examples == whole.examples == {"train": 300, "validation": 0, "test": 0}
    found, expected = (each.accumulators["train"].moments("price") for each in (merged, whole))
    assert found.state() == pytest.approx(expected.state(), rel=1e-9)


def test_a_label_that_is_none_names_its_split(source, tmp_path, monkeypatch):
    columns = {"number": np.arange(2), "label": np.array([0, -1])}
    batch = Batch(columns=columns, splits=np.zeros(2, np.int8))
    monkeypatch.setattr(source, "read", lambda *_: iter([batch]), raising=False)
    part = replace(source.parts()[0], origin="test")
    words = r"the split 'test' of numbers has examples without a label \('label' is -1\)"
    with pytest.raises(UserError, match=words):
        map_part(source, source.select(), part, tmp_path / "part", config=CONFIG)


def test_shards_are_mixed_over_the_parts_and_as_large(prepared, source, numbers_of):
    dataset = prepared(source)
    shards = numbers_of(dataset, "train")
    assert sorted(np.concatenate(numbers_of(dataset, "test"))) == list(range(1, 100, 10))
    assert sorted(np.concatenate(shards)) == [n for n in range(100) if n % 10 > 1]
    counts = dataset.manifest.fields["target_counts"]["label"]
    assert counts == {"train": [20, 20, 20, 20], "validation": [5, 0, 5, 0], "test": [0, 5, 0, 5]}
    assert [len(each) for each in shards] == [40, 40]
    # The rows of a shard must not be in the order of the source.
    assert all((np.diff(each) < 0).sum() > 10 for each in shards)
    assert all({number // 20 for number in each.tolist()[:20]} == set(range(5)) for each in shards)


@pytest.fixture
def parts(source, tmp_path):
    source.fetch()
    folder = tmp_path / "parts"
    config = DataConfig(runner={"processes": 1})
    work = Work("encoding")
    map_parts(source, source.parts(), folder, config=config, work=work, done=lambda *_: None)
    return sorted(folder.iterdir())


def test_a_seed_gives_an_order(source, parts, tmp_path):
    found = []
    for name, seed in (("one", 0), ("again", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        config = DataConfig(shards=2, seed=seed)
        found.append(assemble(source, parts, tmp_path / name, config))
    one, again, other = found
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert one.examples == other.examples == {"train": [40, 40], "validation": [10], "test": [10]}


@pytest.mark.parametrize("buckets", [1, 7])
def test_every_order_is_as_likely(source, parts, monkeypatch, buckets):
    size = read_sums(parts[0], source.select(), vocabulary=10).bytes["train"] * len(parts)
    monkeypatch.setattr(shards, "BUCKET_BYTES", -(-size // buckets))
    places = []
    for seed in range(200):
        chunks = [chunk for part in parts for chunk in list_chunks(part, "train")]
        rows = shards.shuffle_rows(chunks, size, (seed, 0))
        order = np.concatenate([each["number"].to_numpy() for each in rows])
        assert sorted(order.tolist()) == [n for n in range(100) if n % 10 > 1]
        # Add the ranks in the source of the rows in the shards, in order.
        places.append(np.argsort(np.argsort(order)))
    # The order must be uncorrelated with the source and between neighboring rows.
    drawn = np.array(places)
    straight = np.arange(drawn.shape[1])
    correlations = [np.corrcoef(each, straight)[0, 1] for each in drawn]
    neighbours = [np.corrcoef(each[:-1], each[1:])[0, 1] for each in drawn]
    for found in (correlations, neighbours):
        # Allow 4 standard errors of the mean, and the bias of about -1 / 79 that neighbors have.
        assert abs(np.mean(found)) < 4 / np.sqrt(79 * 200) + 1 / 79
        assert np.std(found) == pytest.approx(1 / np.sqrt(79), rel=0.25)


FEATURES = {"number": FeatureSpec(shape=(), dtype="int64", stored="int")}


def read(path):
    blocks = list(tf.data.TFRecordDataset(str(path)).as_numpy_iterator())
    return parse_blocks(FEATURES, tf.constant(blocks))["number"].numpy().tolist()


def write_numbers(folder, examples, count, rows=3, at_once=1000):
    table = make_table(FEATURES, {"number": np.arange(examples)})
    writer = ShardWriter(folder, "train", FEATURES, examples=examples, count=count, rows=rows)
    for start in range(0, examples, at_once):
        writer.add(table.slice(start, at_once))
    return writer, sorted(folder.glob("train-*"))


@settings(deadline=None, max_examples=10)
@given(
    examples=st.integers(1, 200),
    count=st.integers(1, 5),
    rows=st.integers(1, 40),
    at_once=st.integers(1, 60),
)
def test_shards_are_ranges_of_about_one_size(tmp_path_factory, examples, count, rows, at_once):
    folder = tmp_path_factory.mktemp("shards")
    writer, paths = write_numbers(folder, examples, min(count, examples), rows, at_once)
    numbers = [read(path) for path in paths]
    assert [len(each) for each in numbers] == writer.examples
    assert [number for each in numbers for number in each] == list(range(examples))
    assert max(writer.examples) - min(writer.examples) <= 1
    for path, each in zip(paths, writer.examples, strict=True):
        assert len(list(tf.data.TFRecordDataset(str(path)))) == -(-each // rows)


def test_the_bytes_do_not_depend_on_how_rows_come(tmp_path):
    at_once, paths = write_numbers(tmp_path, 100, 3)
    content = [path.read_bytes() for path in paths]
    for path in paths:
        path.unlink()
    in_parts, paths = write_numbers(tmp_path, 100, 3, at_once=7)
    assert [path.read_bytes() for path in paths] == content
    assert at_once.crcs == in_parts.crcs
    assert at_once.crcs == [f"{google_crc32c.value(each):08x}" for each in content]


def test_a_thousand_shards_are_no_matter(tmp_path):
    # There are more shards than the usual limit of open files per process.
    _, paths = write_numbers(tmp_path, 1500, 1500)
    assert len(paths) == 1500
    assert read(paths[1499]) == [1499]

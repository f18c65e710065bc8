"""The shards are TFRecord files as TensorFlow reads them, balanced to one record."""

import google_crc32c
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.preparation import shards as write
from trainer.data.preparation.shards import ShardWriter


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

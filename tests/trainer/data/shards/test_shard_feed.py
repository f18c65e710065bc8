"""What the feed of a worker answers when an attempt, a shard or itself is gone."""

from __future__ import annotations

from collections import Counter

import pytest
import tensorflow as tf

from tests.trainer.data.shards.numbered import BATCH, EXAMPLES, SPEC, drawn
from trainer.data.read import training_batches
from trainer.data.shards.shard_feed import ShardFeed
from trainer.data.shards.shard_store import FOLDER, TRAIN, Streaming
from trainer.errors import UserError
from trainer.storage.local import FileStore


def test_another_attempt_begins_anew_where_one_was_left(feed):
    begun, first = feed(3)
    left = iter(training_batches(SPEC, first, batch_size=BATCH, seed=1, shuffle_buffer=10))
    next(left)
    second = Streaming(limit=first.limit, at_once=1)
    total = sum(EXAMPLES)
    seen = drawn(second, 5 * total // BATCH)
    assert set(Counter(seen).values()) == {5}
    assert begun.error is None


@pytest.mark.parametrize("damage", ["gone", "other"])
def test_a_damaged_shard_is_one_line_and_no_endless_wait(feed, damage, monkeypatch):
    download = FileStore.download

    def damaged(self, uri, target):
        if target.name != SPEC.files(TRAIN)[4]:
            return download(self, uri, target)
        if damage == "gone":
            raise FileNotFoundError(uri)
        return target.write_bytes(b"other")

    monkeypatch.setattr(FileStore, "download", damaged)
    begun, streaming = feed(2)
    line = r"damaged: train-00004-of-00007\.tfrecord"
    with pytest.raises(UserError, match=line), begun.reporting():
        drawn(streaming, 500)


def test_a_server_ends_with_the_error_of_a_shard(feed, monkeypatch):
    def full(_self, _uri, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(FileStore, "download", full)
    begun, streaming = feed(2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no more shards come"):
        drawn(streaming, 1)
    with pytest.raises(UserError, match="No space left on device"):
        begun.wait()


def test_no_reader_waits_for_a_feed_that_is_closed(feed):
    begun, streaming = feed(2)
    begun.close()
    with pytest.raises(tf.errors.InvalidArgumentError, match="no more shards come"):
        drawn(streaming, 1)
    begun.wait()


def test_what_a_killed_attempt_has_left_is_removed(feed, tmp_path):
    left = tmp_path / FOLDER
    left.mkdir()
    (left / "ask").write_text("next", encoding="utf-8")
    begun, streaming = feed(3)
    assert isinstance(begun, ShardFeed)
    assert len(drawn(streaming, 2)) == 2 * BATCH

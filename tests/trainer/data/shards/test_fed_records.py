"""Shards that come and go under a graph, which is given them by the feed of its process."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf

from tests.trainer.data.shards.numbered import BATCH, EXAMPLES, MEASURED, SPEC, drawn
from trainer.data.read import evaluation_batches, training_batches
from trainer.data.shards.fed_records import no_seed_of_the_graph
from trainer.data.shards.shard_store import Streaming


@pytest.mark.slow
@pytest.mark.parametrize(("shards", "at_once"), [(2, 1), (3, 1), (6, 3), (20, 8)])
def test_an_epoch_is_every_example_once_within_the_disk(feed, peaks, shards, at_once):
    begun, streaming = feed(shards, at_once=at_once)
    total = sum(EXAMPLES)
    # Five epochs are a whole number of batches, full over the seams.
    seen = drawn(streaming, 5 * total // BATCH)
    epochs = [seen[index * total : (index + 1) * total] for index in range(5)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(total))
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert max(peaks) <= streaming.limit
    assert begun.store.bytes_used <= streaming.limit


@pytest.mark.slow
def test_the_order_is_that_of_the_seed(feed):
    _, streaming = feed(4, at_once=2)
    first = drawn(streaming, 60)
    orders = {
        seed: tuple(drawn(Streaming(limit=streaming.limit, at_once=2), 60, seed=seed))
        for seed in (3, 4)
    }
    assert orders[3] == tuple(first)
    assert orders[4] != orders[3]


def test_what_fits_in_memory_is_fetched_once(feed, peaks):
    _, streaming = feed(2)
    total = sum(EXAMPLES)
    seen = drawn(streaming, 3 * total // BATCH, buffer=1000)
    assert set(Counter(seen[: total // BATCH * BATCH]).values()) == {1}
    assert len(peaks) <= len(EXAMPLES) + 2


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3, 9])
def test_parts_of_a_validation_are_all_of_it_once_in_whole_batches(feed, parts):
    begun, streaming = feed(2, parts=parts)

    @tf.function(input_signature=[tf.TensorSpec((), tf.int32)])
    def measured(part):
        found = tf.constant([], tf.int64)
        for x, _ in evaluation_batches(SPEC, streaming, batch_size=BATCH, part=part, of=parts):
            found = tf.concat([found, x], axis=0)
        return found

    # A part of a worker that is gone moves to another one, in any order; twice is as good.
    for _ in range(2):
        whole = [measured(tf.constant(part)).numpy() for part in reversed(range(parts))]
        assert np.concatenate(whole[::-1]).tolist() == list(range(sum(MEASURED)))
        assert all(len(each) % BATCH == 0 for each in whole[1:])
    assert begun.store.bytes_used <= streaming.limit


def test_training_goes_on_around_validations_within_the_disk(feed, peaks):
    _, streaming = feed(3)
    total = sum(EXAMPLES)
    batches = training_batches(SPEC, streaming, batch_size=BATCH, seed=1, shuffle_buffer=10)
    iterator, seen = iter(batches), []
    for index in range(5 * total // BATCH):
        if index % 140 == 0:
            measured = evaluation_batches(SPEC, streaming, batch_size=BATCH)
            assert sum(len(x) for x, _ in measured) == sum(MEASURED)
        seen.extend(next(iterator)[0].numpy())
    assert set(Counter(seen).values()) == {5}
    assert max(peaks) <= streaming.limit


def test_the_seed_of_a_graph_is_as_before():
    with tf.Graph().as_default() as graph:
        graph.seed = 7
        with no_seed_of_the_graph():
            assert graph.seed is None
        assert graph.seed == 7

"""Tests that an epoch's order is independent of the files' order, which may be sorted."""

from __future__ import annotations

import numpy as np
import pytest

from flotilla.trainer.data.blocks import MIXED, TOGETHER
from flotilla.trainer.data.read import training_batches

ROWS, BATCH = 4, 32
# There are 16 windows, as in a split with a few million rows, but the blocks are shorter.
EXAMPLES = 16 * MIXED * ROWS
PLACES = EXAMPLES // ROWS // TOGETHER


@pytest.fixture(params=["all", "little"])
def epochs(numbered, request):
    """Return the example numbers of two epochs, with a buffer for all or 1/16 of the examples."""
    spec, files = numbered(EXAMPLES, shards=4, rows=ROWS)
    held = {"all": EXAMPLES - 1, "little": EXAMPLES // 16}[request.param]
    batches = training_batches(spec, files, batch_size=BATCH, seed=5, shuffle_buffer=held)
    batches = batches.take(2 * EXAMPLES // BATCH)
    return np.concatenate([x for x, _ in batches.as_numpy_iterator()]).reshape(2, -1)


def test_no_epoch_correlates_with_the_files_or_with_another_epoch(epochs):
    # Random orders of n rows have rank correlations with a standard deviation of about 1 / sqrt(n).
    bound = 4 / np.sqrt(PLACES)
    ranks = np.argsort(epochs, axis=1)
    in_order = np.arange(EXAMPLES)
    for one, other in ((ranks[0], in_order), (ranks[1], in_order), (ranks[0], ranks[1])):
        assert abs(np.corrcoef(one, other)[0, 1]) < bound


def test_neighbours_in_a_file_are_no_neighbours_in_an_epoch(epochs):
    for epoch in epochs:
        next_to = np.abs(np.diff(epoch)) == 1
        # Two random rows of a window of n rows are neighbors with a probability of about 2 / n.
        # Allow three times as many.
        assert next_to.mean() < 3 / (MIXED * ROWS) * 2
        # Rows of the same block must also follow each other only about as often as by chance.
        assert (epoch[1:] // ROWS == epoch[:-1] // ROWS).mean() < 2 / MIXED


def test_a_batch_of_sorted_examples_is_a_sample_of_all(epochs):
    means = epochs.reshape(-1, BATCH).mean(axis=1)
    # Standard deviation of the mean of 32 uniformly drawn numbers.
    chance = EXAMPLES / np.sqrt(12 * BATCH)
    assert means.std() < 1.5 * chance
    # The mean of each eighth of an epoch must be near the middle of the files.
    parts = epochs.reshape(16, -1).mean(axis=1) / EXAMPLES
    assert np.abs(parts - 0.5).max() < 0.12

"""Tests that reading examples by index follows the order of the files in every storage mode."""

from __future__ import annotations

import random

import pytest
import tensorflow as tf

from flotilla.trainer.data.read import RUN, evaluation_batches, make_random_access


@pytest.fixture
def in_place(numbered, monkeypatch):
    """Return a function that returns a split's examples in order and a reader for random access."""

    def read(examples, *, in_memory, rows=4):
        spec, files = numbered(examples, rows=rows)
        monkeypatch.chdir(files[0].parent)
        batches = evaluation_batches(spec, files, batch_size=examples)
        ((values, _),) = batches.as_numpy_iterator()
        return values.tolist(), make_random_access(spec, ".", in_memory=in_memory)

    return read


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_example_is_found_by_its_number(in_place, in_memory):
    values, found = in_place(50, in_memory=in_memory)
    (held,) = found.held()
    draw = random.Random(0)
    in_turn = [*range(40, 48), *range(3), 3, 3, 49, 48, *range(20, 31)]
    for numbers in (in_turn, draw.sample(range(50), 50), [7], list(range(50))):
        read, _ = tf.function(found.read)(held, tf.constant(numbers, tf.int64))
        assert read.numpy().tolist() == [values[number] for number in numbers]


@pytest.mark.parametrize(
    ("in_memory", "rows", "run"), [(None, 4, 1), (False, 4, RUN), (False, 512, 64)]
)
def test_a_small_split_is_held_and_a_large_one_is_read_in_runs(in_place, in_memory, rows, run):
    assert in_place(20, in_memory=in_memory, rows=rows)[1].run == run

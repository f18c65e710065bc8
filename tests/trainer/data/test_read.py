"""Tests batches of records: shuffled, staged, divided into inputs and labels, and by number."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.data import read
from flotilla.trainer.data.blocks import MIXED, TOGETHER
from flotilla.trainer.data.read import (
    RUN,
    evaluation_batches,
    labelled_columns,
    make_random_access,
    stage_shards,
    training_batches,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import UserError
from tests.trainer.data import made_builders as builders

# Shuffle buffer by mode: the whole split in memory, or streamed through a small buffer.
BUFFERS = {"memory": None, "stream": 7}


@pytest.fixture(params=BUFFERS.values(), ids=BUFFERS.keys())
def buffer(request):
    return request.param


def train(spec, files, *, batch_size=4, seed=0, buffer=None):
    return training_batches(spec, files, batch_size=batch_size, seed=seed, shuffle_buffer=buffer)


def numbers(batches, count):
    taken = itertools.chain.from_iterable(
        values.numpy().tolist() for values, _ in batches.take(-(-count // 4))
    )
    return list(itertools.islice(taken, count))


# A buffer of one example does not shuffle.
@pytest.mark.parametrize("buffer", [None, 7, 1])
@pytest.mark.parametrize("examples", [23, 3])
def test_every_epoch_has_each_example_once(numbered, buffer, examples):
    spec, files = numbered(examples)
    found = numbers(train(spec, files, buffer=buffer), 5 * examples)
    # 23 is not a multiple of the batch size, so batches span two epochs.
    epochs = [found[start : start + examples] for start in range(0, 5 * examples, examples)]
    assert [sorted(each) for each in epochs] == [[*range(examples)]] * 5
    if examples > 3 and buffer != 1:
        assert len({*map(tuple, epochs), tuple(range(examples))}) == 6


def test_a_batch_may_be_larger_than_an_epoch(numbered, buffer):
    spec, files = numbered(5)
    batches = train(spec, files, batch_size=12, buffer=buffer)
    ((values, _),) = batches.take(1)
    # The batch size must also be known when the graph is built.
    for each, label in [batches.element_spec, *batches.take(3)]:
        assert each.shape == label.shape == (12,)
    assert np.bincount(values).tolist() == [3, 3, 2, 2, 2] or sorted(values.numpy()[:5]) == [
        0, 1, 2, 3, 4,
    ]  # fmt: skip


def test_the_seed_gives_the_order(numbered, buffer):
    spec, files = numbered(60)
    # These are the smallest and the largest seed that the configuration allows.
    first, same, other = (
        numbers(train(spec, files, seed=seed, buffer=buffer), 150) for seed in (0, 0, 2**31 - 1)
    )
    assert first == same
    assert first != other
    assert sorted(first[:60]) == sorted(other[:60]) == list(range(60))
    if buffer is not None:
        # If the split is streamed, another order begins.
        batches = training_batches(
            spec, files, batch_size=4, seed=0, taken=20, shuffle_buffer=buffer
        )
        resumed = numbers(batches, 60)
        assert first[:60] != resumed
        assert sorted(resumed) == list(range(60))


@pytest.mark.slow
@pytest.mark.parametrize("taken", [1, 8, 23, 24, 60, 2**40])
def test_the_order_in_memory_goes_on_where_it_was(numbered, taken):
    spec, files = numbered(23)
    resumed = numbers(training_batches(spec, files, batch_size=4, seed=3, taken=taken), 46)
    # The order depends on the epoch's number, so earlier epochs need not be read.
    epochs = [
        numbers(training_batches(spec, files, batch_size=4, seed=3, taken=epoch * 23), 23)
        for epoch in range(taken // 23, taken // 23 + 4)
    ]
    whole = list(itertools.chain.from_iterable(epochs))
    assert resumed == whole[taken % 23 :][:46]
    if taken < 100:
        assert resumed == numbers(train(spec, files, seed=3), taken + 46)[taken:]


def test_in_memory_every_place_is_equally_likely(numbered):
    spec, files = numbered(4)
    batches = train(spec, files, batch_size=400).take(20)
    found = np.concatenate([values.numpy() for values, _ in batches]).reshape(-1, 4)
    for place in range(4):
        assert abs(np.bincount(found[:, place]) - 500).max() < 100


def test_an_example_stays_together(numbered, buffer):
    spec, files = numbered(30)
    spec = replace(spec, inputs=("image", "number"))
    for inputs, label in train(spec, files, buffer=buffer).take(20):
        assert (inputs["image"].numpy()[:, 0, 0] == inputs["number"].numpy()).all()
        assert (label.numpy() == inputs["number"].numpy() % 10).all()


def test_a_pattern_in_the_working_folder_and_its_files_give_the_same(numbered, buffer, monkeypatch):
    spec, files = numbered(30)
    monkeypatch.chdir(files[0].parents[1])
    by_pattern = numbers(train(spec, "shards/*.tfrecord", buffer=buffer), 60)
    assert by_pattern == numbers(train(spec, files, buffer=buffer), 60)
    with pytest.raises(tf.errors.InvalidArgumentError, match="No files matched pattern"):
        train(spec, "none-*.tfrecord", buffer=buffer)


def test_a_part_of_the_shards(numbered, buffer):
    spec, files = numbered(12, shards=3)
    # The spec describes the whole split, of which this worker reads only one shard.
    found = numbers(train(spec, files[1:2], buffer=buffer), 12)
    assert sorted(found) == sorted([4, 5, 6, 7] * 3)


def test_all_of_it_is_a_graph(numbered, buffer, monkeypatch):
    """The graph must not call Python code, and must find its files when it runs."""
    spec, files = numbered(12)
    monkeypatch.chdir(files[0].parents[1])

    @tf.function
    def first():
        return next(iter(train(spec, "shards/*.tfrecord", buffer=buffer)))

    graph = first.get_concrete_function().graph.as_graph_def()
    nodes = [*graph.node, *(node for part in graph.library.function for node in part.node_def)]
    kinds = {node.op for node in nodes}
    assert not {kind for kind in kinds if "PyFunc" in kind}
    assert kinds & {"MatchingFilesDataset", "ListFilesDataset", "MatchingFiles"}
    values, _ = first()
    assert values.shape == (4,)


@pytest.mark.parametrize(("held", "cached"), [(16 * 100, True), (16 * 99, False), (0, False)])
def test_what_fits_is_read_once(numbered, monkeypatch, held, cached):
    spec, files = numbered(100)
    monkeypatch.setattr(read, "SHUFFLE_BYTES", held)
    iterator = iter(train(spec, files))
    next(iterator)
    for path in files:
        path.unlink()
    if cached:
        assert len([next(iterator) for _ in range(100)]) == 100
        return
    # Read far more than the batches that the reader may have prefetched.
    with pytest.raises(tf.errors.NotFoundError):
        [next(iterator) for _ in range(10_000)]


def test_evaluation_is_in_order_and_ends(numbered):
    spec, files = numbered(30, shards=12)
    for given in (files, str(files[0].parent / "*.tfrecord")):
        batches = evaluation_batches(spec, given, batch_size=8)
        found = [values.numpy().tolist() for values, _ in batches]
        assert [len(each) for each in found] == [8, 8, 8, 6]
        assert list(itertools.chain(*found)) == list(range(30))
        assert [values.numpy().tolist() for values, _ in batches] == found


def test_columns_that_no_model_takes_come_in_the_same_order(numbered):
    spec, files = numbered(11, shards=2)
    assert spec.inputs == ("number",)
    batches = labelled_columns(spec, files, batch_size=4, columns=["number", "image"])
    plain = evaluation_batches(spec, files, batch_size=4)
    for ((values, label), columns), (expected, own) in zip(batches, plain, strict=True):
        np.testing.assert_array_equal(values, expected)
        np.testing.assert_array_equal(label, own)
        np.testing.assert_array_equal(columns["number"], expected)
        assert columns["image"].shape == (len(label), 2, 2)


def test_a_damaged_record_is_an_error(numbered):
    spec, files = numbered(12)
    data = bytearray(files[0].read_bytes())
    data[20] ^= 1
    files[0].write_bytes(data)
    with pytest.raises(tf.errors.DataLossError):
        list(evaluation_batches(spec, files, batch_size=4))


@pytest.mark.parametrize("of_graph", [0, 5])
def test_a_seed_of_a_worker_is_a_tensor_in_a_graph(numbered, of_graph):
    """Regression test: with a graph seed of 0, comparing the seed tensor with 0 failed."""
    spec, files = numbered(30)

    @tf.function
    def first(seed):
        tf.random.set_seed(of_graph)
        batches = training_batches(spec, files, batch_size=30, seed=seed, shuffle_buffer=10)
        return next(iter(batches))[0]

    seen = first(tf.constant(3, tf.int64)).numpy()
    assert sorted(seen.tolist()) == list(range(30))


@pytest.fixture
def batches(prepared):
    """Return a function that reads 40 examples as a training batch and as an evaluation batch."""

    def read(name, **section):
        dataset = prepared(name, validation=0, **section)
        spec = DatasetSpec.from_manifest(dataset.manifest)
        folder = storage.local_path(dataset.uri)
        files = [folder / each for each in spec.files("train")]
        trained = training_batches(spec, files, batch_size=40, seed=0)
        evaluated = evaluation_batches(spec, files, batch_size=40)
        # The shapes must be equal except for the batch size, which is known only in training.
        known = tf.nest.map_structure(lambda each: each.shape[1:], trained.element_spec)
        assert known == tf.nest.map_structure(lambda each: each.shape[1:], evaluated.element_spec)
        return [next(iter(each.as_numpy_iterator())) for each in (trained, evaluated)]

    return read


def test_several_labels_and_weights(batches):
    section = {"inputs": "x", "label": ("price", "sizes", "sold"), "weight": "times"}
    for inputs, labels, weights in batches("Weighted", **section):
        number = inputs[:, 0]
        assert sorted(number) == list(range(40))
        np.testing.assert_array_equal(labels["price"], number / 8)
        assert labels["price"].dtype == np.float64
        np.testing.assert_array_equal(labels["sizes"], np.stack([number, number / 2, -number], 1))
        np.testing.assert_array_equal(labels["sold"], number % 2 == 0)
        np.testing.assert_array_equal(weights, number % 4)
        assert weights.dtype == np.float32


def test_one_label_of_several_numbers_and_a_weight_that_is_an_input_of_any_type(batches):
    for inputs, labels, weights in batches(
        "Weighted", inputs=("sold", "x"), label="sizes", weight="sold"
    ):
        assert labels.shape == (40, 3)
        np.testing.assert_array_equal(labels[:, 0], inputs["x"][:, 0])
        np.testing.assert_array_equal(weights, inputs["sold"].astype(np.float32))


def test_sequences_to_labels_and_images_to_masks(batches):
    section = {
        "inputs": ("sound", "words", "picture"),
        "label": ("kinds", "tags", "mask"),
        "shapes": {
            "sound": (4,), "words": (4,), "kinds": (4,), "picture": (6, 6, 3), "mask": (6, 6, 1),
        },
    }  # fmt: skip
    for inputs, labels in batches("Ragged", **section):
        lengths = (inputs["sound"] > 0).sum(axis=1)
        np.testing.assert_array_equal((labels["kinds"] >= 0).sum(axis=1), lengths)
        np.testing.assert_array_equal((inputs["words"] != b"").sum(axis=1), lengths)
        assert labels["tags"].shape == (40, 3)
        sets = sorted(tuple(np.flatnonzero(each)) for each in labels["tags"])
        assert sets == sorted(tuple(builders.ragged(number)["tags"]) for number in range(40))
        images, masks = inputs["picture"], labels["mask"]
        assert (images.shape, images.dtype) == ((40, 6, 6, 3), np.uint8)
        assert np.bincount(masks[:, 0, 0, 0]).tolist() == [14, 13, 13]
        assert (masks == masks[:, :1, :1]).all()


def test_a_set_of_labels_may_be_a_sequence(batches):
    shapes = {"sound": (4,), "tags": (2,)}
    for _, labels in batches("Ragged", inputs="sound", label="tags", shapes=shapes):
        expected = [[*builders.ragged(number)["tags"], -1, -1][:2] for number in range(40)]
        assert sorted(labels.tolist()) == sorted(expected)


def names(paths):
    return [path.name for path in paths]


def shards(*indexes):
    return [f"train-{index:05d}-of-00008.tfrecord" for index in indexes]


@pytest.mark.parametrize(
    ("index", "of", "expected"),
    [(0, 1, range(8)), (0, 2, (0, 2, 4, 6)), (1, 2, (1, 3, 5, 7)), (2, 3, (2, 5)), (7, 8, (7,))],
)
def test_the_shards_of_one_reader(digits, tmp_path, index, of, expected):
    found = stage_shards(digits.uri, tmp_path / "shards", "train", index, of)
    assert names(found) == shards(*expected)
    assert sorted(tmp_path.glob("shards/*.tfrecord")) == found


def test_shards_of_another_time_are_removed(digits, tmp_path):
    stage_shards(digits.uri, tmp_path, "train", 0, 2)
    (tmp_path / "notes.txt").write_text("not a shard")
    stage_shards(digits.uri, tmp_path, "train", 1, 4)
    assert names(sorted(tmp_path.iterdir())) == ["notes.txt", *shards(1, 5)]
    stage_shards(digits.uri, tmp_path, "validation")
    assert names(tmp_path.glob("*.tfrecord")) == ["validation-00000-of-00001.tfrecord"]


def test_more_readers_than_shards(digits, tmp_path):
    with pytest.raises(UserError) as caught:
        stage_shards(digits.uri, tmp_path / "shards", "train", 8, 9)
    assert str(caught.value) == (
        "data.shards: 9 readers cannot share the 8 shards of 'train'; set data.shards to 9 or more"
    )
    assert not (tmp_path / "shards").exists()


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

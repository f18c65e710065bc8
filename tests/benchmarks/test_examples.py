"""The comparisons of training input and of preparing: both sides do the whole of the same work."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks import examples, launched, preparing
from benchmarks.baselines import tfds_input
from benchmarks.examples import Rounds, Speeds, shards_of, speeds_of
from trainer import storage

PAIRS = [
    (Speeds(first=8.0, later=100.0), Speeds(first=2.0, later=5.0)),
    (Speeds(first=9.0, later=100.0), Speeds(first=3.0, later=4.0)),
    (Speeds(first=6.0, later=100.0), Speeds(first=1.0, later=2.0)),
]


def test_an_epoch_is_taken_whole_and_in_order():
    seen = []

    def see(label):
        seen.append(int(label[0]))
        return label

    def watched(image, label):
        return image, tf.ensure_shape(tf.numpy_function(see, [label], tf.int64), [2])

    labels = tf.data.Dataset.range(8).repeat().batch(2).map(lambda label: (label, label))
    found = speeds_of(labels.map(watched), examples=8, batch_size=2)
    # TensorFlow may have read ahead.
    taken = 4 * examples.EPOCHS
    assert seen[:taken] == [0, 2, 4, 6] * examples.EPOCHS
    assert found.first > 0
    assert found.later > 0


def test_the_first_epoch_has_fetched_its_files():
    labels = tf.data.Dataset.range(8).repeat().batch(2).map(lambda label: (label, label))
    found = speeds_of(labels, examples=8, batch_size=2, staging=1000.0)
    assert found.first == pytest.approx(8 / 1000, rel=0.1)
    assert found.later > 1


def test_first_and_later_epochs_are_metrics_of_the_same_rounds(monkeypatch):
    rounds = Rounds(pairs=PAIRS, cached=Speeds(first=1.0, later=50.0))
    monkeypatch.setattr(examples, "_rounds", lambda: rounds)
    first, later = examples.first_epoch().tree(), examples.later_epochs().tree()
    assert (first["rounds"], first["at_least"], first["holds"]) == ([4.0, 3.0, 6.0], 4, True)
    assert (later["rounds"], later["at_least"], later["holds"]) == ([20.0, 25.0, 50.0], 10, True)
    assert later["tfds_with_a_cache"] == 50


@pytest.fixture(scope="module")
def mnist(tmp_path_factory, mnist_dir):
    """Prepare MNIST by both, as the comparison of preparing does."""
    folder = tmp_path_factory.mktemp("mnist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOTILLA_MNIST_DIR", str(mnist_dir))
        patch.setitem(launched.SAME_AS_BASELINE, "data.manual_dir", str(mnist_dir))
        for which in (preparing.FLOTILLA, preparing.TFDS):
            assert preparing.prepared_by(which, folder / which) > 0
    return folder


@pytest.mark.long
def test_both_prepare_all_of_it(mnist):
    (ours,) = (mnist / preparing.FLOTILLA / "datasets").iterdir()
    splits = storage.read_manifest(storage.uri_of(ours)).fields["splits"]
    assert {name: split["examples"] for name, split in splits.items()} == {
        "train": 55_000, "validation": 5_000, "test": 10_000,
    }  # fmt: skip
    info = json.loads(next(mnist.glob("tfds/mnist/*/dataset_info.json")).read_text())
    counts = {split["name"]: sum(map(int, split["shardLengths"])) for split in info["splits"]}
    assert counts == {"train": 60_000, "test": 10_000}


# TFDS reads its own description of a dataset so.
@pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")
@pytest.mark.long
def test_both_give_each_example_once_an_epoch_in_another_order(mnist):
    (ours,) = (mnist / preparing.FLOTILLA / "datasets").iterdir()
    sides = [
        shards_of(storage.uri_of(ours), mnist / "shards"),
        tfds_input.batches(tfds_input.builder(mnist / preparing.TFDS), batch_size=examples.BATCH),
    ]
    for batches in sides:
        epochs = [_sums(batches, skip) for skip in (0, 550)]
        assert [len(each) for each in epochs] == [55_000, 55_000]
        np.testing.assert_array_equal(*map(np.sort, epochs))
        assert (epochs[0] != epochs[1]).mean() > 0.9


def _sums(batches, skip):
    """Return what tells the images of an epoch apart, in order."""
    weights = np.random.default_rng(0).integers(1, 1 << 20, 784)
    taken = batches.skip(skip).take(550).as_numpy_iterator()
    return np.concatenate([images.reshape(len(images), -1) @ weights for images, _ in taken])

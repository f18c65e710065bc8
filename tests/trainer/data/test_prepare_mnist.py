"""MNIST from the official files, whole."""

import collections
import gzip

import numpy as np
import pytest

from trainer import storage
from trainer.config.data import DataConfig
from trainer.data.prepare import prepare
from trainer.data.read import evaluation_batches, stage_shards, training_batches
from trainer.data.spec import DatasetSpec
from trainer.errors import UserError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mnist(mnist_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("mnist")
    config = DataConfig(dataset="mnist", manual_dir=str(mnist_dir), validation=5000, shards=8)
    return prepare(config, storage.uri_of(folder / "root"), folder / "scratch")


def official(folder, part):
    """The images and labels of the files, in their own format (LeCun, Cortes, Burges)."""
    with gzip.open(folder / f"{part}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
    with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return images, labels


def counted(images, labels):
    """How often there is each image with each label: twice where two people wrote the same."""
    return collections.Counter(
        (image.tobytes(), int(label)) for image, label in zip(images, labels, strict=True)
    )


def test_the_sizes(mnist):
    splits = mnist.manifest.fields["splits"]
    assert {name: split["examples"] for name, split in splits.items()} == {
        "train": 55_000,
        "validation": 5000,
        "test": 10_000,
    }
    assert splits["train"]["shards"] == [6875] * 8


def test_every_image_is_the_official_one(mnist, mnist_dir, contents):
    train, validation, test = (
        counted(values["image"], values["label"])
        for values in (contents(mnist, split) for split in ("train", "validation", "test"))
    )
    assert train + validation == counted(*official(mnist_dir, "train"))
    assert test == counted(*official(mnist_dir, "t10k"))


def test_every_class_is_in_every_split(mnist):
    for counts in mnist.manifest.fields["target_counts"]["label"].values():
        share = np.array(counts) / sum(counts)
        assert len(counts) == 10
        assert (abs(share - 0.1) < 0.03).all()


def test_every_class_is_in_every_shard(mnist, tmp_path):
    spec = DatasetSpec.from_manifest(mnist.manifest)
    for path in stage_shards(mnist.uri, tmp_path, "train"):
        labels = np.concatenate(
            [label.numpy() for _, label in evaluation_batches(spec, [path], batch_size=5000)]
        )
        assert (abs(np.bincount(labels, minlength=10) / len(labels) - 0.1) < 0.03).all()


def test_two_workers_see_all_of_it_in_an_epoch(mnist, tmp_path):
    spec = DatasetSpec.from_manifest(mnist.manifest)
    seen = 0
    for index in range(2):
        files = stage_shards(mnist.uri, tmp_path / str(index), "train", index, 2)
        batches = training_batches(spec, files, batch_size=100, seed=0)
        epoch = batches.take(27_500 // 100)
        seen += len({image.tobytes() for values, _ in epoch for image in values.numpy()})
    assert seen > 54_990


def test_it_is_found_again_without_the_files(mnist, tmp_path):
    root = storage.uri_of(storage.local_path(mnist.uri).parents[1])
    again = prepare(
        DataConfig(dataset="mnist", validation=5000, shards=8), root, tmp_path / "scratch"
    )
    assert again.reused


def test_without_the_files(root, scratch, outside_attempts):
    with pytest.raises(UserError, match=r"set data\.manual_dir to it: "):
        prepare(DataConfig(dataset="mnist"), root, scratch)
    assert list(scratch.iterdir()) == []
    outside_attempts.clear()

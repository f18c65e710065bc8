"""Each reader gets its own shards, verified, and nothing else."""

import shutil

import pytest

from trainer import storage
from trainer.data.read import evaluation_batches, stage_shards
from trainer.data.spec import DatasetSpec
from trainer.errors import UserError


def names(paths):
    return [path.name for path in paths]


def shards(*indexes):
    return [f"train-{index:05d}-of-00008.tfrecord" for index in indexes]


def test_all_shards_of_a_split(digits, tmp_path):
    found = stage_shards(digits.uri, tmp_path / "shards", "train")
    assert names(found) == shards(*range(8))
    assert sorted(tmp_path.glob("shards/*.tfrecord")) == found


@pytest.mark.parametrize(
    ("index", "of", "expected"),
    [(0, 2, (0, 2, 4, 6)), (1, 2, (1, 3, 5, 7)), (2, 3, (2, 5)), (7, 8, (7,))],
)
def test_the_shards_of_one_reader(digits, tmp_path, index, of, expected):
    found = stage_shards(digits.uri, tmp_path / "shards", "train", index, of)
    assert names(found) == shards(*expected)
    assert sorted(tmp_path.glob("shards/*.tfrecord")) == found


@pytest.mark.slow
@pytest.mark.parametrize("of", [1, 2, 3, 5, 8])
def test_all_readers_together_have_every_example_once(digits, tmp_path, of):
    spec = DatasetSpec.from_manifest(digits.manifest)
    images = []
    for index in range(of):
        files = stage_shards(digits.uri, tmp_path / str(index), "train", index, of)
        for values, _ in evaluation_batches(spec, files, batch_size=500):
            images += [image.tobytes() for image in values.numpy()]
    assert len(images) == len(set(images)) == spec.examples("train")


def test_shards_that_are_there_are_kept(digits, tmp_path):
    found = stage_shards(digits.uri, tmp_path, "train", 0, 4)
    before = [path.stat().st_mtime_ns for path in found]
    stage_shards(digits.uri, tmp_path, "train", 0, 4)
    assert [path.stat().st_mtime_ns for path in found] == before


def test_shards_of_another_time_are_removed(digits, tmp_path):
    stage_shards(digits.uri, tmp_path, "train", 0, 2)
    (tmp_path / "notes.txt").write_text("not a shard")
    stage_shards(digits.uri, tmp_path, "train", 1, 4)
    assert names(sorted(tmp_path.iterdir())) == ["notes.txt", *shards(1, 5)]
    stage_shards(digits.uri, tmp_path, "validation")
    assert names(tmp_path.glob("*.tfrecord")) == ["validation-00000-of-00001.tfrecord"]


def test_a_damaged_copy_is_fetched_again(digits, tmp_path):
    (path,) = stage_shards(digits.uri, tmp_path, "train", 3, 8)
    path.write_bytes(b"damaged")
    stage_shards(digits.uri, tmp_path, "train", 3, 8)
    assert path.read_bytes() == (storage.local_path(digits.uri) / path.name).read_bytes()


def test_a_damaged_source_is_refused(digits, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(storage.local_path(digits.uri), copy)
    (copy / shards(2)[0]).write_bytes(b"damaged")
    uri = storage.uri_of(copy)
    with pytest.raises(storage.Corrupt, match="train-00002-of-00008"):
        stage_shards(uri, tmp_path / "shards", "train", 2, 4)
    # Who needs another shard is not concerned.
    assert stage_shards(uri, tmp_path / "shards", "train", 1, 4)


def test_more_readers_than_shards(digits, tmp_path):
    with pytest.raises(UserError) as caught:
        stage_shards(digits.uri, tmp_path / "shards", "train", 8, 9)
    assert str(caught.value) == (
        "data.shards: 9 readers cannot share the 8 shards of 'train'; set data.shards to 9 or more"
    )
    assert not (tmp_path / "shards").exists()


def test_a_split_that_is_not_there(digits, tmp_path):
    with pytest.raises(UserError, match="no split 'tests'; did you mean 'test'"):
        stage_shards(digits.uri, tmp_path, "tests")


def test_what_is_no_dataset(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").write_text("")
    uri = storage.uri_of(tmp_path / "published")
    storage.publish(tmp_path / "there", uri, kind="model")
    with pytest.raises(UserError, match="a model is published there"):
        stage_shards(uri, tmp_path / "shards", "train")


def test_nothing_published(tmp_path):
    with pytest.raises(storage.NotPublished):
        stage_shards(storage.uri_of(tmp_path / "nothing"), tmp_path / "shards", "train")

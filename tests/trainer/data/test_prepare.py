"""`digits` end to end: the key, the published directory, reuse and repair."""

import hashlib
import itertools
import json
import logging
import os
import shutil

import google_crc32c
import numpy as np
import pytest
from sklearn.datasets import load_digits

from trainer import storage
from trainer.config.data import DataConfig
from trainer.data import key as key_module
from trainer.data import prepare as module
from trainer.data.builders import builder_source
from trainer.data.key import dataset_key
from trainer.data.prepare import prepare, selected
from trainer.data.spec import DatasetSpec
from trainer.errors import ConfigError, UserError


@pytest.fixture
def own_digits(digits, tmp_path):
    """A copy of the prepared digits that a test may damage, and how to prepare it again."""
    root = tmp_path / "root"
    shutil.copytree(storage.local_path(digits.uri).parents[1], root)
    (published,) = (root / "datasets").iterdir()

    def again(**options):
        return prepare(DataConfig(**options), storage.uri_of(root), tmp_path / "scratch")

    return published, again


def images_of(values):
    return sorted(image.tobytes() for image in values["image"])


def test_it_is_published_by_its_key(digits):
    assert digits.uri.endswith(f"/root/datasets/{dataset_key(DataConfig(), {'version': '1.0.0'})}")
    assert storage.verify(digits.uri) == digits.manifest
    assert not digits.reused


def test_the_manifest(digits):
    fields = digits.manifest.fields
    assert digits.manifest.kind == "dataset"
    assert (fields["dataset"], fields["version"]) == ("digits", "1.0.0")
    assert fields["splits"]["train"] == {"examples": 1293, "shards": [162] * 5 + [161] * 3}
    assert fields["splits"]["validation"] == {"examples": 144, "shards": [144]}
    assert fields["splits"]["test"] == {"examples": 360, "shards": [120] * 3}
    assert (fields["inputs"], fields["targets"]) == (["image"], ["label"])
    assert (fields["weight"], fields["group"]) == ("", "")
    assert fields["features"]["label"]["num_classes"] == 10
    assert fields["features"]["label"]["labels"] == [str(digit) for digit in range(10)]


def test_the_files_are_the_shards_and_the_features(digits):
    spec = DatasetSpec.from_manifest(digits.manifest)
    expected = [name for split in spec.shards for name in spec.files(split)]
    assert [entry.path for entry in digits.manifest.files] == sorted(
        [*expected, "examples.npz", "features.json", "statistics.json"]
    )


def test_the_splits_are_disjoint_and_complete(digits, contents):
    splits = {
        split: images_of(contents(digits, split)) for split in ("train", "validation", "test")
    }
    source = np.round(load_digits().images * 255 / 16).astype(np.uint8)
    found = list(itertools.chain(*splits.values()))
    assert sorted(found) == sorted(image.tobytes() for image in source)
    # All digits differ, so that an example which is in two splits would show.
    assert len(set(found)) == 1797


def test_an_image_keeps_its_label(digits, contents):
    source = load_digits()
    labels = {
        np.round(image * 255 / 16).astype(np.uint8).tobytes(): label
        for image, label in zip(source.images, source.target, strict=True)
    }
    test = contents(digits, "test")
    assert [labels[image.tobytes()] for image in test["image"]] == test["label"].tolist()


def test_brightness_is_that_of_a_byte(digits, contents):
    images = contents(digits, "train")["image"]
    assert images.shape == (1293, 8, 8, 1)
    assert images.dtype == np.uint8
    assert (images.min(), images.max()) == (0, 255)


def test_labels_are_counted(digits, contents):
    for split, counts in digits.manifest.fields["target_counts"]["label"].items():
        assert np.bincount(contents(digits, split)["label"], minlength=10).tolist() == counts


def test_the_fingerprint_is_of_the_shards(digits):
    crcs = {split: [] for split in digits.manifest.fields["splits"]}
    folder = storage.local_path(digits.uri)
    spec = DatasetSpec.from_manifest(digits.manifest)
    for split, found in crcs.items():
        for name in spec.files(split):
            found.append(f"{google_crc32c.value((folder / name).read_bytes()):08x}")
    assert digits.manifest.fields["fingerprint"] == fingerprint_of(crcs)


def fingerprint_of(crcs):
    return hashlib.sha256(json.dumps(crcs, sort_keys=True).encode()).hexdigest()


def test_it_is_reused(own_digits, monkeypatch):
    published, again = own_digits
    before = {path: path.stat().st_mtime_ns for path in published.iterdir()}
    monkeypatch.setattr(builder_source, "download", lambda *_: pytest.fail("prepared again"))
    found = again()
    assert found.reused
    assert found.uri == storage.uri_of(published)
    assert {path: path.stat().st_mtime_ns for path in published.iterdir()} == before


@pytest.mark.parametrize(
    "options", [{"version": "1.0.0"}, {"manual_dir": "/no/such/folder"}, {"validation": 0.10}]
)
def test_what_does_not_change_the_content_finds_the_same(own_digits, options):
    _, again = own_digits
    assert again(**options).reused


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"seed": 1}, {"shards": 4}, {"validation": 100}])
def test_another_configuration_is_another_dataset(own_digits, options):
    published, again = own_digits
    found = again(**options)
    assert not found.reused
    assert sorted(path.name for path in published.parent.iterdir()) == sorted(
        [published.name, found.uri.rpartition("/")[2]]
    )
    assert storage.verify(found.uri)


def test_another_seed_draws_another_validation(own_digits, contents, digits):
    _, again = own_digits
    other = again(seed=1)
    assert images_of(contents(other, "validation")) != images_of(contents(digits, "validation"))
    assert images_of(contents(other, "test")) == images_of(contents(digits, "test"))


def test_the_same_configuration_gives_the_same_bytes(digits, tmp_path):
    again = prepare(DataConfig(), storage.uri_of(tmp_path / "root"), tmp_path / "scratch")
    assert not again.reused
    assert again.manifest.files == digits.manifest.files
    assert again.manifest.fields == digits.manifest.fields


def damage(published):
    shard = published / "train-00003-of-00008.tfrecord"
    data = bytearray(shard.read_bytes())
    data[500] ^= 1
    shard.write_bytes(data)


@pytest.mark.slow
@pytest.mark.parametrize(
    "harm",
    [
        damage,
        lambda published: (published / "features.json").unlink(),
        lambda published: os.truncate(published / "test-00000-of-00003.tfrecord", 100),
        lambda published: (published / "MANIFEST.json").write_text("{"),
        lambda published: (published / "MANIFEST.json").unlink(),
    ],
    ids=["bit", "missing", "short", "manifest", "unpublished"],
)
def test_a_damaged_dataset_is_made_again(own_digits, digits, caplog, harm):
    published, again = own_digits
    harm(published)
    found = again()
    assert not found.reused
    assert storage.verify(found.uri).same_content(digits.manifest)
    assert again().reused
    if warnings := [record for record in caplog.records if record.name == module.__name__]:
        assert "it is prepared again" in warnings[0].getMessage()


def test_the_damage_is_named_in_the_log(own_digits, caplog):
    published, again = own_digits
    damage(published)
    with caplog.at_level(logging.WARNING, logger=module.__name__):
        again()
    (warning, *_) = [record for record in caplog.records if record.name == module.__name__]
    assert "train-00003-of-00008.tfrecord has crc32c" in warning.getMessage()


def test_a_damaged_dataset_stays_until_there_is_another(own_digits, monkeypatch):
    published, again = own_digits
    damage(published)

    def fail(*_, **_options):
        raise UserError("no network")

    monkeypatch.setattr(builder_source, "download", fail)
    with pytest.raises(UserError, match="no network"):
        again()
    assert (published / "MANIFEST.json").exists()


def test_one_that_was_put_right_meanwhile_is_kept(own_digits, digits, monkeypatch):
    published, again = own_digits
    damage(published)
    write = module._write

    def write_and_repair(*args):
        shutil.rmtree(published)
        shutil.copytree(storage.local_path(digits.uri), published)
        return write(*args)

    monkeypatch.setattr(module, "_write", write_and_repair)
    assert again().manifest == digits.manifest


def test_nothing_is_left_in_scratch(own_digits, tmp_path):
    _, again = own_digits
    again(seed=1)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_nothing_is_written_elsewhere(tmp_path, monkeypatch):
    home = tmp_path / "home"
    (home / "here").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home / "here")
    prepare(DataConfig(), storage.uri_of(tmp_path / "root"), tmp_path / "scratch")
    assert [path for path in home.rglob("*") if path.is_file()] == []
    assert {path.name for path in tmp_path.iterdir()} == {"home", "root", "scratch"}


def test_the_key():
    key = dataset_key(DataConfig(), {"version": "1.0.0"})
    assert key.startswith("digits-")
    assert len(key) == len("digits-") + 12


@pytest.mark.parametrize(
    ("dataset", "start"),
    [("glue/cola", "glue-cola-"), ("some.module:Builder", "some.module-Builder-")],
)
def test_the_key_is_one_name(dataset, start):
    assert dataset_key(DataConfig(dataset=dataset), {"version": "1.0.0"}).startswith(start)


def test_the_key_follows_the_content_only(monkeypatch):
    def key(version="1.0.0", **options):
        return dataset_key(DataConfig(**options), {"version": version})

    same = {key(), key(version="1.0.0"), key(manual_dir="x"), key(validation=0.1)}
    other = {key("2.0.0"), key(seed=1), key(shards=7), key(validation=1), key(dataset="mnist")}
    monkeypatch.setattr(key_module, "SCHEMA", 99)
    other.add(key())
    assert len(same) == 1
    assert len(other - same) == 6


def test_an_unknown_dataset_leaves_nothing(root, scratch, tmp_path):
    with pytest.raises(ConfigError, match="did you mean 'digits'"):
        prepare(DataConfig(dataset="digit"), root, scratch)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_scratch_that_cannot_be_written(root, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as caught:
        prepare(DataConfig(), root, tmp_path / "file" / "scratch")
    assert str(tmp_path / "file") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_root_that_cannot_be_written(tmp_path, scratch):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file"):
        prepare(DataConfig(), storage.uri_of(tmp_path / "file"), scratch)
    assert list(scratch.iterdir()) == []


def test_what_a_dataset_would_have_is_known_without_preparing_it(tmp_path):
    found = selected(DataConfig(), tmp_path / "scratch")
    assert (found.inputs, found.targets) == (("image",), ("label",))
    assert found.specs["label"].num_classes == 10
    assert found.specs["image"].shape == (8, 8, 1)
    assert [*(tmp_path / "scratch").iterdir()] == []

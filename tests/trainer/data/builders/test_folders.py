"""Builders of TFDS that read a folder in place, by `data.builder_args`."""

import numpy as np
import pytest
from PIL import Image

from trainer import storage
from trainer.config.data import DataConfig
from trainer.data.prepare import newest_version, prepare
from trainer.errors import ConfigError

SIZES = {"train": 20, "test": 5}


@pytest.fixture
def pictures(tmp_path):
    """Return a folder `<split>/<class>/<number>.png` of 25 grey pictures of 2 classes."""
    folder = tmp_path / "pictures"
    number = 0
    for split, size in SIZES.items():
        for index in range(size):
            place = folder / split / ("cat", "dog")[index % 2]
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 5), number, np.uint8)).save(place / f"{number}.png")
            number += 1
    return folder


@pytest.fixture
def prepared(root, scratch, pictures):
    def make(**options):
        config = DataConfig(
            dataset="tensorflow_datasets:ImageFolder",
            builder_args={"root_dir": str(pictures), "shape": [4, 5, 1]},
            shards=2,
            **options,
        )
        return prepare(config, root, scratch)

    return make


def test_pictures_of_a_folder_are_prepared_as_they_are(prepared, contents, pictures):
    dataset = prepared(inputs="image")
    assert prepared(inputs="image").reused
    found = contents(dataset, "test")
    assert sorted(found["image"][:, 0, 0, 0].tolist()) == [20, 21, 22, 23, 24]
    assert all(
        label == value % 2
        for value, label in zip(
            found["image"][:, 0, 0, 0].tolist(), found["label"].tolist(), strict=True
        )
    )
    assert {"train", "validation", "test"} == set(dataset.manifest.fields["splits"])
    assert storage.names(storage.parent_of(dataset.uri)) == [storage.name_of(dataset.uri)]
    assert (pictures / "train" / "cat" / "0.png").exists()


def test_a_folder_that_changed_is_another_dataset(prepared, pictures):
    before = prepared()
    Image.fromarray(np.full((4, 5), 99, np.uint8)).save(pictures / "train" / "dog" / "99.png")
    after = prepared()
    assert after.uri != before.uri
    assert sum(after.manifest.fields["splits"]["train"]["shards"]) == 19


def test_its_version_is_checked(prepared, scratch, pictures):
    args = {"root_dir": str(pictures)}
    config = DataConfig(dataset="tensorflow_datasets:ImageFolder", builder_args=args)
    assert newest_version(config, scratch) == "1.0.0"
    assert prepared(version="1.0.0").manifest.fields["version"] == "1.0.0"
    with pytest.raises(ConfigError, match=r"data.version: .* it has version 1.0.0 alone"):
        prepared(version="2.0.0")


def test_without_its_folder_the_missing_argument_is_named(root, scratch):
    with pytest.raises(ConfigError, match=r"data\.builder_args: .*root_dir"):
        prepare(
            DataConfig(
                dataset="tensorflow_datasets:ImageFolder", builder_args={"shape": [4, 5, 1]}
            ),
            root,
            scratch,
        )

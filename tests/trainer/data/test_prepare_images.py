"""Tests prepared datasets that keep the original bytes of images, also with `data.map`."""

from __future__ import annotations

import io

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

from flotilla.trainer import storage
from flotilla.trainer.data.builders import datasets
from flotilla.trainer.data.read import (
    evaluation_batches,
    labelled_columns,
    training_batches,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.data import made_builders as builders

HERE = "tests.trainer.data.mapping"


def test_every_feature_reaches_the_function(prepared, contents):
    dataset = prepared("Everything", map=f"{HERE}:all_of_it")
    found = contents(dataset, "test")
    assert (found["count"] == 15).all()
    assert found["image"].shape[1:] == (4, 5, 3)


@pytest.mark.slow
def test_other_processes_call_the_function_as_well(prepared, contents, monkeypatch):
    options = {"map": f"{HERE}:letters", "shapes": {"letters": (0,)}}
    alone = prepared("Pictures", **options)
    monkeypatch.setattr(datasets, "PART_BYTES", 4000)
    several = prepared("Pictures", **options, runner={"processes": 2}, seed=1)
    first, second = contents(alone, "test"), contents(several, "test")
    for name, values in first.items():
        assert sorted(map(str, values.tolist())) == sorted(map(str, second[name].tolist()))


SIZE = {"size": [4, 5]}


class Photographs(builders.Small):
    """A dataset of camera images of several sizes in a nested feature."""

    keys = ("photo", "label")
    sizes = {"train": 12, "test": 4}  # noqa: RUF012
    broken = False

    def features(self):
        inner = {"picture": tfds.features.Image(shape=(None, None, 3)), "number": np.int64}
        return {"photo": inner, "label": tfds.features.ClassLabel(names=builders.CLASSES)}

    def example(self, number):
        out = io.BytesIO()
        image = Image.fromarray(np.full((20, 10 + number, 3), number * 10, np.uint8))
        image.save(out, "JPEG")
        data = out.getvalue()[:-30] if self.broken and number == 3 else out.getvalue()
        return {"photo": {"picture": io.BytesIO(data), "number": number}, "label": number % 3}


class Torn(Photographs):
    broken = True


class PictureOfLabels(builders.Small):
    keys = ("x", "mask")

    def features(self):
        return {**super().features(), "mask": tfds.features.Image(shape=(2, 2, 1))}

    def example(self, number):
        return {**super().example(number), "mask": np.ones((2, 2, 1), np.uint8)}


def own(prepared, name, **options):
    return prepared("", dataset=f"{__name__}:{name}", **options)


@pytest.mark.slow
@pytest.mark.parametrize(("builder", "feature"), [("Pictures", "image"), ("Everything", "image")])
def test_the_pixels_are_the_same_encoded_or_not(prepared, contents, builder, feature):
    plain, encoded = prepared(builder), prepared(builder, image=SIZE)
    assert plain.uri != encoded.uri
    spec = DatasetSpec.from_manifest(encoded.manifest)
    assert spec.features[feature].stored == "image"
    assert spec.features[feature].shape == (4, 5, 3)
    for split in ("train", "validation", "test"):
        first, second = contents(plain, split), contents(encoded, split)
        for name, values in first.items():
            np.testing.assert_array_equal(values, second[name])


def test_files_of_several_sizes_are_stored_as_they_came(prepared, contents):
    dataset = own(prepared, "Photographs", image={"size": [6, 8], "channels": 1})
    found = contents(dataset, "test")
    assert found["photo/picture"].shape == (4, 6, 8, 1)
    greys = found["photo/picture"].mean((1, 2, 3))
    np.testing.assert_allclose(greys, found["photo/number"] * 10, atol=2)
    spec = DatasetSpec.from_manifest(dataset.manifest)
    path = str(storage.local_path(dataset.uri) / spec.files("test")[0])
    record = next(iter(tf.data.TFRecordDataset([path]).as_numpy_iterator()))
    example = tf.train.Example.FromString(record)
    data, *_ = example.features.feature["photo/picture"].bytes_list.value
    number, *_ = example.features.feature["photo/number"].int64_list.value
    assert data == builder_bytes(number)


def builder_bytes(number):
    # Call the method on the class, because an instance of a TFDS builder needs a folder.
    return Photographs.example(Photographs, number)["photo"]["picture"].getvalue()


def test_every_way_of_reading_gives_pixels(prepared):
    dataset = own(prepared, "Photographs", image={"size": [6, 8]})
    spec = DatasetSpec.from_manifest(dataset.manifest)
    folder = storage.local_path(dataset.uri)
    files = [folder / name for name in spec.files("train")]
    for held in (None, 2):
        batches = training_batches(spec, files, batch_size=3, seed=1, shuffle_buffer=held)
        inputs, _ = next(iter(batches))
        assert inputs["photo/picture"].shape == (3, 6, 8, 3)
        seen = [n for x, _ in batches.take(20) for n in x["photo/number"].numpy().tolist()]
        assert len(set(seen)) == spec.examples("train")
    inputs, _ = next(iter(evaluation_batches(spec, files, batch_size=3)))
    assert inputs["photo/picture"].dtype == tf.uint8
    columns = labelled_columns(spec, files, batch_size=3, columns=["photo/picture"])
    (inputs, _), values = next(iter(columns))
    np.testing.assert_array_equal(inputs["photo/picture"], values["photo/picture"])


def test_an_image_that_is_torn_names_its_split(prepared):
    with pytest.raises(UserError, match=r"'train' of .*Torn has an image that cannot be decoded"):
        own(prepared, "Torn", image={"size": [6, 8]})


def test_masks_and_images_of_a_size_of_their_own_are_stored_decoded(prepared):
    with pytest.raises(ConfigError, match=r"leave data\.image out"):
        own(prepared, "PictureOfLabels", image=SIZE)
    with pytest.raises(ConfigError, match=r"data\.image: .*VariableImage has no encoded image"):
        prepared("VariableImage", image=SIZE, shapes={"picture": (2, 2, 3)})

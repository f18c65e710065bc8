"""Tests users' builders: features, splits, labels, and images that keep their bytes."""

from __future__ import annotations

import io
import json
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from PIL import Image

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import features
from flotilla.trainer.data.blocks import parse_blocks
from flotilla.trainer.data.builders import batches, datasets
from flotilla.trainer.data.preparation.shards import Target
from flotilla.trainer.data.prepare import prepare
from flotilla.trainer.data.read import (
    evaluation_batches,
    labelled_columns,
    training_batches,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.data import made_builders as builders

# TFDS reads a dataset's description with a method that protobuf has deprecated.
READS_AGAIN = pytest.mark.filterwarnings(r"ignore:label\(\) is deprecated:DeprecationWarning")


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("everything")
    config = DataConfig(dataset="tests.trainer.data.made_builders:Everything", shards=2)
    return prepare(config, storage.uri_of(folder / "root"), folder / "scratch")


def refusal(prepared, name, **options):
    with pytest.raises(UserError) as caught:
        prepared(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def plain(value):
    """Return a value as it is read from a stored record."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, list) and isinstance(value[0], str):
        return [word.encode() for word in value]
    return np.asarray(value).tolist()


def test_every_value_is_the_builders_and_every_example_in_one_place(everything, contents):
    specs, every = DatasetSpec.from_manifest(everything.manifest).features, []
    for split in ("train", "validation", "test"):
        found = contents(everything, split)
        numbers = (2**64 - 1 - found["large"]).tolist()
        expected = [builders.flat(builders.example(number)) for number in numbers]
        assert set(found) == set(expected[0]) == set(specs)
        for name, values in found.items():
            assert [plain(row[name]) for row in expected] == values.tolist(), name
            dtype = "object" if specs[name].dtype == "string" else specs[name].dtype
            assert (values.dtype, values.shape[1:]) == (dtype, specs[name].shape), name
        every += numbers
    assert sorted(every) == list(range(50))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Pictures", "Everything"])
def test_both_ways_of_reading_agree(prepared, monkeypatch, name):
    short = prepared(name)
    monkeypatch.setattr(batches, "_is_plain", lambda *_: False)
    storage.delete(short.uri)
    assert prepared(name).manifest.same_content(short.manifest)


def test_pictures_are_read_the_short_way(prepared, tmp_path, monkeypatch):
    used = []
    read = batches._records
    monkeypatch.setattr(batches, "_records", lambda *args: used.append(args[2]) or read(*args))
    prepared("Pictures")
    assert used == ["train", "test"]
    config = DataConfig(dataset="tests.trainer.data.made_builders:Everything")
    builder = datasets.builder(config, tmp_path)
    assert not batches._is_plain(builder, features.select(config, builder.info))


def test_the_manifest_names_the_features(everything):
    fields = everything.manifest.fields
    assert fields["features"]["box"] == {
        "shape": [3],
        "dtype": "int32",
        "stored": "raw",
        "num_classes": 0,
        "labels": [],
        "padding": 0,
    }
    assert fields["inputs"] == ["image", "nested/inner", "nested/deep/er"]
    assert fields["features"]["label"]["labels"] == builders.CLASSES
    assert json.loads(json.dumps(fields)) == fields


def test_each_shard_has_some_of_everything(prepared):
    # This builder's examples keep their order, which may be sorted by class.
    dataset = prepared("InOrder", shards=3, validation=0)
    spec = DatasetSpec.from_manifest(dataset.manifest)
    folder = storage.local_path(dataset.uri)
    found = []
    for name in spec.files("train"):
        blocks = list(tf.data.TFRecordDataset(str(folder / name)).as_numpy_iterator())
        found.append(parse_blocks(spec.features, tf.constant(blocks))["number"].numpy())
    assert all(each.min() < 13 and each.max() > 26 for each in found)


def test_a_variable_image_is_refused_before_it_is_made(prepared, monkeypatch):
    monkeypatch.setattr(datasets, "download", lambda *_: pytest.fail("downloaded"))
    assert "the shape of 'picture'" in refusal(prepared, "VariableImage")


def test_integers_are_classes_up_to_the_largest(prepared):
    fields = prepared("IntegerLabel").manifest.fields
    counts = fields["target_counts"]["rating"]
    assert (fields["features"]["rating"]["num_classes"], set(counts)) == (0, set(fields["splits"]))
    assert [len(each) for each in counts.values()] == [8] * 3
    assert sum(counts["test"]) == 10
    assert counts["train"][:3] == [0, 0, 0]
    # A quantity is no class, and without validation, there is no such split.
    fields = prepared("HugeLabel", validation=0).manifest.fields
    assert fields["target_counts"]["rating"] == {}
    assert set(fields["splits"]) == {"train", "test"}
    assert 10**9 <= fields["target_moments"]["rating"]["min"] < 10**9 + 40


def test_the_version_is_resolved(prepared):
    newest = prepared("Versions")
    assert newest.manifest.fields["version"] == "2.0.0"
    assert prepared("Versions", version="2.0.0").reused
    assert "too old" in refusal(prepared, "Versions", version="1.5.0")


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return the folder in which TFDS keeps prepared data."""
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "kept"))
    return tmp_path / "kept"


@READS_AGAIN
def test_the_download_is_kept_where_tfds_keeps_it(prepared, kept, monkeypatch):
    monkeypatch.setattr(builders.Downloading, "urls", [])
    monkeypatch.setattr(builders.Downloading, "made", 0)
    prepared("Downloading")
    assert (kept / "downloading" / "1.0.0").is_dir()
    assert not prepared("Downloading", seed=1).reused
    assert builders.Downloading.made == 1


@READS_AGAIN
@pytest.mark.parametrize("name", [pytest.param("Pictures", marks=pytest.mark.slow), "Small"])
def test_a_kept_dataset_that_is_damaged(prepared, kept, name):
    prepared(name)
    (path,) = kept.rglob("*-train.tfrecord-*")
    whole = path.read_bytes()
    harms = {
        "40 examples fewer than|only 0 element": b"",
        "truncated": whole[:-7],
        "examples more than|at least 41": whole * 2,
        "No such file": None,
    }
    place = f"the split 'train' of tests.trainer.data.made_builders:{name} in {path.parent}"
    for words, data in harms.items():
        if data is None:
            path.unlink()
        else:
            path.write_bytes(data)
        message = refusal(prepared, name, seed=1)
        assert place in message
        assert re.search(words, message)
    shutil.rmtree(path.parent)
    assert not prepared(name, seed=1).reused


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


def target(dtype, shape=(), num_classes=0):
    stored = "raw" if shape else "int"
    spec = FeatureSpec(shape=shape, dtype=dtype, stored=stored, num_classes=num_classes)
    return Target("y", spec)


@pytest.mark.parametrize(
    ("spec", "batches", "counts"),
    [
        (("bool",), [[True, False, True], [True]], [1, 3]),
        (("bool", (3,), 3), [[[1, 0, 0], [1, 1, 0]], [[0, 1, 0]]], [2, 2, 0]),
        # The end of a sequence is not counted.
        (("int64", (3,), 4), [[[1, 1, -1], [3, -1, -1]]], [0, 2, 0, 1]),
    ],
)
def test_classes_are_counted(spec, batches, counts):
    found = target(*spec)
    for batch in batches:
        found.add("train", np.array(batch, spec[0]))
    assert found.counts() == {"train": counts}
    found.add("test", np.array(batches[-1], spec[0])[:0])
    assert found.counts() == {"train": counts, "test": [0] * len(counts)}


def test_roles_are_in_the_manifest(prepared):
    fields = prepared("Weighted", label=("price", "sold"), weight="times", group="shop").manifest
    spec = DatasetSpec.from_manifest(fields)
    assert spec.targets == ("price", "sold")
    assert (spec.weight, spec.group, spec.inputs) == ("times", "shop", ("x", "sizes"))
    assert set(spec.target_counts) == set(spec.target_moments) == {"price", "sold"}
    assert set(spec.target_moments["price"]) == {"mean", "std", "min", "max"}
    assert spec.target_counts["price"] == {}
    assert sum(map(sum, spec.target_counts["sold"].values())) == 50


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (
            {"price": np.nan},
            "data.label: the split 'train' of {name} has an example whose 'price' is nan; write",
        ),
        (
            {"sizes": [0, np.inf, 0]},
            "data.label: the split 'train' of {name} has an example whose 'sizes' is inf; write",
        ),
        (
            {"times": -2},
            "data.weight: the split 'train' of {name} has an example with the weight -2.0 "
            "('times'); a weight must be at least 0",
        ),
        (
            {"times": np.nan},
            "data.weight: the split 'train' of {name} has an example whose 'times' is nan; write",
        ),
    ],
)
def test_no_number_is_refused_and_nothing_published(bad, message, prepared, monkeypatch, root):
    monkeypatch.setattr(builders.Weighted, "bad", bad)
    with pytest.raises(UserError) as caught:
        prepared("Weighted", label=("price", "sizes"), weight="times")
    assert str(caught.value).startswith(
        message.replace("{name}", "tests.trainer.data.made_builders:Weighted")
    )
    assert storage.list_published(storage.join(root, "datasets")) == []


def test_classes_of_which_nothing_is_learnt_are_said():
    spec = FeatureSpec(
        shape=(), dtype="int64", stored="int", num_classes=4, labels=("a", "b", "c", "d")
    )
    target = Target("y", spec)
    target.add("train", np.array([0, 0, 0, 1]))
    assert list(target.notes()) == [
        "the label 'y' has only one example of 'b'; correct the spelling, merge classes, or add "
        "examples"
    ]
    target.add("test", np.array([0, 1, 2, 2]))
    (note,) = target.notes()
    assert note.startswith("the label 'y' has 'c' only in validation or test")


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_label_that_is_not_a_number_is_refused(dtype):
    found = target("float32")
    found.refuse("data", "train", np.array([1, 2], dtype))
    with pytest.raises(UserError, match="whose 'y' is nan"):
        found.refuse("data", "train", np.array([1, np.nan], dtype))

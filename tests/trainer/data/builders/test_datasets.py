"""Tests which builder a name selects, changed image folders, and the fast PNG encoder."""

import io
import sys
import textwrap

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_datasets as tfds
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from flotilla.trainer import storage
from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import images as module
from flotilla.trainer.data.builders import datasets
from flotilla.trainer.data.images import encode_png
from flotilla.trainer.data.prepare import newest_version, prepare
from flotilla.trainer.runtime.errors import ConfigError

OWN = "tests.trainer.data.made_builders"


@pytest.fixture
def find(tmp_path):
    def make(dataset, version=""):
        return datasets.builder(DataConfig(dataset=dataset, version=version), tmp_path)

    return make


def refusal(find, *args):
    with pytest.raises(ConfigError) as caught:
        find(*args)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("data.")
    return message


def test_a_module_that_is_loaded_for_it(find, tmp_path, monkeypatch):
    source = """
        from tests.trainer.data.made_builders import Small

        class Mine(Small, skip_registration=True):
            pass
    """
    (tmp_path / "own_module.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert type(find("own_module:Mine")).__name__ == "Mine"
    finally:
        sys.modules.pop("own_module", None)


@pytest.mark.parametrize(
    ("name", "full_name"),
    [
        ("clicks", "clicks/1.0.0"),
        ("digits", "digits/1.0.0"),
        ("mnist", "mnist/3.0.1"),
        ("glue/sst2", "glue/sst2/"),
        (f"{OWN}:Everything", "everything/1.0.0"),
        (f"{OWN}:Versions", "versions/2.0.0"),
    ],
)
def test_embedded_builders_those_of_tfds_and_your_own_are_found(find, name, full_name, tmp_path):
    found = find(name)
    assert found.info.full_name.startswith(full_name)
    assert str(found.data_dir).startswith(str(tmp_path))


@pytest.mark.parametrize("dataset", ["mnist", "digits", f"{OWN}:Small"])
def test_a_version(find, dataset):
    newest = str(find(dataset).version)
    assert str(find(dataset, newest).version) == newest
    assert str(find(f"{OWN}:Versions", "1.5.0").version) == "1.5.0"


@pytest.mark.parametrize("dataset", ["mnist", "digits", f"{OWN}:Small"])
@pytest.mark.parametrize("version", ["9.9.9", "newest"])
def test_an_unknown_version(find, dataset, version):
    message = refusal(find, dataset, version)
    assert message.startswith(f"data.version: {version}")
    assert dataset != "mnist" or version == "newest" or "3.0.1" in message


NO_BUILDER = "no TFDS builder (tfds.core.DatasetBuilder) called"


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        ("mnst", ["TFDS has no dataset 'mnst'; did you mean 'mnist'?", "package.module:Builder"]),
        ("digit", ["TFDS has no dataset 'digit'; did you mean 'digits'?"]),
        ("fashionmnist", ["did you mean 'fashion_mnist'?"]),
        ("qqqqqqqqqqqq", ["TFDS has no dataset 'qqqqqqqqqqqq'; to use"]),
        ("glue/sst", ["glue has no config 'sst'; did you mean 'sst2'?"]),
        ("glue/qqqqqqq", ["(one of cola, sst2,"]),
        *((each, [each]) for each in ("mnist/", "mnist/a=1", "no name", "-")),
        ("mnist:3.0.1", ["set data.dataset to 'mnist' and data.version to '3.0.1'"]),
        (
            "no_such_package.module:Builder",
            ["cannot import no_such_package.module: ModuleNotFoundError", "PYTHONPATH"],
        ),
        (f"{OWN}:Evrything", [f"{NO_BUILDER} 'Evrything'", "did you mean 'Everything'"]),
        *((f"{OWN}:{each}", [f"{NO_BUILDER} '{each}'"]) for each in ("CLASSES", "image", "np")),
        *((each, []) for each in (":Builder", "module:", "a..b:Builder")),
        (f"{OWN}:NotConstructed", ["RuntimeError: not today"]),
    ],
)
def test_what_is_no_builder_is_one_line(find, dataset, words):
    message = refusal(find, dataset)
    assert not [word for word in words if word not in message]


def test_a_module_that_fails(find, tmp_path, monkeypatch):
    (tmp_path / "failing_module.py").write_text("raise RuntimeError('broken\\nand more')")
    monkeypatch.syspath_prepend(tmp_path)
    message = refusal(find, "failing_module:Builder")
    place = tmp_path / "failing_module.py"
    assert f"cannot import failing_module: RuntimeError: broken ({place}:1)" in message


SIZES = {"train": 20, "test": 5}


@pytest.fixture
def pictures(tmp_path):
    """Return a folder `<split>/<class>/<number>.png` with 25 gray images of 2 classes."""
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
    with pytest.raises(ConfigError, match=r"only version 1.0.0; set data.version to"):
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


def picture(*shape, seed=0):
    return np.random.RandomState(seed).randint(0, 256, shape).astype(np.uint8)


@settings(deadline=None, max_examples=40)
@given(
    height=st.integers(1, 40),
    width=st.integers(1, 40),
    channels=st.sampled_from([1, 3, 4]),
    seed=st.integers(0, 1000),
)
def test_tensorflow_reads_the_same_pixels(height, width, channels, seed):
    image = picture(height, width, channels, seed=seed)
    np.testing.assert_array_equal(tf.io.decode_png(encode_png(image)).numpy(), image)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_others_read_the_same_pixels(channels, mode):
    # The image is no contiguous array.
    image = picture(10, 7, channels)[::2, ::-1]
    with Image.open(io.BytesIO(encode_png(image))) as found:
        found.load()
        assert (found.format, found.mode) == ("PNG", mode)
        np.testing.assert_array_equal(np.asarray(found).reshape(image.shape), image)


@pytest.fixture
def encoded(monkeypatch):
    """Return the images that the fast encoder was called with."""
    images = []
    encode = encode_png
    monkeypatch.setattr(module, "encode_png", lambda each: images.append(each) or encode(each))
    return images


class Own(tfds.features.Image):
    def encode_example(self, _):
        return b"own"


def quickened(**options):
    feature = tfds.features.Image(**options)
    datasets.quicken([tfds.features.Text(), feature])
    return feature


@pytest.mark.parametrize("encoding", [None, "png"])
def test_a_feature_is_quickened(encoded, encoding):
    feature = quickened(shape=(4, 5, 3), encoding_format=encoding)
    image = picture(4, 5, 3)
    np.testing.assert_array_equal(feature.decode_example(feature.encode_example(image)), image)
    assert len(encoded) == 1


@pytest.mark.parametrize(
    ("options", "image"),
    [
        ({"shape": (4, 5, 3), "encoding_format": "jpeg"}, picture(4, 5, 3)),
        ({"shape": (None, None, 3)}, picture(4, 5, 3)),
        ({"shape": (4, 5, 1), "dtype": np.uint16}, picture(4, 5, 1).astype(np.uint16)),
        ({"shape": (4, 5, 1), "dtype": np.float32}, picture(4, 5, 1).astype(np.float32)),
        ({"shape": (4, 5, 2)}, picture(4, 5, 2)),
    ],
    ids=["jpeg", "variable", "uint16", "float32", "two channels"],
)
def test_other_features_are_left_alone(encoded, options, image):
    theirs = tfds.features.Image(**options).encode_example(image)
    assert quickened(**options).encode_example(image) == theirs
    # A wrong array is refused as before, and a subclass is left alone.
    for wrong in (picture(5, 4, 3), picture(4, 5, 3).astype(np.int64)):
        with pytest.raises((ValueError, AssertionError)):
            quickened(shape=(4, 5, 3)).encode_example(wrong)
    feature = Own(shape=(4, 5, 3))
    datasets.quicken([feature])
    assert feature.encode_example(picture(4, 5, 3)) == b"own"
    assert not encoded


@pytest.mark.parametrize("kind", ["path", "bytes", "file", "pil"])
def test_other_values_go_the_other_way(encoded, tmp_path, kind):
    image = picture(4, 5, 3)
    data = encode_png(image)
    encoded.clear()
    (tmp_path / "image.png").write_bytes(data)
    value = {
        "path": tmp_path / "image.png",
        "bytes": data,
        "file": io.BytesIO(data),
        "pil": Image.fromarray(image),
    }[kind]
    feature = quickened(shape=(4, 5, 3), encoding_format="png")
    np.testing.assert_array_equal(feature.decode_example(feature.encode_example(value)), image)
    assert not encoded

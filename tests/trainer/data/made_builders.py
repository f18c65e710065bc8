"""TFDS builders as a user might write them, each unusual in one way."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import tensorflow_datasets as tfds

CLASSES = ["cat", "dog", "eel"]
ROLL = 5


def image(number):
    """Return an image that is unique for each number."""
    return ((np.arange(60) * 7 + number * 3) % 256).astype(np.uint8).reshape(4, 5, 3)


def example(number):
    return {
        "image": image(number),
        "size": np.float32(number / 3),
        # TFDS stores a scalar float64 as float32.
        "exact": np.float64(np.float32(number / 3)),
        "name": f"example {number} äß",
        "box": np.array([number, -number, 2**31 - 1 - number], np.int32),
        "words": [f"a{number}", ""],
        "mask": np.array([[number % 2, 1, 0]], np.bool_),
        "flag": number % 2 == 0,
        "large": np.uint64(2**64 - 1 - number),
        "counts": np.array([2**32 - 1 - number, number], np.uint32),
        "half": np.array([number / 4], np.float16),
        "nested": {"inner": np.int8(-(number % 100)), "deep": {"er": np.float32(number)}},
        "steps": [number, number + 1],
        "label": number % len(CLASSES),
    }


def flat(features, path=""):
    """Return nested features by their paths, as a prepared dataset names them."""
    found = {}
    for name, value in features.items():
        if isinstance(value, dict):
            found |= flat(value, f"{path}{name}/")
        else:
            found[path + name] = value
    return found


class Small(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """The base class of the other builders, with `sizes` examples per split."""

    VERSION = tfds.core.Version("1.0.0")
    sizes: ClassVar = {"train": 40, "test": 10}
    keys = None
    in_order = False

    def _info(self):
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(self.features()),
            supervised_keys=self.keys,
            disable_shuffling=self.in_order,
        )

    def features(self):
        return {
            "x": tfds.features.Tensor(shape=(2,), dtype=np.float32),
            "number": np.int64,
            "label": tfds.features.ClassLabel(names=CLASSES),
        }

    def example(self, number):
        return {"x": [number, -number], "number": number, "label": number % len(CLASSES)}

    def _split_generators(self, dl_manager):
        del dl_manager
        first = 0
        splits = {}
        for split, size in self.sizes.items():
            splits[split] = self._generate_examples(range(first, first + size))
            first += size
        return splits

    def _generate_examples(self, numbers):
        for number in numbers:
            yield number, self.example(number)


class Everything(Small):
    """A dataset with every supported kind of feature."""

    keys = ({"image": "image", "nested": "nested"}, "label")

    def features(self):
        return {
            "image": tfds.features.Image(shape=(4, 5, 3)),
            "size": np.float32,
            "exact": np.float64,
            "name": tfds.features.Text(),
            "box": tfds.features.Tensor(shape=(3,), dtype=np.int32),
            "words": tfds.features.Tensor(shape=(2,), dtype=np.str_),
            "mask": tfds.features.Tensor(shape=(1, 3), dtype=np.bool_),
            "flag": np.bool_,
            "large": np.uint64,
            "counts": tfds.features.Tensor(shape=(2,), dtype=np.uint32),
            "half": tfds.features.Tensor(shape=(1,), dtype=np.float16),
            "nested": {"inner": np.int8, "deep": {"er": np.float32}},
            "steps": tfds.features.Sequence(np.int32, length=2),
            "label": tfds.features.ClassLabel(names=CLASSES),
        }

    def example(self, number):
        return example(number)


class Pictures(Small):
    """A dataset with only encoded images, texts and classes, which is read by the fast path."""

    keys = ("image", "label")

    def features(self):
        return {
            "image": tfds.features.Image(shape=(4, 5, 3)),
            "name": tfds.features.Text(),
            "label": tfds.features.ClassLabel(names=CLASSES),
        }

    def example(self, number):
        return {name: example(number)[name] for name in ("image", "name", "label")}


class InOrder(Small):
    sizes: ClassVar = {"train": 40, "test": 10}
    in_order = True


class Versions(Small):
    VERSION = tfds.core.Version("2.0.0")
    SUPPORTED_VERSIONS: ClassVar = [tfds.core.Version("1.5.0")]


class VariableImage(Small):
    keys = ("picture", "label")

    def features(self):
        return {**super().features(), "picture": tfds.features.Image(shape=(None, None, 3))}

    def example(self, number):
        return {**super().example(number), "picture": np.zeros((2, 2 + number % 2, 3), np.uint8)}


class VariableExtra(VariableImage):
    """A dataset in which only an unused feature varies in shape."""

    keys = ("x", "label")


class IntegerLabel(Small):
    """A dataset of ratings from 3 to 7, stored as plain integers."""

    keys = ("x", "rating")

    def features(self):
        return {"x": np.float32, "rating": np.int32}

    def example(self, number):
        return {"x": number, "rating": 3 + number % ROLL}


class HugeLabel(IntegerLabel):
    def example(self, number):
        return {"x": number, "rating": 10**9 + number}


class Downloading(Small):
    """A builder that downloads `urls`, which a test sets, and counts its instances."""

    urls: ClassVar[list[str]] = []
    made = 0

    def _split_generators(self, dl_manager):
        Downloading.made += 1
        dl_manager.download(self.urls)
        return super()._split_generators(dl_manager)


class ByHand(Small):
    MANUAL_DOWNLOAD_INSTRUCTIONS = """Register at the site,
    and put all.zip into the folder."""

    def _split_generators(self, dl_manager):
        assert (dl_manager.manual_dir / "all.zip").exists()
        return super()._split_generators(dl_manager)


class Failing(Small):
    def example(self, number):
        raise RuntimeError(f"no example {number}\nand a second line")


class NotConstructed(Small):
    def __init__(self, **options):
        raise RuntimeError(f"not today: {sorted(options)}")


def ragged(number):
    height, width, length = 2 + number % 3, 3 + number % 2, number % 5
    values = np.arange(height * width * 3) * 5 + number
    return {
        "picture": (values % 256).astype(np.uint8).reshape(height, width, 3),
        "mask": np.full((height, width, 1), number % 3, np.uint8),
        "clip": [np.full((2, 2, 1), frame, np.uint8) for frame in range(length)],
        "sound": np.arange(1, length + 1),
        "words": [f"w{each}" for each in range(length)],
        "grid": [list(range(each)) for each in range(length)],
        "boxes": {"size": [number + each / 2 for each in range(length)]},
        "kinds": [each % 3 for each in range(length)],
        "flags": [True] * length,
        "tags": sorted({number % 3, (number // 3) % 3}) if number % 4 else [],
    }


class Ragged(Small):
    """A dataset whose features vary in shape."""

    keys = ("picture", "kinds")

    def features(self):
        kind = tfds.features.ClassLabel(names=CLASSES)
        return {
            "picture": tfds.features.Image(shape=(None, None, 3)),
            "mask": tfds.features.Image(shape=(None, None, 1)),
            "clip": tfds.features.Video(shape=(None, 2, 2, 1)),
            "sound": tfds.features.Audio(sample_rate=10),
            "words": tfds.features.Sequence(tfds.features.Text()),
            "grid": tfds.features.Sequence(tfds.features.Sequence(np.int32)),
            "boxes": tfds.features.Sequence({"size": np.float32}),
            "kinds": tfds.features.Sequence(kind),
            "flags": tfds.features.Sequence(np.bool_),
            "tags": tfds.features.Sequence(kind),
        }

    def example(self, number):
        return ragged(number)


class Weighted(Small):
    """A dataset with weights, groups and two labels; `bad` replaces values of example 7."""

    bad: ClassVar[dict] = {}

    def features(self):
        return {
            "x": tfds.features.Tensor(shape=(2,), dtype=np.float32),
            "price": np.float64,
            "sizes": tfds.features.Tensor(shape=(3,), dtype=np.float32),
            "sold": np.bool_,
            "times": np.float32,
            "shop": tfds.features.Text(),
        }

    def example(self, number):
        plain = {
            "x": [number, -number],
            "price": number / 8,
            "sizes": [number, number / 2, -number],
            "sold": number % 2 == 0,
            "times": number % 4,
            "shop": f"shop {number % 3}",
        }
        return {**plain, **(self.bad if number == 7 else {})}


class ByBeam(tfds.core.BeamBasedBuilder, skip_registration=True):
    """A builder that generates the examples of `Small` with Apache Beam."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "number": np.int64,
            "label": tfds.features.ClassLabel(names=CLASSES),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features),
            supervised_keys=("number", "label"),
        )

    def _split_generators(self, dl_manager):
        del dl_manager
        return {"train": self._generate_examples(0, 40), "test": self._generate_examples(40, 50)}

    def _generate_examples(self, first, end):
        beam = tfds.core.lazy_imports.apache_beam
        return beam.Create(range(first, end)) | beam.Map(_numbered)


def _numbered(number):
    return number, {"number": number, "label": number % len(CLASSES)}

"""Small tables and images that ship with scikit-learn, for each learning task.

The inputs of tables are standardized with the mean and standard deviation of the training examples,
which are the same in every run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds

# The seed is fixed, because all runs must have the same splits.
SEED = 20
TRAINING = 1437
TEST_SHARE = 0.2
PROPERTIES = {
    "even": (0, 2, 4, 6, 8),
    "prime": (2, 3, 5, 7),
    "looped": (0, 6, 8, 9),
    "above_four": (5, 6, 7, 8, 9),
}
_IMAGE = tfds.features.Image(shape=(8, 8, 1))
_Examples = Iterator[tuple[int, dict[str, Any]]]


class Digits(tfds.core.GeneratorBasedBuilder):
    """1,437 training and 360 test examples of digits (E. Alpaydin, C. Kaynak, UCI, 1998)."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Handwritten digits of 43 people, scanned and reduced to 8 by 8 pixels.",
            features=tfds.features.FeaturesDict(
                {"image": _IMAGE, "label": tfds.features.ClassLabel(num_classes=10)}
            ),
            supervised_keys=("image", "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        images, digits = _digits()
        order = np.random.RandomState(SEED).permutation(len(digits))
        return {
            "train": self._generate_examples(images, digits, order[:TRAINING]),
            "test": self._generate_examples(images, digits, order[TRAINING:]),
        }

    def _generate_examples(self, images: Any, labels: Any, chosen: Any) -> _Examples:
        for index in chosen:
            yield int(index), {"image": images[index], "label": int(labels[index])}


class DigitProperties(tfds.core.GeneratorBasedBuilder):
    """Properties of a handwritten digit as a set of labels, for the 1,797 images of `digits`."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        names = tfds.features.ClassLabel(names=list(PROPERTIES))
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(
                {"image": _IMAGE, "properties": tfds.features.Sequence(names)}
            ),
            supervised_keys=("image", "properties"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        train, test = _shares(len(_digits()[1]))
        return {"train": self._generate_examples(train), "test": self._generate_examples(test)}

    def _generate_examples(self, chosen: Any) -> _Examples:
        images, digits = _digits()
        for index in chosen:
            true = [name for name, having in PROPERTIES.items() if int(digits[index]) in having]
            yield int(index), {"image": images[index], "properties": true}


class _Table(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Base class of tables: each row has numbers, named `features`, and one or several labels."""

    VERSION = tfds.core.Version("1.0.0")
    LABELS: ClassVar[Mapping[str, Any]]

    @abstractmethod
    def load(self) -> tuple[Any, Mapping[str, Any]]:
        """Return the inputs [n, columns], and the labels [n] by name."""

    def _info(self) -> Any:
        columns = self.load()[0].shape[1]
        labels = tuple(self.LABELS)
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(
                {"features": tfds.features.Tensor(shape=(columns,), dtype=np.float32)}
                | dict(self.LABELS)
            ),
            supervised_keys=("features", labels if len(labels) > 1 else labels[0]),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        inputs, labels = self.load()
        train, test = _shares(len(inputs))
        mean, std = inputs[train].mean(axis=0), inputs[train].std(axis=0)
        scaled = ((inputs - mean) / std).astype(np.float32)
        return {
            "train": self._generate_examples(scaled, labels, train),
            "test": self._generate_examples(scaled, labels, test),
        }

    def _generate_examples(self, inputs: Any, labels: Mapping[str, Any], chosen: Any) -> _Examples:
        for index in chosen:
            values = {name: each[index].item() for name, each in labels.items()}
            yield int(index), {"features": inputs[index], **values}


class Diabetes(_Table):
    """Progression of diabetes after one year in 442 patients (Efron et al. 2004)."""

    LABELS: ClassVar[Mapping[str, Any]] = {"progression": tfds.features.Scalar(np.float32)}

    def load(self) -> tuple[Any, Mapping[str, Any]]:
        """Return ten measurements of each patient, and the progression."""
        found = _source().load_diabetes(scaled=False)
        return found.data, {"progression": found.target.astype(np.float32)}


class Linnerud(_Table):
    """Weight, waist and pulse of 20 men, by their results in three exercises (Tenenhaus 1998)."""

    LABELS: ClassVar[Mapping[str, Any]] = {
        name: tfds.features.Scalar(np.float32) for name in ("weight", "waist", "pulse")
    }

    def load(self) -> tuple[Any, Mapping[str, Any]]:
        """Return chins, sit-ups and jumps of each man, and his weight, waist and pulse."""
        found = _source().load_linnerud()
        columns = found.target.astype(np.float32).T
        return found.data, dict(zip(self.LABELS, columns, strict=True))


class Wine(_Table):
    """The grower (one of three) of 178 wines (Aeberhard and Forina, UCI, 1991)."""

    LABELS: ClassVar[Mapping[str, Any]] = {
        "grower": tfds.features.ClassLabel(names=["first", "second", "third"])
    }

    def load(self) -> tuple[Any, Mapping[str, Any]]:
        """Return thirteen measurements of each wine, and its grower."""
        found = _source().load_wine()
        return found.data, {"grower": found.target}


class BreastCancer(_Table):
    """The diagnosis (malignant or benign) of 569 tumours (Wolberg et al., UCI, 1995)."""

    LABELS: ClassVar[Mapping[str, Any]] = {
        "diagnosis": tfds.features.ClassLabel(names=["malignant", "benign"])
    }

    def load(self) -> tuple[Any, Mapping[str, Any]]:
        """Return thirty measurements of each tumour, and the diagnosis."""
        found = _source().load_breast_cancer()
        return found.data, {"diagnosis": found.target}


def _source() -> Any:
    # Import here, because it takes a second and finding a published dataset does not need it.
    from sklearn import datasets  # noqa: PLC0415

    return datasets


def _digits() -> tuple[Any, Any]:
    """Return the images as uint8 [n, 8, 8, 1], and the digits."""
    found = _source().load_digits()
    # Pixels of the source range from 0 to 16.
    return np.round(found.images * 255 / 16).astype(np.uint8)[..., np.newaxis], found.target


def _shares(count: int) -> tuple[Any, Any]:
    """Return the indices of the training examples and of the test examples."""
    order = np.random.RandomState(SEED).permutation(count)
    test, train = np.split(order, [round(TEST_SHARE * count)])
    return train, test

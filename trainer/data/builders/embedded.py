"""Datasets that need no download: tables and images from scikit-learn, and generated examples.

The inputs of tables are standardized with the mean and standard deviation of the training examples.
These examples are the same in every run.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow_datasets as tfds
from numpy.typing import NDArray

# The seed is fixed, so that all runs have the same examples and splits.
SEED = 20
DIGITS_TRAINING = 1437
TEST_SHARE = 0.2
PROPERTIES = {
    "even": (0, 2, 4, 6, 8),
    "prime": (2, 3, 5, 7),
    "looped": (0, 6, 8, 9),
    "above_four": (5, 6, 7, 8, 9),
}
SEQUENCES, OF_TRAINING = 5000, 4000
SHORTEST, LONGEST = 5, 24
# Tokens. 0 is reserved for padding.
OPENS, CLOSES, LETTER = 1, 2, 3
DEPTHS = ("outside", "once", "twice", "deeper")
USERS = 1000
ITEMS = 500
EXAMPLES = 40_000
TRAINING = 32_000
RANK = 2
# Factors of the two terms of a score. The sigmoid of a score is the probability of a click.
AFFINITY = 4.0
POPULARITY = 0.5
Features = Mapping[str, Any]
Ints = NDArray[np.int64]
#: The values of each feature, and the indices of the training and test examples.
Loaded = tuple[Mapping[str, Any], Any, Any]


class _Embedded(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]
    """Base class of the embedded datasets. The key of an example is its index."""

    VERSION = tfds.core.Version("1.0.0")
    FEATURES: ClassVar[Features]
    KEYS: ClassVar[tuple[Any, Any]]

    @abstractmethod
    def _load(self) -> Loaded: ...

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.FeaturesDict(dict(self.FEATURES)),
            supervised_keys=self.KEYS,
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        columns, train, test = self._load()
        return {
            "train": self._generate_examples(columns, train),
            "test": self._generate_examples(columns, test),
        }

    def _generate_examples(
        self, columns: Mapping[str, Any], chosen: Any
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in chosen:
            yield int(index), {name: values[index] for name, values in columns.items()}


_IMAGE = tfds.features.Image(shape=(8, 8, 1))
_NUMBER = tfds.features.Scalar(np.float32)


def _vector(size: int) -> Any:
    return tfds.features.Tensor(shape=(size,), dtype=np.float32)


class Digits(_Embedded):
    """1,437 training and 360 test examples of digits (E. Alpaydin, C. Kaynak, UCI, 1998)."""

    FEATURES: ClassVar[Features] = {
        "image": _IMAGE,
        "label": tfds.features.ClassLabel(num_classes=10),
    }
    KEYS = ("image", "label")

    def _load(self) -> Loaded:
        images, digits = _digits()
        order = np.random.RandomState(SEED).permutation(len(digits))
        columns = {"image": images, "label": digits}
        return columns, order[:DIGITS_TRAINING], order[DIGITS_TRAINING:]


class DigitProperties(_Embedded):
    """Properties of a handwritten digit as a set of labels, for the 1,797 images of `digits`."""

    FEATURES: ClassVar[Features] = {
        "image": _IMAGE,
        "properties": tfds.features.Sequence(tfds.features.ClassLabel(names=list(PROPERTIES))),
    }
    KEYS = ("image", "properties")

    def _load(self) -> Loaded:
        images, digits = _digits()
        true = [[name for name, having in PROPERTIES.items() if each in having] for each in digits]
        return {"image": images, "properties": true}, *_draw_splits(len(digits))


class _Table(_Embedded, skip_registration=True):  # type: ignore[call-arg]
    """Base class of the tables. `LOADER` is the function of scikit-learn that returns the table."""

    LOADER: ClassVar[str]
    OPTIONS: ClassVar[Mapping[str, Any]] = {}

    def _load(self) -> Loaded:
        found = getattr(_source(), self.LOADER)(**self.OPTIONS)
        train, test = _draw_splits(len(found.data))
        mean, std = found.data[train].mean(axis=0), found.data[train].std(axis=0)
        names = [name for name in self.FEATURES if name != "features"]
        is_class = found.target.dtype.kind in "iu"
        labels = found.target if is_class else found.target.astype(np.float32)
        columns = dict(zip(names, labels.reshape(len(labels), -1).T, strict=True))
        return {"features": ((found.data - mean) / std).astype(np.float32), **columns}, train, test


class Diabetes(_Table):
    """Progression of diabetes after one year in 442 patients (Efron et al. 2004)."""

    LOADER, OPTIONS = "load_diabetes", {"scaled": False}
    FEATURES: ClassVar[Features] = {"features": _vector(10), "progression": _NUMBER}
    KEYS = ("features", "progression")


class Linnerud(_Table):
    """Weight, waist and pulse of 20 men, by their results in three exercises (Tenenhaus 1998)."""

    LOADER = "load_linnerud"
    KEYS = ("features", ("weight", "waist", "pulse"))
    FEATURES: ClassVar[Features] = {"features": _vector(3), **dict.fromkeys(KEYS[1], _NUMBER)}


class Wine(_Table):
    """The grower (one of three) of each of 178 wines (Aeberhard and Forina, UCI, 1991)."""

    LOADER = "load_wine"
    FEATURES: ClassVar[Features] = {
        "features": _vector(13),
        "grower": tfds.features.ClassLabel(names=["first", "second", "third"]),
    }
    KEYS = ("features", "grower")


class BreastCancer(_Table):
    """The diagnosis (malignant or benign) of 569 tumours (Wolberg et al., UCI, 1995)."""

    LOADER = "load_breast_cancer"
    FEATURES: ClassVar[Features] = {
        "features": _vector(30),
        "diagnosis": tfds.features.ClassLabel(names=["malignant", "benign"]),
    }
    KEYS = ("features", "diagnosis")


class Brackets(_Embedded):
    """Generated sequences of 5 to 24 tokens: 4,000 training and 1,000 test examples.

    The labels require counting: the nesting depth at each position, and whether a bracket is still
    open at the end of the sequence.
    """

    FEATURES: ClassVar[Features] = {
        "tokens": tfds.features.Sequence(np.int64),
        "depths": tfds.features.Sequence(tfds.features.ClassLabel(names=DEPTHS)),
        "end": tfds.features.ClassLabel(names=["closed", "open"]),
    }
    KEYS = ("tokens", "end")

    def _load(self) -> Loaded:
        # `RandomState` is the only NumPy generator that draws the same numbers in every version.
        random = np.random.RandomState(SEED)
        tokens, depths = zip(*(_sequence(random) for _ in range(SEQUENCES)), strict=True)
        columns = {
            "tokens": tokens,
            "depths": [[min(depth, len(DEPTHS) - 1) for depth in each] for each in depths],
            "end": [int(each[-1] > 0) for each in depths],
        }
        return columns, range(OF_TRAINING), range(OF_TRAINING, SEQUENCES)


class Clicks(_Embedded):
    """Generated clicks of 1,000 users on 500 items: 32,000 training and 8,000 test examples.

    Users and items have `RANK` latent factors. A click is more likely if the factors of user and
    item agree. Some items are slightly more popular, and some are shown more often. The signal is
    in the pairs: a prediction from the item alone is correct in 53 % of the cases, and a prediction
    from all factors in 83 %.
    """

    FEATURES: ClassVar[Features] = {
        "user": tfds.features.Scalar(np.int64),
        "item": tfds.features.Scalar(np.int64),
        "label": tfds.features.ClassLabel(names=["no_click", "click"]),
    }
    KEYS = ({"user": "user", "item": "item"}, "label")

    def _load(self) -> Loaded:
        columns = dict(zip(("user", "item", "label"), draw_clicks(), strict=True))
        return columns, range(TRAINING), range(TRAINING, EXAMPLES)


def draw_clicks() -> tuple[Ints, Ints, Ints]:
    """Return the user, item and click of every example, in the order of creation."""
    random = np.random.RandomState(SEED)
    of_users = random.normal(size=(USERS, RANK))
    of_items = random.normal(size=(ITEMS, RANK))
    popularity = POPULARITY * random.normal(size=ITEMS)
    exposure = (1 + np.arange(ITEMS)) ** -0.5
    users = random.randint(USERS, size=EXAMPLES)
    items = random.choice(ITEMS, size=EXAMPLES, p=exposure / exposure.sum())
    affinity = (of_users[users] * of_items[items]).sum(axis=1) / np.sqrt(RANK)
    score = AFFINITY * affinity + popularity[items]
    clicks = random.random_sample(EXAMPLES) < 1 / (1 + np.exp(-score))
    return users.astype(np.int64), items.astype(np.int64), clicks.astype(np.int64)


def _sequence(random: np.random.RandomState) -> tuple[list[int], list[int]]:
    """Return the tokens, and the number of open brackets after each token."""
    tokens, depths, depth = [], [], 0
    for _ in range(random.randint(SHORTEST, LONGEST + 1)):
        # Closing is more likely than opening, so that 37% of the sequences end without an open
        # bracket.
        token = int(random.choice([OPENS, CLOSES, LETTER], p=[0.3, 0.4, 0.3]))
        if token == CLOSES and not depth:
            token = LETTER
        depth += (token == OPENS) - (token == CLOSES)
        tokens.append(token)
        depths.append(depth)
    return tokens, depths


def _source() -> Any:
    # Import scikit-learn here, because this takes a second and published datasets do not need it.
    from sklearn import datasets  # noqa: PLC0415

    return datasets


def _digits() -> tuple[Any, Any]:
    """Return the images as uint8 [n, 8, 8, 1], and the digits."""
    found = _source().load_digits()
    # Scale the pixels, which range from 0 to 16 in the source, to the range of uint8.
    return np.round(found.images * 255 / 16).astype(np.uint8)[..., np.newaxis], found.target


def _draw_splits(count: int) -> tuple[Any, Any]:
    order = np.random.RandomState(SEED).permutation(count)
    test, train = np.split(order, [round(TEST_SHARE * count)])
    return train, test

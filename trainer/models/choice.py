"""Chooses the model that fits the inputs of a dataset, for `model.name: auto`.

The choice depends on the kinds of the inputs, so it can be reported before the dataset is prepared.
This module does not import TensorFlow.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flotilla.trainer.config.base import AUTO
from flotilla.trainer.config.model import RECOMMENDERS, ModelConfig
from flotilla.trainer.config.schema import Config
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name
from flotilla.trainer.features.statistics.statistics import are_repeated

#: Kinds of inputs. A category is a class, or a string whose values repeat.
NUMBER, CATEGORY, FREE_TEXT, IMAGE, SEQUENCE, TENSOR = (
    "number", "category", "text", "image", "sequence", "list of numbers",
)  # fmt: skip
TABULAR, TWO_TOWER = "tabular", "two_tower"
_OF_ALL = {FREE_TEXT: "text", SEQUENCE: "sequence", IMAGE: "cnn"}
# An image has two sides, and may have channels: 1 for gray, 3 for RGB, 4 for RGBA.
_SIDES, _CHANNELS = 2, (1, 3, 4)
_PAIR, _TWO_CLASSES = 2, 2
# An embedding table of integer ids has a row for each id up to the largest. The largest id must be
# below `_FEW_ROWS`, or below `_SPARSE` times the number of distinct ids.
_FEW_ROWS, _SPARSE = 100_000, 10
# Patterns of the names of id columns, and words that occur in the names of user and item ids.
_ID = re.compile(
    r"(?:^|[\W_])(?:id|ids|nr|no|number|key|code|uuid|guid|index)$|^(?:user|customer|client|member|"
    r"order|account|person|passenger|patient|transaction|row|record|item|product|case)id$",
    re.IGNORECASE,
)
_CAMEL_ID = re.compile(r"[a-z](?:Id|ID)$")
_USERS = (
    "user", "customer", "member", "visitor", "reader", "viewer", "listener", "person", "client",
)  # fmt: skip
_ITEMS = (
    "item", "movie", "film", "product", "book", "song", "track", "artist", "article", "video",
    "game", "sku", "isbn", "restaurant",
)  # fmt: skip


class Choice(NamedTuple):
    """The name of a model, and the reason for choosing it."""

    name: str
    why: str


def with_model(config: Config, dataset: DatasetSpec) -> Config:
    """Return the configuration with the model that is chosen for a dataset.

    An image model chosen by `auto` augments its images, except with `training.jit_compile`.
    """
    model, data = named(config.model, dataset), config.data
    if model.name == _OF_ALL[IMAGE] and config.model.name == AUTO:
        # XLA cannot compile the augmentation.
        args = {"augment": not config.training.jit_compile, **model.args}
        model = model.model_copy(update={"args": args})
    if model.name in RECOMMENDERS and data.source and not data.inputs:
        # List the inputs, because a configuration that names a recommender requires them.
        data = data.model_copy(update={"inputs": tuple(dataset.inputs)})
    return config.model_copy(update={"model": model, "data": data})


def named(config: ModelConfig, dataset: DatasetSpec) -> ModelConfig:
    """Return the `model` section, with `auto` replaced by the name of the chosen model."""
    if config.name != AUTO:
        return config
    return config.model_copy(update={"name": of_dataset(dataset).name})


def of_dataset(dataset: DatasetSpec) -> Choice:
    """Choose the model for the inputs of a dataset."""
    lengths = {length_name(name) for name in dataset.inputs}
    kinds = {name: _kind(dataset, name) for name in dataset.inputs if name not in lengths}
    labels = [dataset.features[name] for name in dataset.targets]
    # A two-tower model returns one score: for a single number, or for one of two classes.
    is_score = len(labels) == 1 and not labels[0].shape and labels[0].num_classes <= _TWO_CLASSES
    return of_kinds(kinds, may_match=is_score and all(_fits_table(dataset, name) for name in kinds))


def of_kinds(kinds: Mapping[str, str], *, may_match: bool) -> Choice:
    """Choose the model for inputs, given their kinds by name.

    `may_match` indicates whether the target and the inputs allow a model that scores pairs of ids.
    """
    if may_match and (pair := _pair(kinds)):
        return Choice(TWO_TOWER, f"the inputs {pair[0]} and {pair[1]} are ids of users and items")
    different = {*kinds.values()}
    if len(different) == 1:
        (kind,) = different
        name = _OF_ALL.get(kind, TABULAR)
        is_one = kind != IMAGE or len(kinds) == 1
        if name != TABULAR and is_one:
            return Choice(name, f"{'the input is' if len(kinds) == 1 else 'all inputs are'} {kind}")
    counts = Counter(kinds.values())
    if SEQUENCE in different and IMAGE not in different:
        return Choice(_OF_ALL[SEQUENCE], f"the inputs are {in_words(counts)}")
    return Choice(TABULAR, f"the inputs are {in_words(counts)}")


def in_words(counts: Mapping[str, int]) -> str:
    """Format the counts of inputs by kind as text, such as `2 numbers and 1 text`."""
    plurals = {CATEGORY: "categories", TENSOR: "lists of numbers"}
    said = [
        f"{count:,} {kind if count == 1 else plurals.get(kind, f'{kind}s')}"
        for kind, count in counts.items()
    ]
    return " and ".join(filter(None, [", ".join(said[:-1]), *said[-1:]]))


def is_id(name: str) -> bool:
    """Return whether a column is named like an id."""
    return bool(_ID.search(name.strip()) or _CAMEL_ID.search(name.strip()))


def names_things(name: str) -> bool:
    """Return whether a column is named like an identifier, and not like a number or an index."""
    return is_id(name) and _words(name)[-1:] not in (["nr"], ["no"], ["number"], ["index"])


def _pair(kinds: Mapping[str, str]) -> Sequence[str]:
    """Return the names of a user id and an item id if these are the only inputs, else ()."""
    if len(kinds) != _PAIR or not {*kinds.values()} <= {NUMBER, CATEGORY, FREE_TEXT}:
        return ()
    users, items = (
        [name for name in kinds if {*words} & {*_words(name)}] for words in (_USERS, _ITEMS)
    )
    pair = [*users, *items]
    is_pair = len(users) == len(items) == 1 and users != items
    # A column named `user` may contain ids, but a column named `user age` does not.
    if is_pair and all(is_id(name) or len(_words(name)) == 1 for name in pair):
        return pair
    return ()


def _words(name: str) -> list[str]:
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])id\b", " id", spaced))


def _kind(dataset: DatasetSpec, name: str) -> str:
    feature, known = dataset.features[name], dataset.learnt.features.get(name)
    shape = feature.shape
    if feature.dtype == "string" and not shape:
        # Before preparation, only the type is known, so assume free text.
        repeats = known is not None and are_repeated(known.distinct, known.examples)
        return CATEGORY if repeats else FREE_TEXT
    if not shape:
        return CATEGORY if feature.num_classes else NUMBER
    if _is_image(feature):
        return IMAGE
    is_ordered = None in shape or feature.dtype == "string" or is_series(shape)
    return SEQUENCE if is_ordered else TENSOR


def _fits_table(dataset: DatasetSpec, name: str) -> bool:
    feature, known = dataset.features[name], dataset.learnt.features.get(name)
    if feature.shape or not ("int" in feature.dtype or feature.dtype == "string"):
        return False
    if known is None:
        return True
    if feature.dtype == "string":
        return len(known.counts) >= known.distinct
    rows = known.most or 0
    return (known.least or 0) >= 0 and rows < max(_FEW_ROWS, _SPARSE * known.distinct)


def _is_image(feature: FeatureSpec) -> bool:
    shape = feature.shape
    if feature.stored == "image":
        return True
    is_grey = len(shape) == _SIDES and feature.dtype == "uint8"
    return None not in shape and (is_grey or (len(shape) == _SIDES + 1 and shape[-1] in _CHANNELS))


def is_series(*shapes: tuple[int | None, ...]) -> bool:
    """Return whether arrays are matrices with more rows than columns, as time series often are."""
    rank = {len(shape) for shape in shapes}
    return rank == {_SIDES} and all((shape[0] or 0) > (shape[1] or 0) for shape in shapes)

"""Generated datasets, which need no download: brackets for sequences, clicks for recommenders.

`Brackets` has sequences of different lengths. The labels require counting: the nesting depth at
each position, and whether a bracket is still open at the end of the sequence.

`Clicks` records which user was shown which item, and whether the user clicked. Users and items have
`RANK` latent factors; a click is more likely if the factors of user and item agree. Some items are
slightly more popular, and some are shown more often. The signal is in the pairs: a prediction from
the item alone is correct in 53 % of the cases, and a prediction from all factors in 83 %.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from numpy.typing import NDArray

SEQUENCES, OF_TRAINING = 5000, 4000
SHORTEST, LONGEST = 5, 24
# Tokens; 0 is reserved for padding.
OPENS, CLOSES, LETTER = 1, 2, 3
DEPTHS = ("outside", "once", "twice", "deeper")


class Brackets(tfds.core.GeneratorBasedBuilder):
    """4,000 training and 1,000 test sequences of 5 to 24 tokens."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Generated brackets: depth of each position, and whether one is left open.",
            features=tfds.features.FeaturesDict(
                {
                    "tokens": tfds.features.Sequence(np.int64),
                    "depths": tfds.features.Sequence(tfds.features.ClassLabel(names=DEPTHS)),
                    "end": tfds.features.ClassLabel(names=["closed", "open"]),
                }
            ),
            supervised_keys=("tokens", "end"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        # `RandomState` is the only NumPy generator that draws the same numbers in every version.
        random = np.random.RandomState(SEED)
        drawn = [_sequence(random) for _ in range(SEQUENCES)]
        return {
            "train": self._generate_examples(drawn, range(OF_TRAINING)),
            "test": self._generate_examples(drawn, range(OF_TRAINING, SEQUENCES)),
        }

    def _generate_examples(
        self, drawn: list[tuple[list[int], list[int]]], chosen: range
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in chosen:
            tokens, depths = drawn[index]
            classes = [min(depth, len(DEPTHS) - 1) for depth in depths]
            yield index, {"tokens": tokens, "depths": classes, "end": int(depths[-1] > 0)}


def _sequence(random: np.random.RandomState) -> tuple[list[int], list[int]]:
    """Return the tokens, and the number of open brackets after each of them."""
    tokens, depths, depth = [], [], 0
    for _ in range(random.randint(SHORTEST, LONGEST + 1)):
        # Closing is more likely than opening, so that about half of the sequences end without an
        # open bracket.
        token = int(random.choice([OPENS, CLOSES, LETTER], p=[0.3, 0.4, 0.3]))
        if token == CLOSES and not depth:
            token = LETTER
        depth += (token == OPENS) - (token == CLOSES)
        tokens.append(token)
        depths.append(depth)
    return tokens, depths


USERS = 1000
ITEMS = 500
EXAMPLES = 40_000
TRAINING = 32_000
RANK = 2
# Factors of the two terms of a score. The sigmoid of a score is the probability of a click.
AFFINITY = 4.0
POPULARITY = 0.5
# The seed is fixed, because every run needs the same examples.
SEED = 20

Column = NDArray[np.int64]


def draw() -> tuple[Column, Column, Column]:
    """Return the user, item and click of every example, in the order of creation."""
    # `RandomState` is the only NumPy generator that draws the same numbers in every version.
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


class Clicks(tfds.core.GeneratorBasedBuilder):
    """32,000 training and 8,000 test examples of 1,000 users and 500 items."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Generated clicks of users on items, with a low-rank structure.",
            features=tfds.features.FeaturesDict(
                {
                    "user": tfds.features.Scalar(np.int64),
                    "item": tfds.features.Scalar(np.int64),
                    "label": tfds.features.ClassLabel(names=["no_click", "click"]),
                }
            ),
            supervised_keys=({"user": "user", "item": "item"}, "label"),
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Any]:
        del dl_manager
        columns = draw()
        return {
            "train": self._generate_examples(columns, range(TRAINING)),
            "test": self._generate_examples(columns, range(TRAINING, EXAMPLES)),
        }

    def _generate_examples(
        self, columns: tuple[Column, Column, Column], chosen: range
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        users, items, clicks = columns
        for index in chosen:
            yield (
                index,
                {"user": int(users[index]), "item": int(items[index]), "label": int(clicks[index])},
            )

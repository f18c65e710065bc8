"""Made up sequences, always there: brackets among letters, of different lengths.

What is to be found has to be counted: how deep each place is nested, and whether a bracket is left
open where the sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

TRAINING, TEST = 4000, 1000
SHORTEST, LONGEST = 5, 24
# Tokens; 0 is for padding.
OPENS, CLOSES, LETTER = 1, 2, 3
DEPTHS = ("outside", "once", "twice", "deeper")
# Not the seed of the configuration: the sequences have to be the same in every run.
SEED = 20


class Brackets(tfds.core.GeneratorBasedBuilder):
    """4,000 training and 1,000 test sequences of 5 to 24 tokens."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        return tfds.core.DatasetInfo(
            builder=self,
            description="Generated brackets, how deep each place is, and whether one is left open.",
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
        # Of NumPy's generators only this one promises the same numbers in every version.
        random = np.random.RandomState(SEED)
        drawn = [_sequence(random) for _ in range(TRAINING + TEST)]
        return {
            "train": self._generate_examples(drawn, range(TRAINING)),
            "test": self._generate_examples(drawn, range(TRAINING, TRAINING + TEST)),
        }

    def _generate_examples(
        self, drawn: list[tuple[list[int], list[int]]], chosen: range
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in chosen:
            tokens, depths = drawn[index]
            classes = [min(depth, len(DEPTHS) - 1) for depth in depths]
            yield index, {"tokens": tokens, "depths": classes, "end": int(depths[-1] > 0)}


def _sequence(random: np.random.RandomState) -> tuple[list[int], list[int]]:
    """Return tokens, and how many brackets are open after each."""
    tokens, depths, depth = [], [], 0
    for _ in range(random.randint(SHORTEST, LONGEST + 1)):
        # What is open is rather closed, so that both endings occur as often.
        token = int(random.choice([OPENS, CLOSES, LETTER], p=[0.3, 0.4, 0.3]))
        if token == CLOSES and not depth:
            token = LETTER
        depth += (token == OPENS) - (token == CLOSES)
        tokens.append(token)
        depths.append(depth)
    return tokens, depths

"""The split of each example, drawn by a keyed hash of its content, by group, by time, or named.

A hash depends on nothing but the example and the seed: equal examples stay in one split, and an
example keeps its split when others come.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from trainer.config.data import DataConfig
from trainer.data.spec import SPLITS
from trainer.errors import ConfigError

_ALIASES = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test",
}  # fmt: skip


def split_named(text: str) -> int:
    """Return the split that a word stands for, as an index into `SPLITS`; -1 for none."""
    name = _ALIASES.get(text.strip().lower())
    return SPLITS.index(name) if name else -1


def by_share(found: NDArray[np.uint64], *, validation: float, test: float) -> NDArray[np.int8]:
    """Return the split of each hash: the lowest are test, the next validation."""
    place = found.astype(np.float64) / 2.0**64
    splits = np.full(len(found), SPLITS.index("train"), np.int8)
    splits[place < test + validation] = SPLITS.index("validation")
    splits[place < test] = SPLITS.index("test")
    return splits


def by_bounds(values: NDArray[np.float64], bounds: tuple[float, float]) -> NDArray[np.int8]:
    """Return the split of each time: from the first bound validation, from the second test."""
    splits = np.full(len(values), SPLITS.index("train"), np.int8)
    splits[values >= bounds[0]] = SPLITS.index("validation")
    splits[values >= bounds[1]] = SPLITS.index("test")
    return splits


def shares(config: DataConfig, examples: int, named: Collection[str]) -> tuple[float, float]:
    """Return the shares of validation and test that are drawn; 0 for one that has its own files.

    Raises:
        ConfigError: there would be no test.
    """
    validation = config.validation
    if validation >= 1:
        validation = min(1.0, validation / max(1, examples))
    test = config.splits.test
    drawn = 0.0 if isinstance(test, str) else float(test or validation)
    if not drawn and "test" not in named:
        raise ConfigError(
            "data.validation: 0, and data.splits has no test, so that nothing is left to test on; "
            "set data.splits.test to 0.1 or so"
        )
    return (0.0 if "validation" in named else validation), 0.0 if "test" in named else drawn


def bounds_of(
    times: NDArray[np.float64], counts: NDArray[np.int64], *, validation: float, test: float
) -> tuple[float, float]:
    """Return the times from which on examples are validation and test; equal ones stay together.

    Args:
        times: different times, in ascending order.
        counts: examples of each.
        validation: their share.
        test: their share.
    """
    total = int(counts.sum())
    left = np.concatenate([counts[::-1].cumsum()[::-1], [0]])
    ends = np.concatenate([times, [np.inf]])

    def bound(share: float) -> float:
        # The first time from which on there are no more than that share.
        return float(ends[int(np.argmax(left <= share * total + 0.5))]) if share else float(np.inf)

    return bound(validation + test), bound(test)

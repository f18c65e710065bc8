"""Assigns examples to the splits train, validation and test.

Examples of TFDS builders are drawn with a seed. Examples of files are assigned by a keyed hash of
their content, by group, by time, or by name. A hash depends only on the example and the seed, so
equal examples are in the same split, and an example keeps its split when others are added.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.features.dataset_spec import SPLITS
from flotilla.trainer.runtime.errors import ConfigError, UserError

TRAIN, VALIDATION, TEST = range(len(SPLITS))


def shard_counts(name: str, examples: Mapping[str, int], shards: int) -> dict[str, int]:
    """Return the number of shards of each split that is not empty. Raises `UserError`.

    `shards` is the number for the training split. Shards of other splits have about the same size.
    """
    for split, purpose in (("test", "for the test split"), ("train", "to train on")):
        if not examples.get(split):
            sizes = ", ".join(f"{count} {each}" for each, count in examples.items())
            raise UserError(
                f"data.splits: {name} has no example {purpose} ({sizes}); rows with equal inputs "
                "are always in one split, as are all rows of a group; add rows that differ, choose "
                "another group, or change the shares"
            )
    if shards > examples["train"]:
        raise UserError(
            f"data.shards: cannot divide {examples['train']} training examples of {name} into "
            f"{shards} shards; set data.shards to {examples['train']} or less"
        )
    size = -(-examples["train"] // shards)
    others = {split: min(shards, -(-examples[split] // size)) for split in SPLITS[1:]}
    return {"train": shards} | {split: count for split, count in others.items() if count}


def plan(
    name: str, sizes: Mapping[str, int], *, validation: float, seed: int
) -> dict[str, NDArray[np.int8]]:
    """Assign the examples of each split of a source to the splits of the dataset.

    If the source has both a validation and a test split, both are used unchanged, but the
    validation split is left out if `validation` is 0. If it has only one of them, that split is the
    test split, and validation examples are drawn from the training split. If it has neither, test
    examples are drawn too.

    `sizes` are the numbers of examples of the source's splits. `validation` is a share of the
    training split if below 1, otherwise a count. For each split of the source, return the target
    split of each example as an index into `SPLITS`. Raises `UserError`.
    """
    source = {split: size for split, size in sizes.items() if size}
    if "train" not in source:
        found = ", ".join(source) or "none"
        raise UserError(
            f"data.dataset: {name} has no split 'train' (it has {found}); set data.dataset to a "
            "builder that has one"
        )
    test_source = next((split for split in ("test", "validation") if split in source), None)
    own = test_source == "test" and "validation" in source and validation > 0
    share = max(1, round(validation * source["train"])) if validation else 0
    held = 0 if own else int(validation) if validation >= 1 else share
    targets = {"train": _draw(name, source["train"], held, test_source is None, seed)}
    if own:
        targets["validation"] = np.full(source["validation"], VALIDATION, np.int8)
    if test_source:
        targets[test_source] = np.full(source[test_source], TEST, np.int8)
    return targets


def _draw(name: str, examples: int, held: int, with_test: bool, seed: int) -> NDArray[np.int8]:
    if with_test and not held:
        raise UserError(
            f"data.validation is 0 and {name} has no test split, so there is no test data; set "
            "data.validation to about 0.1, which also draws a test split of that size"
        )
    taken = held * (2 if with_test else 1)
    if taken >= examples:
        what = "validation and test" if with_test else "validation"
        raise UserError(
            f"data.validation: {what} would take {taken} of the {examples} training examples of "
            f"{name}; set a smaller share or count"
        )
    # `RandomState` is the only NumPy generator that draws the same numbers in every version.
    order = np.random.RandomState(seed).permutation(examples)
    target = np.full(examples, TRAIN, np.int8)
    target[order[:held]] = VALIDATION
    target[order[held:taken]] = TEST
    return target


_ALIASES = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test",
}  # fmt: skip
# Folder names that indicate a split, such as train, seg_test or Training_Set2.
_FOLDER = re.compile(
    rf"(?:.*[ _-])?({'|'.join(_ALIASES)})(?:[ _-]?(?:set|data|images))?[ _-]?\d*", re.DOTALL
)


def split_named(text: str) -> int:
    """Return the split that a word names, as an index into `SPLITS`, or -1 if it names none."""
    name = _ALIASES.get(text.strip().lower())
    return SPLITS.index(name) if name else -1


def split_of_folder(name: str) -> str:
    """Return the split that a folder name indicates, or an empty string if it indicates none."""
    found = _FOLDER.fullmatch(name.lower())
    return _ALIASES[found[1]] if found else ""


def split_by_hash(found: NDArray[np.uint64], *, validation: float, test: float) -> NDArray[np.int8]:
    """Return the split of each hash: test for the lowest hashes, validation for the next."""
    place = found.astype(np.float64) / 2.0**64
    splits = np.full(len(found), TRAIN, np.int8)
    splits[place < test + validation] = VALIDATION
    splits[place < test] = TEST
    return splits


def split_by_time(values: NDArray[Any], bounds: tuple[float, float]) -> NDArray[np.int8]:
    """Return the split of each timestamp. The bounds are the starts of validation and of test."""
    splits = np.full(len(values), TRAIN, np.int8)
    splits[values >= bounds[0]] = VALIDATION
    splits[values >= bounds[1]] = TEST
    return splits


def shares(config: DataConfig, examples: int, named: Collection[str]) -> tuple[float, float]:
    """Return the shares of examples to draw for validation and test, or 0 for splits in `named`."""
    validation = config.validation
    if validation >= 1:
        validation = min(1.0, validation / max(1, examples))
    test = config.splits.test
    drawn = 0.0 if isinstance(test, str) else float(test or validation)
    if not drawn and "test" not in named:
        raise ConfigError(
            "data.validation is 0 and data.splits has no test, so there is no test data; set "
            "data.splits.test to about 0.1"
        )
    return (0.0 if "validation" in named else validation), 0.0 if "test" in named else drawn


def find_bounds(
    times: Sequence[float], counts: NDArray[np.int64], *, validation: float, test: float
) -> tuple[float, float]:
    """Return the timestamps at which validation and test begin. Equal ones are not separated.

    `times` are distinct and ascending. `counts` has the number of examples at each timestamp.
    """
    total = int(counts.sum())
    left = np.concatenate([counts[::-1].cumsum()[::-1], [0]])
    ends = [*times, np.inf]

    def bound(share: float) -> float:
        # Find the first timestamp with at most this share of the examples at or after it.
        return ends[int(np.argmax(left <= share * total + 0.5))] if share else float(np.inf)

    return bound(validation + test), bound(test)

"""Rules on whole examples: duplicates within a split, and leakage between splits.

Examples are identified by the hashes of their inputs. For a large split, only the smallest hashes
are known, which are a uniform sample of its distinct examples. Two splits are compared up to the
smaller of their largest known hashes, because both samples are complete up to that hash.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import special

from flotilla.trainer.data_gate.findings import Finding, Question, percent
from flotilla.trainer.data_gate.profile import DatasetProfile, SplitProfile
from flotilla.trainer.data_gate.two_samples import fisher_test
from flotilla.trainer.features.statistics.statistics import IMAGE, NUMBER, TENSOR

# A numeric feature can identify examples if it has at least this many distinct values per distinct
# example.
_TELLS_APART = 0.9
# Factor by which the values of a feature may be denser than evenly spread values.
_DENSER = 4.0
# If duplicates by chance are less probable than this, use the binomial test.
_RARE = 0.005


def duplicates(question: Question) -> Iterator[Finding]:
    """Find unexpected duplicates, and report the split with the most duplicates."""
    dataset, limit = question.dataset, question.limit("duplicates")
    found: dict[str, tuple[float, float]] = {}
    for split, each in dataset.splits.items():
        examples, again = _count_duplicates(each)
        expected = _expected(question, split)
        if not again or expected is None:
            continue
        value = again / examples
        chance = special.bdtrc(again - 1, examples, min(expected, 1.0))
        if value > expected + limit and chance < question.significance:
            found[split] = value, expected
    if found:
        split = max(found, key=lambda each: found[each][0] * dataset.examples(each))
        value, expected = found[split]
        others = "".join(
            f", {percent(found[each][0])} of {each}" for each in found if each != split
        )
        says = (
            f"{percent(value)} of the examples of {split}{others} have the same inputs as another "
            f"example of the split ({percent(expected)} were expected), and metrics count them "
            "more than once; check whether a file is duplicated"
        )
        yield Finding(
            "duplicates",
            says,
            split=split,
            value=value,
            limit=expected + limit,
            champion=_get_champion_share(question, split),
        )


def _expected(question: Question, split: str) -> float | None:
    by_chance = _estimate_chance(question.dataset)
    if by_chance is not None:
        return max(_get_champion_share(question, split) or 0.0, by_chance)
    if split != "train":
        # Do not scale the champion's share in other splits, because some values may occur in only
        # a few splits.
        return None
    known = _get_champion_share(question, split)
    if known is None or question.champion is None:
        return None
    grown = question.dataset.examples(split) / max(question.champion.examples(split), 1)
    return known * max(grown, 1.0)


def _get_champion_share(question: Question, split: str) -> float | None:
    if question.champion is None or split not in question.champion.splits:
        return None
    examples, found = _count_duplicates(question.champion.splits[split])
    return found / examples if examples else None


def _estimate_chance(dataset: DatasetProfile) -> float | None:
    """Return the probability that an example has a duplicate by chance, or None if it is unknown.

    The probability is 0 if any input is an image or a tensor, because these are hardly ever equal
    by chance. The number of possible values of a numeric feature is estimated as its range divided
    by the smallest step in a sample.
    """
    train = dataset.splits.get("train")
    if train is None or not train.copies.sum():
        return None
    features = [each for name, each in train.features.items() if name in dataset.inputs]
    if any(each.kind in (TENSOR, IMAGE) for each in features):
        return 0.0
    unlike = train.examples * len(train.copies) / float(train.copies.sum())
    # For each feature, the share of the most frequent value, plus the probability that an example
    # shares another value.
    chances = [
        float(counts.max()) / len(each.numbers)
        + _DENSER * train.examples * float(np.min(steps)) / (each.most - each.least)
        for each in features
        if each.kind == NUMBER and each.distinct >= _TELLS_APART * unlike
        for found, counts in [np.unique(each.numbers, return_counts=True)]
        if len(steps := np.diff(found))
    ]  # fmt: skip
    return min(chances, default=None)


def _count_duplicates(split: SplitProfile) -> tuple[int, int]:
    """Return the number of examples with known hashes, and how many of them have a duplicate."""
    return int(split.copies.sum()), int(split.copies[split.copies > 1].sum())


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Examples of one split that are also in another split: `found` of `asked` examples.

    In a large split, only a sample is examined. `whole` is the size of the split, and `expected` is
    the share that is expected by chance.
    """

    found: int
    asked: int
    whole: int
    expected: float

    @property
    def share(self) -> float:
        """The share of the examined examples that are in both splits."""
        return self.found / self.asked

    def __str__(self) -> str:
        """Describe how many of the examined test examples were found."""
        if self.asked == self.whole:
            return f"{self.found} of {self.whole} test examples"
        return (
            f"about {round(self.share * self.whole)} of {self.whole} test examples "
            f"({self.found} of {self.asked} that were examined)"
        )


def leakage(question: Question) -> Iterator[Finding]:
    """Find splits that share more examples with another split than chance explains."""
    splits, limit = question.dataset.splits, question.limit("leakage")
    for first, second in combinations([name for name in splits if len(splits[name].hashes)], 2):
        one, other = splits[first], splits[second]
        known, asked = (one, other) if one.examples >= other.examples else (other, one)
        found = find_copies(question.dataset, asked, known, question.significance, limit)
        if found:
            names = (second, first) if asked is other else (first, second)
            says = (
                f"{percent(found.share)} of the examples of {names[0]} are also in {names[1]} "
                f"({percent(found.expected)} were expected), so the metrics of {names[0]} are too "
                "optimistic; split by data.group, or remove the copies"
            )
            yield Finding(
                "leakage", says, split=names[0], value=found.share, limit=found.expected + limit
            )


def find_copies(
    dataset: DatasetProfile,
    asked: SplitProfile,
    known: SplitProfile,
    significance: float,
    limit: float = 0.0,
) -> Copies | None:
    """Count the examples that two splits share. Return None if chance explains their number.

    Args:
        dataset: the dataset of the split `asked`.
        asked: the split whose examples are looked up.
        known: the split in which they are looked up.
        significance: the significance level of the test.
        limit: the allowed excess over the expected share.
    """
    examples, found = count_shared(asked, known)
    whole, again = _count_duplicates(known)
    # By chance, an example is as likely to have a copy in the other split as in its own.
    expected = again / whole if whole else 0.0
    by_chance = _estimate_chance(dataset)
    if by_chance is not None and by_chance < max(limit, _RARE):
        chance = float(special.bdtrc(found - 1, examples, max(expected, by_chance)))
    else:
        chance = fisher_test(found, examples, again, whole)
    if not found or found / examples <= expected + limit or chance >= significance:
        return None
    return Copies(found=found, asked=examples, whole=asked.examples, expected=expected)


def find_new_copies(
    dataset: DatasetProfile, known: SplitProfile, significance: float
) -> Copies | None:
    """Count the test examples of a dataset that are in `known` but not in its training split.

    Copies by chance are equally frequent in both splits. Return None if the difference is not
    significant.
    """
    asked, own = dataset.splits["test"], dataset.splits["train"]
    within = asked.hashes <= min(_limit(asked), _limit(own), _limit(known))
    hashes, copies = asked.hashes[within], asked.copies[within]
    there, here = np.isin(hashes, known.hashes), np.isin(hashes, own.hashes)
    examples, found, others = (int(copies[each].sum()) for each in (
        np.ones(len(hashes), np.bool_), there & ~here, here & ~there
    ))  # fmt: skip
    by_chance = _estimate_chance(dataset)
    if by_chance is not None and by_chance < _RARE:
        chance = special.bdtrc(found - 1, examples, by_chance)
    else:
        chance = special.bdtrc(found - 1, found + others, 0.5)
    if not found or chance >= significance:
        return None
    return Copies(found=found, asked=examples, whole=asked.examples, expected=0.0)


def count_shared(asked: SplitProfile, known: SplitProfile) -> tuple[int, int]:
    """Return how many `asked` examples can be looked up in `known`, and how many were found."""
    within = asked.hashes <= min(_limit(asked), _limit(known))
    copies = asked.copies[within]
    return int(copies.sum()), int(copies[np.isin(asked.hashes[within], known.hashes)].sum())


def _limit(split: SplitProfile) -> NDArray[np.uint64] | np.uint64:
    if split.is_whole or not len(split.hashes):
        return np.uint64(np.iinfo(np.uint64).max)
    return np.uint64(split.hashes.max())

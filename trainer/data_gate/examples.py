"""Rules of whole examples: the same one many times in a split, and the same one in two splits.

Examples are compared by the hashes of their inputs. Of a large split only the smallest hashes are
known: an even sample of all different examples, and of every split the same one.
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
from flotilla.trainer.data_gate.two_samples import more_often
from flotilla.trainer.features.statistics.statistics import IMAGE, NUMBER, TENSOR

# A number tells examples apart where nearly every different one has another value of it.
_TELLS_APART = 0.9
# By so much are values of a number denser than if they were spread evenly.
_DENSER = 4.0
# Below this share of equal examples by chance any more of them are none.
_RARE = 0.005


def duplicates(question: Question) -> Iterator[Finding]:
    """Find the split with the most equal examples beyond those that its values explain."""
    dataset, limit = question.dataset, question.limit("duplicates")
    found: dict[str, tuple[float, float]] = {}
    for split, each in dataset.splits.items():
        examples, again = _again(each)
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
            f"{percent(value)} of the examples of {split}{others} have the same inputs as "
            f"another example of the split ({percent(expected)} were expected): check whether "
            "a file is duplicated; metrics count such examples more than once"
        )
        yield Finding(
            "duplicates",
            says,
            split=split,
            value=value,
            limit=expected + limit,
            champion=_of_champion(question, split),
        )


def _expected(question: Question, split: str) -> float | None:
    """Return the share of examples that have an equal one where nothing is wrong; None: unknown."""
    by_chance = _by_chance(question.dataset)
    if by_chance is not None:
        return max(_of_champion(question, split) or 0.0, by_chance)
    if split != "train":
        # Fewer examples have fewer equal ones, but where some values are in few splits.
        return None
    known = _of_champion(question, split)
    if known is None or question.champion is None:
        return None
    grown = question.dataset.examples(split) / max(question.champion.examples(split), 1)
    return known * max(grown, 1.0)


def _of_champion(question: Question, split: str) -> float | None:
    if question.champion is None or split not in question.champion.splits:
        return None
    examples, found = _again(question.champion.splits[split])
    return found / examples if examples else None


def _by_chance(dataset: DatasetProfile) -> float | None:
    """Return how probable an equal example is by chance; None where that is not known.

    Two examples are hardly ever equal where an image or a tensor is an input. Of numbers it is
    asked how many different ones there could be: the range by the smallest step of a sample.
    """
    train = dataset.splits.get("train")
    if train is None or not train.copies.sum():
        return None
    features = [each for name, each in train.features.items() if name in dataset.inputs]
    if any(each.kind in (TENSOR, IMAGE) for each in features):
        return 0.0
    unlike = train.examples * len(train.copies) / float(train.copies.sum())
    # As many as have its most frequent value, and have one of so many that there could be.
    chances = [
        float(counts.max()) / len(each.numbers)
        + _DENSER * train.examples * float(np.min(steps)) / (each.most - each.least)
        for each in features
        if each.kind == NUMBER and each.distinct >= _TELLS_APART * unlike
        for found, counts in [np.unique(each.numbers, return_counts=True)]
        if len(steps := np.diff(found))
    ]  # fmt: skip
    return min(chances, default=None)


def _again(split: SplitProfile) -> tuple[int, int]:
    """Return the examples of known hashes, and how many of them are not alone with theirs."""
    return int(split.copies.sum()), int(split.copies[split.copies > 1].sum())


@dataclass(frozen=True, kw_only=True)
class Copies:
    """Examples of one split that are in another as well: `found` of so many that were `asked`.

    Of a large split only some are known; `whole` are all of it. `expected` is the share by chance.
    """

    found: int
    asked: int
    whole: int
    expected: float

    @property
    def share(self) -> float:
        """The share of the examples that are in both."""
        return self.found / self.asked

    def __str__(self) -> str:
        """Say how many test examples these are."""
        if self.asked == self.whole:
            return f"{self.found} of {self.whole} test examples"
        return (
            f"about {round(self.share * self.whole)} of {self.whole} test examples ({self.found} "
            f"of {self.asked} that were looked at)"
        )


def leakage(question: Question) -> Iterator[Finding]:
    """Find splits whose examples are in another one, more than their values explain."""
    splits, limit = question.dataset.splits, question.limit("leakage")
    for first, second in combinations([name for name in splits if len(splits[name].hashes)], 2):
        one, other = splits[first], splits[second]
        known, asked = (one, other) if one.examples >= other.examples else (other, one)
        found = find_copies(question.dataset, asked, known, question.significance, limit)
        if found:
            names = (second, first) if asked is other else (first, second)
            says = (
                f"{percent(found.share)} of the examples of {names[0]} are in {names[1]} as "
                f"well ({percent(found.expected)} were expected): its metrics are too good; "
                "split by data.group, or remove the copies"
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
    """Return the examples of a split of the dataset that are in another, if more than by chance.

    Args:
        dataset: the one of the split that is `asked`.
        asked: its examples are looked for.
        known: they are looked for among these.
        significance: how probable by chance so many may be.
        limit: by how much their share has to be larger than what was to be expected.
    """
    examples, found = count_shared(asked, known)
    whole, again = _again(known)
    # An example has an equal one elsewhere as often as one there has, if that is chance.
    expected = again / whole if whole else 0.0
    by_chance = _by_chance(dataset)
    if by_chance is not None and by_chance < max(limit, _RARE):
        chance = float(special.bdtrc(found - 1, examples, max(expected, by_chance)))
    else:
        chance = more_often(found, examples, again, whole)
    if not found or found / examples <= expected + limit or chance >= significance:
        return None
    return Copies(found=found, asked=examples, whole=asked.examples, expected=expected)


def find_new_copies(
    dataset: DatasetProfile, known: SplitProfile, significance: float
) -> Copies | None:
    """Return the test examples of a dataset that are in `known`, and not in its training split.

    None where as many are only in the training split: equal values by chance are in both as often.
    """
    asked, own = dataset.splits["test"], dataset.splits["train"]
    within = asked.hashes <= min(_last(asked), _last(own), _last(known))
    hashes, copies = asked.hashes[within], asked.copies[within]
    there, here = np.isin(hashes, known.hashes), np.isin(hashes, own.hashes)
    examples, found, others = (int(copies[each].sum()) for each in (
        np.ones(len(hashes), np.bool_), there & ~here, here & ~there
    ))  # fmt: skip
    by_chance = _by_chance(dataset)
    if by_chance is not None and by_chance < _RARE:
        chance = special.bdtrc(found - 1, examples, by_chance)
    else:
        chance = special.bdtrc(found - 1, found + others, 0.5)
    if not found or chance >= significance:
        return None
    return Copies(found=found, asked=examples, whole=asked.examples, expected=0.0)


def count_shared(asked: SplitProfile, known: SplitProfile) -> tuple[int, int]:
    """Return examples of `asked`, as far as both know hashes, and how many of them are in both."""
    within = asked.hashes <= min(_last(asked), _last(known))
    copies = asked.copies[within]
    return int(copies.sum()), int(copies[np.isin(asked.hashes[within], known.hashes)].sum())


def _last(split: SplitProfile) -> NDArray[np.uint64] | np.uint64:
    if split.is_whole or not len(split.hashes):
        return np.uint64(np.iinfo(np.uint64).max)
    return np.uint64(split.hashes.max())

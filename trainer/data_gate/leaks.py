"""Rules on leaks: examples in two splits, duplicates, and inputs that determine a label.

Examples are identified by the hashes of their inputs. For a large split, only the smallest hashes
are known, which are a uniform sample of its distinct examples. Two splits are compared up to the
smaller of their largest known hashes, because both samples are complete up to that hash.

Legitimate inputs hardly ever determine a label.

An input leaks a class if all examples with the same value have the same class, if a few thresholds
separate the classes, or if the remainder of a row number determines the class. An image or a tensor
leaks a class if, in one of its projections, the values of each class are close together.

Natural classes may also be separable, as iris species are by their petals, but then examples become
rare near the threshold. If the label is derived from the input, the threshold cuts a distribution
in two, or all examples of a class have one value.

An input leaks a numeric label if the two have a linear relation or the same order, or if each value
of the input has only one label.

The rule uses the sample of the training split.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from scipy import special, stats

from flotilla.trainer.data_gate.drift import fisher_test
from flotilla.trainer.data_gate.findings import Finding, Question, advise_dropping, percent
from flotilla.trainer.data_gate.profile import DatasetProfile, SplitProfile
from flotilla.trainer.features.statistics.statistics import CLASS, IMAGE, NUMBER, TENSOR, TEXT

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
        known = _get_champion_share(question, split)
        yield Finding("duplicates", says, "", split, value, expected + limit, known)


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
            yield Finding("leakage", says, "", names[0], found.share, found.expected + limit)


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
    groups = (np.ones(len(hashes), np.bool_), there & ~here, here & ~there)
    examples, found, others = (int(copies[each].sum()) for each in groups)
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


Numbers = NDArray[np.float64]
_FEWEST, _FEWEST_OF_THRESHOLDS = 50, 100
# Minimum number of examples of a class, and of distinct values of a numeric label.
_FEWEST_OF_CLASS, _FEWEST_NUMBERS = 10, 20
# Share of the examples that frequent classes must cover.
_MOST_OF_ALL = 0.9
# Maximum number of intervals between thresholds, per class on average.
_INTERVALS = 2
# A threshold cuts a distribution in two if examples are dense around it: 10 examples there span at
# most 2.5 times the lower quartile of the spans of 10 examples on one side. A side with up to 30
# examples is not compared.
_NEAR, _VALLEY, _USUAL, _WINDOWS = 10, 2.5, 0.25, 3
_MOST_REMAINDERS = 32


def label_leakage(question: Question) -> Iterator[Finding]:
    """Find inputs that determine a label."""
    dataset, champion = question.dataset, question.champion
    limit = question.limit("label_leakage")
    for name, each in dataset.features("train").items():
        if name not in dataset.inputs or question.defines_splits(name) or each.present < _FEWEST:
            continue
        for target in dataset.targets:
            how = _how(dataset, name, target, limit)
            if not how or (champion and _how(champion, name, target, limit)):
                continue
            says = (
                f"{name!r} determines {target!r} ({how}); unless it is known before the label, "
                f"{advise_dropping(name)}"
            )
            yield Finding("label_leakage", says, name, "train", each.association.get(target), limit)


def _how(dataset: DatasetProfile, name: str, target: str, limit: float) -> str:
    features, sample = dataset.features("train"), dataset.splits["train"].sample
    if not {name, target} <= sample.keys() & features.keys():
        return ""
    kinds, there = (features[name].kind, features[target].kind), np.isfinite(sample[target])
    x, y = sample[name][there], sample[target][there]
    if len(x) < _FEWEST or kinds[1] not in (NUMBER, CLASS):
        return ""
    if kinds[1] == NUMBER:
        is_one = kinds[0] in (NUMBER, TEXT, CLASS)
        return _explain_number(x, y, 1 - limit, is_number=kinds[0] == NUMBER) if is_one else ""
    if not (usual := _select_frequent(y)).any():
        return ""
    names, found = dataset.class_names(target), ""
    if kinds[0] in (NUMBER, TEXT, CLASS):
        found = _explain_class(x[usual], y[usual], 1 - limit, names, is_number=kinds[0] == NUMBER)
    if found or kinds[0] in (TEXT, CLASS):
        return found
    # The sample of an image or a tensor has projections of its elements.
    keys = (name, f"{name}/std", *(f"{name}/{place}" for place in range(4)))
    columns = [sample[key][there][usual] for key in keys if key in sample]
    is_tight = any(_is_tight(column, y[usual], limit) for column in columns)
    return "the values of each class are close together" if is_tight else ""


def _is_tight(x: Numbers, classes: Numbers, limit: float) -> bool:
    there = np.isfinite(x)
    left = _residual_by_value(classes[there], x[there]) if there.sum() >= _FEWEST else 1.0
    return left <= math.sqrt(1 - limit**2)


def _select_frequent(y: Numbers) -> NDArray[np.bool_]:
    """Return a mask of the examples of frequent classes, or all False if they are too few."""
    _, places, counts = np.unique(y, return_inverse=True, return_counts=True)
    usual = counts >= _FEWEST_OF_CLASS
    is_enough = usual.sum() > 1 and counts[usual].sum() >= _MOST_OF_ALL * len(y)
    found: NDArray[np.bool_] = usual[places] & is_enough
    return found


def _explain_number(x: Numbers, y: Numbers, spread: float, *, is_number: bool) -> str:
    """Describe how a feature determines a numeric label, up to the relative error `spread`."""
    if len(np.unique(y)) < _FEWEST_NUMBERS:
        return ""
    if _residual_by_value(x, y) <= spread:
        return "all examples with the same value have the same label"
    there = np.isfinite(x)
    if not is_number or there.sum() < max(_FEWEST, len(x) / 2):
        return ""
    x, y = x[there], y[there]
    if _residual(x, y) <= spread:
        return "one is a linear function of the other"
    x, y = stats.rankdata(x), stats.rankdata(y)
    return "sorting by one also sorts the other" if _residual(x, y) <= spread else ""


def _residual(x: Numbers, y: Numbers) -> float:
    one, two = x - x.mean(), y - y.mean()
    scale = float((one**2).sum() * (two**2).sum())
    return float(np.sqrt(max(0.0, 1 - float((one * two).sum()) ** 2 / scale))) if scale else 1.0


def _residual_by_value(x: Numbers, y: Numbers) -> float:
    """Return the relative error of predicting `y` as the mean of the others with the same `x`."""
    _, places, counts = np.unique(x, return_inverse=True, return_counts=True)
    sums, many = np.bincount(places, y - y.mean())[places], counts[places]
    others = np.where(many > 1, (sums - (y - y.mean())) / np.maximum(many - 1, 1), 0.0)
    whole = float(((y - y.mean()) ** 2).sum())
    return float(np.sqrt(((y - y.mean() - others) ** 2).sum() / whole)) if whole else 1.0


def _explain_class(
    x: Numbers, y: Numbers, errors: float, names: Sequence[str], *, is_number: bool
) -> str:
    _, places, counts = np.unique(y, return_inverse=True, return_counts=True)
    weights = 1 / counts[places] / len(counts)
    is_ordered = is_number and len(x) >= _FEWEST_OF_THRESHOLDS
    if is_ordered and (found := _thresholds(x, y, weights, errors, names)):
        return found
    if _errors_by_value(x, y, weights) <= errors:
        return "all examples with the same value have the same class"
    by = _remainder(x, y, weights, errors) if is_ordered else 0
    return f"its remainder modulo {by} determines the class" if by else ""


def _errors_by_value(x: Numbers, y: Numbers, weights: Numbers) -> float:
    _, values, of_value = np.unique(x, return_inverse=True, return_counts=True)
    _, classes = np.unique(y, return_inverse=True)
    # All missing values have the same index, because `np.unique` treats them as equal.
    pairs = values * (int(classes.max()) + 1) + classes
    _, pairs, of_pair = np.unique(pairs, return_inverse=True, return_counts=True)
    most = np.zeros(len(of_value), np.int64)
    np.maximum.at(most, values, of_pair[pairs])
    wrong = (of_value[values] < 2) | (of_pair[pairs] < most[values])  # noqa: PLR2004
    return float(weights[wrong].sum())


def _remainder(x: Numbers, y: Numbers, weights: Numbers, errors: float) -> int:
    """Return a divisor modulo which a row number determines the class, or 0 if there is none."""
    is_whole = bool(np.isfinite(x).all()) and not np.any(x % 1)
    if not is_whole or len(np.unique(x)) < len(x):
        return 0
    able = range(2, _MOST_REMAINDERS + 1)
    return next((by for by in able if _errors_by_value(x % by, y, weights) <= errors), 0)


def _thresholds(
    x: Numbers, y: Numbers, weights: Numbers, errors: float, names: Sequence[str]
) -> str:
    """Describe the first of the thresholds that separate the classes, or return ""."""
    x = np.where(np.isfinite(x), x, -np.inf)
    order = np.lexsort((y, x))
    x, y, weights = x[order], y[order], weights[order]
    kept, left = _drop_small(y, weights, errors)
    if left > errors or np.any((x[kept][1:] == x[kept][:-1]) & (y[kept][1:] != y[kept][:-1])):
        return ""
    x, y = x[kept], y[kept]
    cuts = np.flatnonzero(np.diff(y)) + 1
    ends = np.concatenate([[0], cuts, [len(x)]])
    is_few = 1 <= len(cuts) < _INTERVALS * len(np.unique(y))
    if not is_few or np.min(np.diff(ends)) < _FEWEST_OF_CLASS // 2:
        return ""
    for place, cut in enumerate(cuts.tolist()):
        if _is_cut(x, ends[place : place + 3].tolist()):
            first, second = (names[int(y[at])] for at in (cut - 1, cut))
            if not np.isfinite(x[cut - 1]):
                return f"it is missing if the label is {first!r}"
            return f"{first!r} up to {_format(x[cut - 1])}, {second!r} from {_format(x[cut])}"
    return ""


def _format(value: float) -> str:
    return f"{value:.0f}" if value == round(value) else f"{value:.6g}"


def _drop_small(y: Numbers, weights: Numbers, errors: float) -> tuple[NDArray[np.bool_], float]:
    """Return a mask that drops the smallest intervals, and the weight of the dropped examples."""
    starts = np.concatenate([[0], np.flatnonzero(np.diff(y)) + 1])
    sums = np.add.reduceat(weights, starts)
    order = np.argsort(sums, kind="stable")
    many = int(np.searchsorted(np.cumsum(sums[order]), errors, side="right"))
    kept = np.ones(len(starts), np.bool_)
    kept[order[:many]] = False
    return np.repeat(kept, np.diff([*starts, len(y)])), float(sums[~kept].sum())


def _is_cut(x: Numbers, ends: list[int]) -> bool:
    """Return whether a threshold cuts one distribution in two, or one side is a single value."""
    start, cut, end = ends
    if any(len(each) >= _NEAR and each[0] == each[-1] for each in (x[start:cut], x[cut:end])):
        return True
    there = x[np.isfinite(x)]
    start, cut, end = (max(0, each - len(x) + len(there)) for each in ends)
    half = _NEAR // 2
    width = there[min(cut + half, len(there)) - 1] - there[max(cut - half, 0)]
    step = float(np.min(np.diff(np.unique(there))))
    usual = [
        np.quantile(each[_NEAR::_NEAR] - each[:-_NEAR:_NEAR], _USUAL) + step
        for each in (there[start:cut], there[cut:end])
        if len(each) > _WINDOWS * _NEAR
    ]
    return bool(width <= _VALLEY * max(usual, default=0.0))

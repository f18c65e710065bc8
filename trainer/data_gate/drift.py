"""Rules on drift, and the two-sample tests on stored statistics that rules use.

Comparisons of distributions return an effect size in addition to a p-value, because with many
examples even a tiny difference is significant, and with few examples even a large one is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from flotilla.trainer.data_gate.findings import Finding, Question, percent
from flotilla.trainer.data_gate.profile import FeatureProfile, SplitProfile
from flotilla.trainer.features.statistics.statistics import CLASS, TEXT

# The chi-squared approximation is invalid for smaller expected counts.
_LEAST_EXPECTED = 5.0
Numbers = NDArray[np.float64]


def kolmogorov_smirnov(
    new: Numbers, old: Numbers, sizes: tuple[float, float] = (np.inf, np.inf)
) -> tuple[float, float]:
    """Return the largest distance between two distribution functions, and its p-value.

    Args:
        new: a sorted sample.
        old: another sorted sample.
        sizes: limits of the effective sample sizes, if the numbers are not independent.
    """
    at = np.union1d(new, old)
    distance = float(np.max(np.abs(_cdf(new, at) - _cdf(old, at))))
    first, second = min(len(new), sizes[0]), min(len(old), sizes[1])
    root = np.sqrt(first * second / (first + second))
    # This correction makes the limit distribution accurate for small samples (Stephens, 1970).
    return distance, float(stats.kstwobign.sf((root + 0.12 + 0.11 / root) * distance))


def _cdf(values: Numbers, at: Numbers) -> Numbers:
    return np.searchsorted(values, at, side="right") / len(values)


def exceeds(new: Numbers, old: Numbers) -> float:
    """Return P(new > old) + P(new = old) / 2, which is 1/2 for equal distributions."""
    below = np.searchsorted(old, new, side="left") + np.searchsorted(old, new, side="right")
    return float(np.mean(below) / 2 / len(old))


def homogeneity(
    new: Mapping[str, float],
    old: Mapping[str, float],
    sizes: tuple[float, float] = (np.inf, np.inf),
) -> tuple[float, float]:
    """Return the total variation distance between two tables of counts, and its p-value.

    Values with an expected count below five are merged. `sizes` limits the effective sample sizes.
    """
    names = list({**old, **new})
    table = np.array([[of.get(name, 0) for name in names] for of in (new, old)], dtype=float)
    whole = table.sum(axis=1, keepdims=True)
    if len(names) < 2 or not whole.all():  # noqa: PLR2004
        return 0.0, 1.0
    shares = table / whole
    whole = np.minimum(whole, np.array(sizes)[:, None])
    table = shares * whole
    expected = table.sum(axis=0) * whole.min() / whole.sum()
    rare = expected < _LEAST_EXPECTED
    pooled = np.column_stack([table[:, ~rare], table[:, rare].sum(axis=1)])
    pooled = pooled[:, pooled.sum(axis=0) > 0]
    if pooled.shape[1] < 2:  # noqa: PLR2004
        return 0.0, 1.0
    moved = float(np.abs(shares[0] - shares[1]).sum() / 2)
    return moved, float(stats.chi2_contingency(pooled, correction=False).pvalue)


def fisher_test(part: int, of: int, known: int, whole: int) -> float:
    """Return the one-sided p-value of `part / of` > `known / whole` (Fisher's exact test)."""
    return float(stats.hypergeom.sf(part - 1, of + whole, part + known, of))


def absence_test(count: int, of: int, whole: int) -> float:
    """Return the probability that the first of two samples has all `count` examples by chance."""
    return float(stats.hypergeom.sf(count - 1, of + whole, count, of))


def holm(chances: Mapping[str, float], significance: float) -> set[str]:
    """Return the names of the significant tests, corrected for multiple testing (Holm, 1979)."""
    found = set()
    ordered = sorted(chances.items(), key=lambda each: each[1])
    for place, (name, chance) in enumerate(ordered):
        if chance > significance / (len(ordered) - place):
            break
        found.add(name)
    return found


Pair = tuple[str, FeatureProfile, FeatureProfile]
# Minimum numbers of numeric features and of rows for testing all features together.
_FEWEST = 5
_FEWEST_ROWS = 50
# If a sample has uncounted values, a value is compared only if it occurs at least
# `_FEWEST_EXAMPLES` times, and more than `_TWICE` times as often as the rarest counted value. Then
# it has almost certainly been counted in both samples.
_FEWEST_EXAMPLES, _TWICE = 5, 2


def compare_samples(
    new: FeatureProfile, old: FeatureProfile, sizes: tuple[float, float] = (np.inf, np.inf)
) -> tuple[float, float] | None:
    """Return the effect size and p-value of a difference between two samples of a feature.

    The effect size is the total variation distance for text and classes, and the Kolmogorov-Smirnov
    distance for numbers. For tensors, the means of the examples are compared. `sizes` limits the
    effective sample sizes. Return None if a sample is empty.
    """
    if new.kind in (TEXT, CLASS):
        if not new.counts or not old.counts:
            return None
        # Count examples instead of strings, because strings of one example are not independent.
        present = (min(sizes[0], new.present), min(sizes[1], old.present))
        found, known = _tables(new, old)
        return homogeneity(found, known, present)
    if not len(new.numbers) or not len(old.numbers):
        return None
    return kolmogorov_smirnov(new.numbers, old.numbers, sizes)


def _tables(new: FeatureProfile, old: FeatureProfile) -> Iterator[dict[str, float]]:
    """Yield each sample's counts by value. Values that a sample may not have counted are merged."""
    # Some features have counts of only the most frequent values, which differ between samples.
    least = max(
        (_TWICE * min(each.counts.values()) / max(each.present, 1)
         for each in (new, old) if not each.is_counted),
        default=0.0,
    )  # fmt: skip
    names = {
        name
        for each in (new, old)
        for name, count in each.counts.items()
        if not least or (count >= _FEWEST_EXAMPLES and count / max(each.present, 1) > least)
    }
    for each in (new, old):
        whole = max(each.present, sum(each.counts.values()))
        counts = {name: float(each.counts.get(name, 0)) for name in names}
        # The line feed makes it unlikely that a value has this name.
        yield {**counts, "\nothers": whole - sum(counts.values())}


def compare_features(question: Question) -> Iterator[Finding]:
    """Compare each feature with the same feature of the champion's dataset."""
    champion = question.champion
    pairs = [pair for pair in question.pairs() if _is_tested(question, pair[0])]
    if not champion or not pairs:
        return
    sizes = [question.independent(each, "train", by_inputs=False)
             for each in (question.dataset, champion)]  # fmt: skip
    for name, size, new, old in _find_drifted(pairs, question, (sizes[0], sizes[1])):
        says = (
            f"{name!r} is distributed differently than in the champion's dataset (distance "
            f"{size:.3f}{_describe_change(new, old)}); check what has changed at its source"
        )
        yield Finding("drift", says, name, "train", size, question.limit("drift"))


def compare_splits(question: Question) -> Iterator[Finding]:
    """Compare each feature of the test split with the same feature of the training split.

    The rule is skipped for splits by time, because nearly every distribution changes over time.
    """
    dataset = question.dataset
    train, test = (dataset.features(split) for split in ("train", "test"))
    pairs = [
        (name, test[name], train[name])
        for name in dataset.used
        if name in train and name in test and not question.defines_splits(name)
    ]
    if question.splits.time or not pairs:
        return
    sizes = [question.independent(dataset, split, by_inputs=True) for split in ("test", "train")]
    for name, size, new, old in _find_drifted(pairs, question, (sizes[0], sizes[1])):
        says = (
            f"{name!r} is distributed differently in test than in train (distance "
            f"{size:.3f}{_describe_change(new, old)}), so metrics of the test split do not "
            "represent the training data; check how the test split was drawn (data.splits)"
        )
        yield Finding("splits_differ", says, name, "test", size, question.limit("drift"))


def _is_tested(question: Question, name: str) -> bool:
    dataset = question.dataset
    # Labels with classes are not tested, because the rule `balance` checks their class shares.
    is_class = name in dataset.targets and dataset.specs[name].num_classes
    return not (is_class or question.defines_splits(name) or dataset.grows_by_design(name))


def _find_drifted(
    pairs: Iterable[Pair], question: Question, sizes: tuple[float, float]
) -> Iterator[tuple[str, float, FeatureProfile, FeatureProfile]]:
    found = {name: (compare_samples(new, old, sizes), new, old) for name, new, old in pairs}
    tests = {name: each for name, each in found.items() if each[0] is not None}
    chances = {name: each[0][1] for name, each in tests.items() if each[0]}
    for name in sorted(holm(chances, question.significance), key=lambda each: chances[each]):
        result, new, old = tests[name]
        if result and result[0] >= question.limit("drift"):
            yield name, result[0], new, old


def _describe_change(new: FeatureProfile, old: FeatureProfile) -> str:
    if new.kind in (TEXT, CLASS):
        shares = {
            value: new.counts.get(value, 0) / max(new.present, 1)
            - old.counts.get(value, 0) / max(old.present, 1)
            for value in {**new.counts, **old.counts}
        }
        worst = max(shares, key=lambda value: abs(shares[value]))
        now, before = (of.counts.get(worst, 0) / max(of.present, 1) for of in (new, old))
        return f"; {worst!r} was {percent(before)} and is {percent(now)}"
    return f"; median {np.median(old.numbers):.4g} before and {np.median(new.numbers):.4g} now"


def compare_together(question: Question) -> Iterator[Finding]:
    """Test whether all numeric features together have drifted from the champion's dataset.

    Use the test of Bai and Saranadasa (1996) on ranks. For p features with the rank correlation
    matrix R, the sum of squared Mann-Whitney statistics (scaled to variance 1) has mean p and
    variance 2 tr(R^2). The p-value comes from a gamma distribution with these moments.
    """
    sample = question.dataset.splits["train"].sample if "train" in question.dataset.splits else {}
    pairs = [
        (name, new, old)
        for name, new, old in question.pairs()
        if name in sample and len(new.numbers) and len(old.numbers)
    ]
    rows = min((len(sample[name]) for name, _, _ in pairs), default=0)
    if len(pairs) < _FEWEST or rows < _FEWEST_ROWS:
        return
    lifts = np.array([exceeds(new.numbers, old.numbers) - 0.5 for _, new, old in pairs])
    variances = np.array([(n.present + o.present + 1) / (12 * n.present * o.present)
                          for _, n, o in pairs])  # fmt: skip
    total = float(np.sum(lifts**2 / variances))
    spread = 2 * _squares_of_correlations(question.dataset.splits["train"], pairs)
    chance = stats.gamma.sf(total, len(pairs) ** 2 / spread, scale=spread / len(pairs))
    # Subtract the value that is expected by chance, because it is not an effect.
    size = float(np.sqrt(max(np.mean(lifts**2) - np.mean(variances), 0.0)))
    if chance < question.significance and size >= question.limit("drift_together"):
        order = np.argsort(-np.abs(lifts) / np.sqrt(variances))
        most = ", ".join(pairs[place][0] for place in order[:5])
        says = (
            f"{len(pairs)} features together have drifted more than chance explains, most of all "
            f"{most}; check what has changed at their source"
        )
        limit = question.limit("drift_together")
        yield Finding("drift_together", says, split="train", value=size, limit=limit)


def _squares_of_correlations(split: SplitProfile, pairs: list[Pair]) -> float:
    """Return tr(R^2) of the rank correlations, corrected for sampling noise."""
    columns = np.column_stack([split.sample[name] for name, _, _ in pairs])
    columns = columns[np.isfinite(columns).all(axis=1)]
    width, rows = len(pairs), len(columns)
    ranks = stats.rankdata(columns, axis=0)
    ranks = ranks - ranks.mean(axis=0)
    norms = np.sqrt(np.sum(ranks**2, axis=0))
    ranks = ranks / np.where(norms > 0, norms, 1.0)
    squares = float(np.sum((ranks.T @ ranks) ** 2))
    chance = (width**2 - width) / max(rows - 1, 1)
    return max(squares - chance, float(width))

"""The rule on leaks: find inputs that determine a label. Legitimate inputs hardly ever do this.

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

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from flotilla.trainer.data_gate.findings import Finding, Question, advise_dropping
from flotilla.trainer.data_gate.profile import DatasetProfile
from flotilla.trainer.features.statistics.statistics import CLASS, NUMBER, TEXT

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
    columns = [sample[key][there][usual] for key in sample if _is_same_feature(key, name)]
    is_tight = any(_is_tight(column, y[usual], limit) for column in columns)
    return "the values of each class are close together" if is_tight else ""


def _is_same_feature(column: str, name: str) -> bool:
    return column.removeprefix(name) in ("", "/std", *(f"/{place}" for place in range(4)))


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
    x: Numbers,
    y: Numbers,
    weights: Numbers,
    errors: float,
    names: Sequence[str],
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

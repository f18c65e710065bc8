"""Accumulators for an evaluation or a slice, one for each kind of task.

The metrics agree with scikit-learn in double precision. `result` returns `metrics` and `intervals`,
and for some tasks also `per_class`, `confusion_matrix` and `calibration`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy import special

from flotilla.trainer.tasks import intervals, metrics
from flotilla.trainer.tasks.areas import Scores
from flotilla.trainer.tasks.base import Array, Floats, Part, Tally, example_weights
from flotilla.trainer.tasks.intervals import Calibration, Groups, Moments

Doubles = npt.NDArray[np.float64]
_TWO = 2


class BinaryTally(Tally):
    """Metrics of a task with binary labels and one logit per example."""

    def __init__(self, decided: Callable[[Array], Array]) -> None:
        """Create an empty accumulator. `decided` returns which outputs are predicted positive."""
        self._decided = decided
        # Sums of weights and of squared weights, by label and prediction.
        self._cells = np.zeros((_TWO, _TWO, _TWO))
        self._means, self._calibration, self._scores = Moments(), Calibration(), Scores()
        self.inner = (self._scores,)

    def add(self, part: Part) -> None:
        """Add the examples of a part."""
        weights, yes = example_weights(part), part.labels.astype(bool).ravel()
        cell = yes * _TWO + self._decided(part.outputs)
        self._cells += [np.bincount(cell, w, _TWO**2).reshape(_TWO, _TWO) for w in _both(weights)]
        logits = part.outputs[:, 0].astype(np.float64)
        towards, small = np.where(yes, logits, -logits), np.exp(-np.abs(logits))
        loss, left = np.log1p(small), np.where(towards > 0, small, 1) / (1 + small)
        losses = loss + np.maximum(-towards, 0), loss + np.maximum(towards, 0)
        self._means.add(np.stack([*losses, left**2, (1 - left) ** 2]), weights)
        self._calibration.add(yes, np.where(yes, 1 - left, left), weights)
        self._scores.add(yes[:, np.newaxis], part.outputs[:, :1], weights)

    def result(self) -> dict[str, Any]:
        """Return all metrics and their intervals."""
        (loss, other, brier, furthest), errors = self._means.result()
        areas, count = self._scores.result(), self._means.count
        found, ends = _measure_cells(self._cells)
        metrics_of_losses = {
            "log_loss": loss,
            "brier_score": brier,
            "calibration_error": self._calibration.error(),
        }
        log_loss = intervals.above_zero(loss, errors[0], count, other)
        score = intervals.above_zero(brier, errors[2], count, furthest)
        more = {
            "log_loss": log_loss,
            "loss": log_loss,
            "brier_score": score and [score[0], min(score[1], 1.0)],
            "calibration_error": self._calibration.interval(),
        }
        return {
            "metrics": {"loss": loss, **found, **areas.metrics(), **metrics_of_losses},
            "intervals": {**ends, **areas.intervals(), **_drop_undefined(more)},
            "confusion_matrix": metrics.plain_rows(self._cells[0]),
            "calibration": self._calibration.curve(),
        }


def _measure_cells(cells: Doubles) -> tuple[dict[str, float], dict[str, intervals.Interval]]:
    """Return accuracy, precision, recall and F1 of the positive class, and their intervals."""
    (right, all_of), (hits, taken) = (
        (cells[:, 0, 0] + cells[:, 1, 1], cells.sum(axis=(1, 2))),
        (cells[:, 1, 1], cells[:, :, 1].sum(axis=1)),
    )
    true = cells[:, 1].sum(axis=1)
    # F1 is an increasing function of the fraction of hits among all examples that are positive or
    # predicted positive. Compute its interval from that fraction.
    parts = {
        "accuracy": (right, all_of),
        "precision": (hits, taken),
        "recall": (hits, true),
        "f1": (hits, true + taken - hits),
    }
    found, ends = {}, {}
    for name, (part, whole) in parts.items():
        found[name] = _share(part[0], whole[0])
        ends[name] = intervals.share_interval(found[name], float(intervals.kish(*whole)))
    found["f1"], ends["f1"] = _f1(found["f1"]), [_f1(each) for each in ends["f1"]]
    return found, ends


def _share(part: float, whole: float) -> float:
    return float(part / whole) if whole > 0 else 0.0


def _f1(jaccard: Any) -> Any:
    return 2 * jaccard / (1 + jaccard)


class ClassTally(Tally):
    """Metrics of a task with one class per example and one logit per class."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        """Create an empty accumulator. `labels` are the class names."""
        self._labels, count = labels, len(labels)
        # Sums of weights and of squared weights, for hits, labels and predictions, by class.
        self._counts = np.zeros((2, 3, count))
        self._means, self._calibration = Moments(), Calibration()
        self._scores = Scores(count, metrics.log_softmax)
        self.inner = (self._scores,)

    def add(self, part: Part) -> None:
        """Add the examples of a part."""
        labels, weights = part.labels.astype(np.int64).ravel(), example_weights(part)
        chances = metrics.log_softmax(part.outputs)
        guess, classes = part.outputs.argmax(axis=1), len(self._labels)
        right = guess == labels
        own = -chances[np.arange(len(labels)), labels]
        others = (-chances.sum(axis=1) - own) / max(classes - 1, 1)
        top = metrics.is_in_top(labels, part.outputs)
        self._means.add(np.stack([own, others, right, top]), weights)
        for at, each in enumerate(_both(weights)):
            groups = ((labels[right], each[right]), (labels, each), (guess, each))
            self._counts[at] += [np.bincount(of, some, classes) for of, some in groups]
        self._calibration.add(right, np.exp(chances.max(axis=1)), weights)
        self._scores.add(labels, part.outputs, weights)

    def result(self) -> dict[str, Any]:
        """Return all metrics, overall and by class."""
        (loss, others, accuracy, top), errors = self._means.result()
        count, areas = self._means.count, self._scores.result()
        log_loss = intervals.above_zero(loss, errors[0], count, others)
        shares = {"accuracy": accuracy}
        if len(self._labels) > metrics.TOP:
            shares[metrics.TOP_NAME] = top
        ends = {
            "log_loss": log_loss,
            "loss": log_loss,
            **{name: intervals.share_interval(share, count) for name, share in shares.items()},
            **intervals_of_averages(self._counts),
            **areas.intervals("macro_"),
            "calibration_error": self._calibration.interval(),
        }
        right, true, taken = self._counts[0]
        return {
            "metrics": {
                "loss": loss,
                **shares,
                **metrics.averages(right, true, taken),
                **areas.metrics("macro_"),
                "log_loss": loss,
                "calibration_error": self._calibration.error(),
            },
            "intervals": _drop_undefined(ends),
            "per_class": metrics.per_class((right, true, taken), areas.each, self._labels),
            "calibration": self._calibration.curve(),
        }


def intervals_of_averages(counts: Doubles) -> dict[str, intervals.Interval]:
    """Return the intervals of averages over classes.

    `counts` [2, 3, classes] are sums of weights and of squared weights, for hits, labels and
    predictions. The variance of an average determines the effective sample size in Wilson's method
    (Kott and Carr 1997). F1 has a larger variance, because one error lowers the F1 of two classes.
    """
    some = counts[:, :, (counts[0, 1] + counts[0, 2]) > 0]
    right, true, taken = some.transpose(1, 0, 2)
    found = {}
    often = true[0] / true[0].sum()
    weigh = {"macro": np.full(len(often), 1 / len(often)), "weighted": often}
    for name, whole in (("precision", taken), ("recall", true), ("f1", true + taken - right)):
        count, shares = intervals.kish(*whole), _divide(right[0], whole[0])
        # A class without errors in the sample may have errors elsewhere, so its variance must not
        # be zero.
        smooth = np.where(count > 0, intervals.middle(shares, count), 0)
        variance = _divide(smooth * (1 - smooth), count)
        if name == "f1":
            # F1 is a function of the fraction of hits among all examples whose label or prediction
            # is the class. The squared derivative of this function scales the variance.
            variance *= (1 + shares) * (2 / (1 + smooth) ** 2) ** 2
            shares, smooth = _f1(shares), _f1(smooth)
        for average, each in weigh.items():
            mean, near = float(each @ shares), float(each @ smooth)
            total = each**2 @ variance
            if average == "weighted":
                # Add the variance of the weights, which are class frequencies in the sample.
                total += each @ (shares - mean) ** 2 / max(intervals.kish(*true.sum(axis=1)), 1)
            effective = near * (1 - near) / total if total > 0 else 0.0
            low, high = intervals.share_interval(mean, effective)
            # The precision of a class without predictions is unknown. For the upper end, assume 1.
            found[f"{average}_{name}"] = [low, min(high + float(each @ (count == 0)), 1.0)]
    return {name: found[name] for name in metrics.AVERAGES}


class _GroupTally(Tally):
    """Metrics that are functions of sums over examples, and the mean loss."""

    def __init__(self, labels: tuple[str, ...], size: int) -> None:
        self._labels, self._groups, self._loss = labels, Groups(size), Moments()

    def _add(self, rows: Any, losses: Floats, weights: Floats) -> None:
        self._groups.add(rows * weights[:, np.newaxis])
        self._loss.add(losses[np.newaxis], weights)

    def _measure(
        self, names: tuple[str, ...], function: Callable[[Doubles], Doubles]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the metrics that `function` computes from the sums, the loss, and intervals."""
        values, errors = function(self._groups.total).tolist(), self._groups.errors(function)
        (loss,), (error,), count = *self._loss.result(), self._loss.count
        ends: dict[str, Any] = {
            name: intervals.metric_interval(value, spread, count)
            for name, value, spread in zip(names, values, errors, strict=True)
        }
        ends["loss"] = intervals.above_zero(loss, error, count)
        return {"loss": loss, **dict(zip(names, values, strict=True))}, ends


class MultilabelTally(_GroupTally):
    """Metrics of a task with any number of classes per example and one logit per class."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        """Create an empty accumulator. `labels` are the class names."""
        super().__init__(labels, 3 + 3 * len(labels))
        self._scores, self._calibration = Scores(len(labels)), Calibration()
        self.inner = (self._scores,)

    def add(self, part: Part) -> None:
        """Add the examples of a part."""
        weights, true = example_weights(part), part.labels.astype(bool)
        logits = part.outputs.astype(np.float64)
        taken = logits > 0
        same = true == taken
        shares = [np.ones(len(weights)), same.all(axis=1), same.mean(axis=1)]
        rows = np.concatenate([np.stack(shares, axis=1), true & taken, true, taken], axis=1)
        each = np.repeat(weights, len(self._labels))
        self._calibration.add(true.ravel(), special.expit(logits).ravel(), each)
        self._scores.add(true, part.outputs, weights)
        self._add(rows, np.logaddexp(0, np.where(true, -logits, logits)).mean(axis=1), weights)

    def result(self) -> dict[str, Any]:
        """Return all metrics, overall and by class."""
        areas, (found, ends) = self._scores.result(), self._measure(_OF_LABELS, _measure_labels)
        right, true, taken = self._groups.total[3:].reshape(3, -1)
        ends |= areas.intervals("macro_")
        ends["calibration_error"] = self._calibration.interval()
        return {
            "metrics": {
                **found,
                **areas.metrics("macro_"),
                "calibration_error": self._calibration.error(),
            },
            "intervals": _drop_undefined(ends),
            "per_class": metrics.per_class((right, true, taken), areas.each, self._labels),
        }


_MICRO = ("micro_precision", "micro_recall", "micro_f1")
_OF_LABELS = ("binary_accuracy", "subset_accuracy", *_MICRO, "macro_f1")


def _measure_labels(sums: Doubles) -> Doubles:
    """Compute the metrics [..., metrics] of a `MultilabelTally` from its sums [..., numbers]."""
    weight, all_right, right = np.moveaxis(sums[..., :3], -1, 0)
    counts = sums[..., 3:].reshape(*sums.shape[:-1], 3, -1)
    hits, true, taken = counts.sum(axis=-1).transpose(-1, *range(sums.ndim - 1))
    each = _divide(2 * counts[..., 0, :], counts[..., 1, :] + counts[..., 2, :])
    micro = (_divide(hits, taken), _divide(hits, true), _divide(2 * hits, true + taken))
    shares = (_divide(right, weight), _divide(all_right, weight))
    return np.stack([*shares, *micro, each.mean(axis=-1)], axis=-1)


def _divide(part: Any, whole: Any) -> Any:
    return np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


class PositionTally(_GroupTally):
    """Metrics of positions, with one logit per class. Positions with labels below 0 are ignored."""

    def __init__(self, labels: tuple[str, ...]) -> None:
        """Create an empty accumulator. `labels` are the class names."""
        super().__init__(labels, 2 + 3 * len(labels))
        self._matrix = np.zeros((len(labels), len(labels)))

    def add(self, part: Part) -> None:
        """Add the examples of a part."""
        weights, classes = example_weights(part), len(self._labels)
        true = part.labels.astype(np.int64).reshape(len(weights), -1)
        taken = part.outputs.argmax(axis=-1).reshape(true.shape)
        known = true >= 0
        example = np.arange(len(weights))[:, np.newaxis] * classes
        cells = [
            np.bincount((example + found)[where], minlength=len(weights) * classes)
            for found, where in ((true, known & (true == taken)), (true, known), (taken, known))
        ]
        rows = np.stack(cells).reshape(3, len(weights), classes).transpose(1, 0, 2)
        all_right = ((true == taken) | ~known).all(axis=1)
        ones = np.stack([np.ones(len(weights)), all_right], axis=1)
        rows = np.concatenate([ones, rows.reshape(len(weights), -1)], axis=1)
        each = np.broadcast_to(weights[:, np.newaxis], true.shape)[known]
        self._matrix += metrics.confusion(true[known], taken[known], classes, each)
        chances = metrics.log_softmax(part.outputs.reshape(-1, classes))
        own = -chances[np.arange(len(chances)), np.maximum(true, 0).ravel()].reshape(true.shape)
        self._add(rows, (own * known).sum(axis=1) / np.maximum(known.sum(axis=1), 1), weights)

    def result(self) -> dict[str, Any]:
        """Return all metrics, overall and by class."""
        names = ("accuracy", "macro_f1", "example_accuracy")
        found, ends = self._measure(names, _measure_places)
        if not self._matrix.any():
            undefined = dict.fromkeys(("accuracy", "macro_f1"))
            found, ends = found | undefined, ends | undefined
        no_areas = [metrics.NO_AREA] * len(self._labels)
        counts = metrics.count_by_class(self._matrix)
        return {
            "metrics": found,
            "intervals": _drop_undefined(ends),
            "per_class": metrics.per_class(counts, no_areas, self._labels),
            "confusion_matrix": metrics.plain_rows(self._matrix),
        }


def _measure_places(sums: Doubles) -> Doubles:
    """Compute the metrics [..., metrics] of a `PositionTally` from its sums [..., numbers]."""
    right, true, taken = np.moveaxis(sums[..., 2:].reshape(*sums.shape[:-1], 3, -1), -2, 0)
    f1, occurs = _divide(2 * right, true + taken), (true + taken) > 0
    macro = _divide(f1.sum(axis=-1), occurs.sum(axis=-1).astype(float))
    accuracy = _divide(right.sum(axis=-1), true.sum(axis=-1))
    return np.stack([accuracy, macro, _divide(sums[..., 1], sums[..., 0])], axis=-1)


class RegressionTally(Tally):
    """Metrics of numeric predictions. `scale` converts label units to the units of the loss."""

    def __init__(self, numbers: int, scale: float, predicted: Callable[[Floats], Floats]) -> None:
        """Create an empty accumulator. `predicted` converts outputs to the label's units."""
        self._predicted, self._scale, self._near = predicted, scale, np.zeros(0)
        self._means, self._groups = Moments(), Groups(1 + 3 * numbers)

    def add(self, part: Part) -> None:
        """Add the examples of a part."""
        weights = example_weights(part)
        true, outputs = (
            np.asarray(each).reshape(len(weights), -1).astype(np.float64)
            for each in (part.labels, part.outputs)
        )
        away = self._predicted(outputs) - true
        if not len(self._near):
            # Center the values, because squares of values far from 0 lose precision.
            self._near = true.mean(axis=0)
        centred = true - self._near
        self._means.add(np.stack([np.abs(away).mean(axis=1), (away**2).mean(axis=1)]), weights)
        ones = np.ones((len(weights), 1))
        rows = np.concatenate([ones, centred, centred**2, away**2], axis=1)
        self._groups.add(rows * weights[:, np.newaxis])

    def result(self) -> dict[str, Any]:
        """Return all metrics and their intervals."""
        (absolute, squared), errors = self._means.result()
        count, explained = self._means.count, float(_compute_r2(self._groups.total)[0])
        ends = {
            "mean_absolute_error": intervals.above_zero(absolute, errors[0], count),
            "mean_squared_error": intervals.above_zero(squared, errors[1], count),
            "r2_score": intervals.below_one(explained, self._groups.errors(_compute_r2)[0], count),
        }
        if of_squares := ends["mean_squared_error"]:
            ends["root_mean_squared_error"] = [each**0.5 for each in of_squares]
            ends["loss"] = [each * self._scale**2 for each in of_squares]
        return {
            "metrics": {
                "loss": squared * self._scale**2,
                "mean_absolute_error": absolute,
                "mean_squared_error": squared,
                "root_mean_squared_error": squared**0.5,
                "r2_score": explained,
            },
            "intervals": _drop_undefined(ends),
        }


def _compute_r2(sums: Doubles) -> Doubles:
    """Return R2 [..., 1], averaged over the numbers of an example, from sums [..., numbers].

    If all labels are equal, R2 is 1 for exact predictions and 0 otherwise, as in scikit-learn.
    """
    weight = sums[..., :1]
    total, squares, residual = np.split(sums[..., 1:], 3, axis=-1)
    variance = squares - total**2 / np.maximum(weight, 1e-300)
    # Ignore a tiny variance: if all labels are equal, it is only a rounding error.
    varies = variance > 1e-14 * squares
    each = np.where(varies, 1 - _divide(residual, variance), np.where(residual > 0, 0.0, 1.0))
    found: Doubles = each.mean(axis=-1, keepdims=True)
    return found


def _both(weights: Floats) -> tuple[Floats, Floats]:
    return weights, weights**2


def _drop_undefined(ends: dict[str, Any]) -> dict[str, intervals.Interval]:
    return {name: each for name, each in ends.items() if each is not None}

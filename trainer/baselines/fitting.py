"""Gradient boosting and linear models, fitted within a time limit.

All models except ridge regression are fitted in slices of iterations. The speed of a slice sets the
size of the next one. Each model uses one thread, because OpenMP threads wait for each other in busy
loops. On a shared machine, two threads can take a hundred times as long as one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from flotilla.trainer.baselines.columns import Columns, Matrix
from flotilla.trainer.baselines.rows import Clock, NoBaselineError, Rows
from flotilla.trainer.tasks.base import Array, Floats, Task
from flotilla.trainer.tasks.binary_classification import BinaryClassification
from flotilla.trainer.tasks.classification import Classification
from flotilla.trainer.tasks.multilabel_classification import MultilabelClassification
from flotilla.trainer.tasks.regression import Regression

# Maximum numbers of boosting iterations (scikit-learn's default) and of trees.
_MOST_ITERATIONS, _MOST_TREES = 100, 600
_MOST_SOLVED = 300
_FIRST = 5
# With at least this many rows, trees may have scikit-learn's default number of leaves, and training
# may stop early.
_MANY_ROWS, _LEAVES = 2000, 31
# Share of the remaining time that the next slice may take.
_SAFE = 0.7
# Minimum probability of a class, even if the class does not occur in the training rows.
_LEAST = 1e-6
#: Maximum number of values that a task predicts. Each value needs a separate model.
MOST_NUMBERS = 32
Answer = Callable[[Rows, Clock], Any]


class Label(NamedTuple):
    """A target: its values [n], either numbers or class indices, and the weights [n]."""

    values: Array
    weights: Floats | None
    is_class: bool


class Kind(NamedTuple):
    """A kind of model: two functions that build its matrices, and one that fits it.

    `known` builds the matrix of the training rows, or of some of them if time is short. `matrix`
    builds the matrix of other rows.
    """

    known: Callable[[Rows, Clock], Matrix]
    matrix: Callable[[Rows, Clock], Matrix]
    fit: Callable[[Matrix, Label, Clock], Any]


def boosting(columns: Columns) -> Kind:
    """Return the `Kind` of gradient boosting. It supports categories and missing numbers."""

    def fit_within(x: Matrix, of: Label, clock: Clock) -> Any:
        from sklearn import ensemble  # noqa: PLC0415

        classes, counts = np.unique(of.values, return_counts=True) if of.is_class else ((), ())
        kind = "Classifier" if of.is_class else "Regressor"
        per_iteration = len(classes) if len(classes) > 2 else 1  # noqa: PLR2004
        most = max(_FIRST, min(_MOST_ITERATIONS, _MOST_TREES // per_iteration))
        is_large = len(x) >= _MANY_ROWS
        model = getattr(ensemble, f"HistGradientBoosting{kind}")(
            warm_start=True,
            random_state=0,
            categorical_features=columns.are_categories(x.shape[1]),
            max_bins=columns.bins,
            max_leaf_nodes=_LEAVES if is_large and columns.is_narrow else _LEAVES // 2,
            # Early stopping holds out some rows. Both sets of rows need examples of each class.
            early_stopping=is_large and min(counts, default=_FIRST) >= _FIRST,
        )

        def fit(iterations: int) -> bool:
            model.set_params(max_iter=iterations).fit(x, of.values, of.weights)
            return bool(model.n_iter_ < iterations)

        _fit_slices(fit, most, clock)
        return model

    return Kind(columns.learn_trees, columns.trees, fit_within)


def linear(columns: Columns) -> Kind:
    """Return the `Kind` of linear models: logistic regression for classes, ridge for numbers."""

    def fit_within(x: Matrix, of: Label, clock: Clock) -> Any:
        from sklearn import linear_model  # noqa: PLC0415

        if not of.is_class:
            clock.check()
            model = linear_model.Ridge(solver="lsqr", max_iter=100)
            return model.fit(x, of.values, of.weights)
        model = linear_model.LogisticRegression(warm_start=True)
        done = 0

        def fit(iterations: int) -> bool:
            nonlocal done
            model.set_params(max_iter=iterations - done).fit(x, of.values, of.weights)
            is_done, done = int(np.max(model.n_iter_)) < iterations - done, iterations
            return is_done

        _fit_slices(fit, _MOST_SOLVED, clock)
        return model

    return Kind(columns.learn_linear, columns.linear, fit_within)


def _fit_slices(fit: Callable[[int], bool], most: int, clock: Clock) -> None:
    """Call `fit` with increasing numbers of iterations until it converges or time runs out."""
    clock.check()
    done, size = 0, min(_FIRST, most)
    while done < most and size > 0:
        began = time.monotonic()
        if fit(done + size):
            return
        done += size
        each = (time.monotonic() - began) / size
        size = min(most - done, int(clock.left * _SAFE / max(each, 1e-6)))


def count_labels(task: Task) -> int:
    """Return the number of models that a task needs, one for each predicted value.

    Raises:
        NoBaselineError: no baseline supports this task.
    """
    if not type(task).__module__.startswith("flotilla.trainer.tasks."):
        raise NoBaselineError("baselines do not support custom tasks")
    if "" not in task.parts:
        return sum(count_labels(part) for part in task.parts.values())
    if isinstance(task, MultilabelClassification | Regression):
        return int(np.prod(task.output_shape))
    if isinstance(task, BinaryClassification) or (
        isinstance(task, Classification) and not task.target.shape
    ):
        return 1
    raise NoBaselineError(f"no baseline supports the task {task.name}")


def count_classes(task: Task) -> int:
    """Return the largest number of classes of any label. It determines the cost of fitting."""
    if "" not in task.parts:
        return max(count_classes(part) for part in task.parts.values())
    return task.num_classes if isinstance(task, Classification) else 1


def fit_outputs(kind: Kind, task: Task, rows: Rows, clock: Clock) -> tuple[Answer, int]:
    """Fit a task's models. Return a function that predicts rows, and the training row count."""
    x = kind.known(rows, clock)
    count = x.shape[0]
    weights = rows.weights[:count]
    equal = bool((weights == weights[0]).all())
    left = count_labels(task)

    def one(values: Array, *, is_class: bool) -> Any:
        nonlocal left
        found = kind.fit(
            x, Label(values[:count], None if equal else weights, is_class), clock.share(1 / left)
        )
        left -= 1
        return found

    answer = _fit_labels(task, rows.labels, one)
    return lambda further, until: answer(kind.matrix(further, until)), count


def _fit_labels(task: Task, labels: Any, one: Callable[..., Any]) -> Callable[[Matrix], Any]:
    """Fit all labels of a task, and return a function from a matrix to the task's outputs."""
    if "" not in task.parts:
        answers: Mapping[str, Any] = {
            name: _fit_labels(part, labels[name], one) for name, part in task.parts.items()
        }
        return lambda x: {name: each(x) for name, each in answers.items()}
    if isinstance(task, Regression):
        flat = labels.reshape(len(labels), -1).astype(np.float64)
        means, stds = flat.mean(axis=0), flat.std(axis=0)
        stds = np.where(stds > 0, stds, 1.0)
        models = [one(each, is_class=False) for each in ((flat - means) / stds).T]
        shape = (-1, *task.target.shape)

        def numbers(x: Matrix) -> Any:
            found = np.column_stack([each.predict(x) for each in models]) * stds + means
            return task.outputs_of({"prediction": found.reshape(shape)}).astype(np.float32)

        return numbers
    if isinstance(task, Classification):
        model = one(labels.astype(np.int64), is_class=True)
        return lambda x: _logits(model, x, task.num_classes)
    columns = labels.reshape(len(labels), -1).astype(np.int64).T
    yes_or_no = [one(each, is_class=True) for each in columns]
    return lambda x: np.column_stack([_log_odds(each, x) for each in yes_or_no])


def _logits(model: Any, x: Matrix, classes: int) -> Floats:
    found = np.zeros((x.shape[0], classes))
    found[:, model.classes_] = model.predict_proba(x)
    logits: Floats = np.log(found.clip(_LEAST, 1)).astype(np.float32)
    return logits


def _log_odds(model: Any, x: Matrix) -> Floats:
    p = _logits(model, x, 2).astype(np.float64)
    odds: Floats = (p[:, 1] - p[:, 0]).astype(np.float32)
    return odds

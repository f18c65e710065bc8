"""Selects the baselines of a task, fits them within seconds, and predicts the test examples.

The kinds of inputs, or the task, determine the baselines:

    numbers, classes    gradient boosting, and a linear model
    text                a linear model of TF-IDF features
    recommendation      popularity, and item-item similarity

A baseline is fitted to at most `MOST_ROWS` random training examples (recommenders: `_MOST_PAIRS`).
To limit the memory to about 1 GB, this number is lower for text, many columns or many classes. A
clock, which is checked between slices of the work, limits the time. A baseline that fails does not
fail the evaluation. It is reported as skipped, with the reason.

Classifiers and gradient boosting are fitted in slices of iterations. The speed of a slice sets the
size of the next one. Each model uses one thread, because OpenMP threads wait for each other in busy
loops. On a shared machine, two threads can take a hundred times as long as one.

Popularity recommends the most frequently taken items to every user. Item-item scores an item by the
sum of its cosine similarities to the items that the user took (Sarwar et al. 2001, "Item-based
collaborative filtering"). The similarities come from a truncated SVD (Cremonesi et al. 2010,
"PureSVD").
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from scipy import sparse
from threadpoolctl import threadpool_limits

from flotilla.trainer.baselines.rows import (
    MOST_TEXTS,
    Clock,
    Columns,
    Matrix,
    NoBaselineError,
    Rows,
    Splits,
    batches,
    training_rows,
    usable,
    width,
)
from flotilla.trainer.data.read import stage_shards
from flotilla.trainer.events.progress import Work
from flotilla.trainer.runtime import user_code
from flotilla.trainer.tasks.base import Array, Floats, Task
from flotilla.trainer.tasks.classification import (
    BinaryClassification,
    Classification,
    MultilabelClassification,
)
from flotilla.trainer.tasks.recommendation import Recommendation
from flotilla.trainer.tasks.regression import Regression

#: Time limit for fitting all baselines and predicting with them, in seconds.
SECONDS = 20.0
# Share of the remaining time for fitting. The rest is for predicting.
_SHARE = 0.8
TRAIN, VALIDATION, TEST = "train", "validation", "test"
#: Maximum number of test examples, and of training examples except for recommendations.
MOST_ROWS = 100_000
_NAMED = 3
# For classification and regression: the suffix of scikit-learn's tree classes, and the name of its
# linear model.
_TREES, _LINES = ("Classifier", "Regressor"), ("LogisticRegression", "Ridge")
# Maximum product of columns, rows and trees in a boosting iteration (about 0.1 s on one core).
_MOST_VALUES = 8_000_000
_FEWEST_ROWS = 1000
# Maximum numbers of training examples for recommendations, and of output values (64 MB).
_MOST_PAIRS, _MOST_OUTPUTS = 1_000_000, 1 << 24


class Answers(NamedTuple):
    """Outputs of a baseline for some examples, with their labels and weights."""

    labels: Any
    outputs: Any
    weights: Floats


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A baseline, the number of rows that it was fitted to, and the time it took in seconds.

    If the baseline was skipped, `skipped` is the reason. `outputs` are the outputs for the first
    test examples, in the output format of the task. `validation` has the outputs for validation
    examples, if a decision threshold must be chosen.
    """

    name: str
    made_by: str = ""
    rows: int = 0
    of_rows: int = 0
    seconds: float = 0.0
    outputs: Any = None
    validation: Answers | None = None
    skipped: str = ""


def fit_baselines(task: Task, splits: Splits, seconds: float = SECONDS) -> list[Baseline]:
    """Fit the baselines of a task to training examples, and predict the test examples."""
    # Import scikit-learn first, because thread limits do not apply to libraries loaded later.
    from sklearn import ensemble, linear_model  # noqa: F401, PLC0415

    clock = Clock(seconds)
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        try:
            chosen = _choose(task, splits, clock)
        # An error in a baseline must not fail the evaluation of a model that trained for hours.
        except Exception as error:
            return [Baseline(name="baseline", skipped=_why(error))]
        shares = [_SHARE / count for count in range(len(chosen.ways), 0, -1)]
        made = []
        with Work("fitting the baselines", "baselines", len(chosen.ways)) as work:
            for way, share in zip(chosen.ways, shares, strict=True):
                work.say(way.name)
                made.append(_fit(way, chosen, splits, clock, share))
                work.add(1)
        return made


@dataclass(frozen=True, kw_only=True)
class _Way:
    name: str
    made_by: str
    fit: Callable[[Clock], tuple[Answer, int]]


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, NoBaselineError) else user_code.format_error(error)


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The baselines of a task, their features, and the number of rows to predict.

    `decides` indicates whether the baselines need a decision threshold.
    """

    ways: Sequence[_Way]
    names: Sequence[str]
    answered: int
    decides: bool


def _choose(task: Task, splits: Splits, clock: Clock) -> _Chosen:
    spec = splits.spec
    if isinstance(task, Recommendation):
        rows = training_rows(splits, task.columns, _MOST_PAIRS, clock)
        most = min(MOST_ROWS, _MOST_OUTPUTS // (1 + 2 * FACTORS))
        made_by = {
            popularity: ("popularity", "counts of the training examples"),
            item_item: ("item-item", "SciPy svds of item cosine similarities"),
        }
        ways = [
            _Way(name=name, made_by=by, fit=partial(fit, task, rows))
            for fit, (name, by) in made_by.items()
        ]
        return _Chosen(ways=ways, names=task.columns, answered=most, decides=True)
    if (count := count_labels(task)) > MOST_NUMBERS:
        raise NoBaselineError(
            f"the task predicts {count} values, but baselines support at most {MOST_NUMBERS}"
        )
    names = usable(spec)
    if not names:
        raise NoBaselineError("none of the inputs is a number, a class or a string")
    classes = count_classes(task)
    wanted = _MOST_VALUES // (width(spec, names) * classes)
    rows = training_rows(splits, names, max(_FEWEST_ROWS, min(MOST_ROWS, wanted)), clock)
    known = Columns(spec, rows, classes)
    most = MOST_TEXTS if known.texts else MOST_ROWS
    without = [name for name in spec.inputs if name not in names]
    return _Chosen(
        ways=_list_tabular(task, known, rows, without),
        names=names,
        answered=min(most, _MOST_OUTPUTS // max(classes, count)),
        decides=any(part.positive_by for part in task.parts.values()),
    )


def _list_tabular(task: Task, known: Columns, rows: Rows, without: Sequence[str]) -> list[_Way]:
    numbers = {isinstance(part, Regression) for part in task.parts.values()}
    trees = " and ".join(f"HistGradientBoosting{_TREES[each]}" for each in sorted(numbers))
    line = " and ".join(_LINES[each] for each in sorted(numbers))
    name = "linear" if known.plain else "TF-IDF, linear"
    kinds = [(name, f"{line} on TF-IDF features" if known.texts else line, linear, without)]
    if known.plain:
        kinds.append(("gradient boosting", trees, boosting, [*without, *known.texts]))
    ways = []
    for name, by, kind, out in kinds:
        more = f" and {len(out) - _NAMED} more" if len(out) > _NAMED else ""
        omitted = f", without {', '.join(out[:_NAMED])}{more}" if out else ""
        fit = partial(fit_outputs, kind(known), task, rows)
        ways.append(_Way(name=name, made_by=f"scikit-learn {by}{omitted}", fit=fit))
    return ways


def _fit(way: _Way, chosen: _Chosen, splits: Splits, clock: Clock, share: float) -> Baseline:
    made = Baseline(name=way.name, made_by=way.made_by, of_rows=splits.spec.examples(TRAIN))
    began = time.monotonic()
    try:
        answer, rows = way.fit(clock.share(share))
        validation = None
        if chosen.decides and splits.spec.examples(VALIDATION):
            validation = _answers(answer, splits, VALIDATION, chosen, clock)
        outputs = _answers(answer, splits, TEST, chosen, clock).outputs
    except Exception as error:
        return replace(made, skipped=_why(error))
    seconds = time.monotonic() - began
    return replace(made, rows=rows, seconds=seconds, outputs=outputs, validation=validation)


def _answers(answer: Answer, splits: Splits, split: str, chosen: _Chosen, clock: Clock) -> Answers:
    """Predict the first examples of a split. They are a random sample of the split."""
    drawn = np.arange(splits.spec.examples(split)) < chosen.answered
    files = stage_shards(splits.uri, splits.scratch / split, split)
    found = []
    for rows in batches(splits.spec, files, chosen.names, drawn):
        clock.check()
        found.append(Answers(rows.labels, answer(rows, clock), rows.weights))
    return Answers(*tf.nest.map_structure(lambda *each: np.concatenate(each), *found))


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
    return lambda x: np.column_stack([_margins(each, x) for each in yes_or_no])


def _logits(model: Any, x: Matrix, classes: int) -> Floats:
    found = np.zeros((x.shape[0], classes))
    found[:, model.classes_] = model.predict_proba(x)
    logits: Floats = np.log(found.clip(_LEAST, 1)).astype(np.float32)
    return logits


def _margins(model: Any, x: Matrix) -> Floats:
    p = _logits(model, x, 2).astype(np.float64)
    odds: Floats = (p[:, 1] - p[:, 0]).astype(np.float32)
    return odds


# Number of dimensions of an item vector.
FACTORS = 64
_FEWEST_FACTORS = 2
# Number of pseudo-examples per item for smoothing. They have the mean positive rate of all items.
_PRIOR = 10.0


class _Taken:
    def __init__(self, task: Recommendation, rows: Rows) -> None:
        self._columns = task.columns
        taken = rows.labels.astype(bool).reshape(-1)
        self.taken, self.weights = taken, rows.weights
        (self.users, self.user), (self.items, self.item) = (
            np.unique(rows.columns[name], return_inverse=True) for name in task.columns
        )
        offered = np.bincount(self.item, self.weights, len(self.items))
        hits = np.bincount(self.item, self.weights * taken, len(self.items))
        self._mean = float(hits.sum() / offered.sum())
        rate = (hits + _PRIOR * self._mean) / (offered + _PRIOR)
        self.popular = np.log(hits + _PRIOR * self._mean)
        self.odds = _log_odds(rate)

    def places(self, rows: Rows) -> list[Array]:
        """Return the indices of the users and items of new rows, or -1 for unknown ones."""
        found = []
        for known, name in zip((self.users, self.items), self._columns, strict=True):
            values = rows.columns[name]
            place = np.searchsorted(known, values).clip(max=len(known) - 1)
            found.append(np.where(known[place] == values, place, -1))
        return found

    def item_odds(self, item: Array) -> Floats:
        """Return the log-odds that an item is taken if it is offered."""
        return np.where(item < 0, _log_odds(np.array(self._mean)), self.odds[item])


def popularity(task: Recommendation, rows: Rows, clock: Clock) -> tuple[Answer, int]:
    """Return a function that scores items by how often all users took them, and the row count."""
    clock.check()
    known = _Taken(task, rows)

    def answer(further: Rows, clock: Clock) -> Any:
        clock.check()
        _, item = known.places(further)
        popular = np.where(item < 0, -np.inf, known.popular[item])
        popular = np.maximum(popular, known.popular.min() - 1)
        columns = [known.item_odds(item), np.ones(len(item)), popular]
        return np.column_stack(columns).astype(np.float32)

    return answer, rows.count


def item_item(task: Recommendation, rows: Rows, clock: Clock) -> tuple[Answer, int]:
    """Return a function that scores items by their similarity to the user's, and the row count."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415

    clock.check()
    known = _Taken(task, rows)
    pairs = np.unique(np.stack([known.user, known.item])[:, known.taken], axis=1)
    size = len(known.users), len(known.items)
    factors = min(FACTORS, *(each - 1 for each in size))
    if factors < _FEWEST_FACTORS:
        raise NoBaselineError(
            f"item-item needs at least {_FEWEST_FACTORS + 1} users and {_FEWEST_FACTORS + 1} "
            f"items, but the training data has {size[0]} users and {size[1]} items"
        )
    took = sparse.csr_array((np.ones(pairs.shape[1]), tuple(pairs)), shape=size)
    cosines = took @ sparse.diags_array(1 / np.sqrt(took.sum(axis=0).clip(1)))
    _, values, right = sparse.linalg.svds(cosines, factors, random_state=0)
    clock.check()
    of_items = right.T * values
    of_users = took @ of_items

    def scores(user: Array, item: Array) -> Floats:
        found: Floats = (of_users[user] * of_items[item]).sum(axis=1)
        return found * ((user >= 0) & (item >= 0))

    # Exclude the similarity of an item to itself from its score if the user took the item.
    own = known.taken * (of_items[known.item] ** 2).sum(axis=1)
    found = np.stack([known.odds[known.item], scores(known.user, known.item) - own], axis=1)
    model = LogisticRegression().fit(found, known.taken, known.weights)

    def answer(further: Rows, clock: Clock) -> Any:
        clock.check()
        user, item = known.places(further)
        given = np.stack([known.item_odds(item), scores(user, item)], axis=1)
        vectors = (
            np.where(place[:, None] < 0, 0.0, each[place])
            for place, each in ((user, of_users), (item, of_items))
        )
        return np.column_stack([model.decision_function(given), *vectors]).astype(np.float32)

    return answer, rows.count


def _log_odds(p: Floats) -> Floats:
    inside = p.clip(_LEAST, 1 - _LEAST)
    odds: Floats = np.log(inside) - np.log1p(-inside)
    return odds

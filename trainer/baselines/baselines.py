"""Selects the baselines of a task, fits them within seconds, and predicts the test examples.

The kinds of inputs, or the task, determine the baselines:

    numbers, classes    gradient boosting, and a linear model
    text                a linear model of TF-IDF features
    recommendation      popularity, and item-item similarity

A baseline is fitted to at most `MOST_ROWS` random training examples (recommenders: `_MOST_PAIRS`).
To limit the memory to about 1 GB, this number is lower for text, many columns or many classes. A
clock, which is checked between slices of the work, limits the time. A baseline that fails does not
fail the evaluation. It is reported as skipped, with the reason.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from threadpoolctl import threadpool_limits

from flotilla.trainer.baselines.fitting import (
    FACTORS,
    MOST_NUMBERS,
    Answer,
    boosting,
    count_classes,
    count_labels,
    fit_outputs,
    item_item,
    linear,
    popularity,
)
from flotilla.trainer.baselines.rows import (
    MOST_TEXTS,
    Clock,
    Columns,
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
from flotilla.trainer.tasks.base import Floats, Task
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

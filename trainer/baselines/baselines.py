"""The baselines of a task: which ones fit it, fitted within seconds, and what they answer.

    numbers, classes    gradient boosting, and a linear model
    texts               a linear model of TF-IDF
    recommendation      popularity, and item-item

They learn of at most `MOST_ROWS` training examples, drawn at random, or fewer where there are many
columns, classes or texts. That bounds the memory, to about 1 GB, and the time, together with a
clock that is looked at between slices of the work. No baseline fails an evaluation: one that does
not fit, or finds no time, says so.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from threadpoolctl import threadpool_limits

from trainer import user_code
from trainer.baselines import columns, recommending
from trainer.baselines.columns import MOST_TEXTS, Columns
from trainer.baselines.fitting import (
    MOST_NUMBERS,
    Answer,
    Boosting,
    Linear,
    classes_of,
    fitted,
    labels_of,
)
from trainer.baselines.rows import Clock, NoBaselineError, Rows, Splits, batches, training_rows
from trainer.tasks.base import Task
from trainer.tasks.regression import Regression
from trainer.tasks.retrieval.recommendation import Recommendation

#: For all baselines together; measuring what they answer comes to it.
SECONDS = 20.0
#: Training examples, and test examples.
MOST_ROWS = 100_000
# Columns times rows times trees of one iteration: 0.1 s of a core.
_MOST_VALUES = 8_000_000
_FEWEST_ROWS = 1000
# Of a recommendation, which has three columns; and 64 MB of outputs.
_MOST_PAIRS, _MOST_OUTPUTS = 1_000_000, 1 << 24


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """A baseline: what it learnt of, in how many seconds, and its outputs for test examples.

    `skipped` says why there are none. Outputs are those of the task for the first test examples.
    """

    name: str
    made_by: str = ""
    rows: int = 0
    of_rows: int = 0
    seconds: float = 0.0
    outputs: Any = None
    skipped: str = ""


def baselines_of(task: Task, splits: Splits, seconds: float = SECONDS) -> list[Baseline]:
    """Fit the baselines of a task to training examples, and let them answer the first test ones."""
    clock = Clock(seconds)
    with warnings.catch_warnings(), threadpool_limits(1):
        warnings.simplefilter("ignore")
        try:
            chosen = _ways(task, splits, clock)
            found = [*_fitted(chosen.ways, splits.spec.examples("train"), clock)]
            return _answered(found, splits, chosen, clock)
        # A model that was trained for hours is not lost for it.
        except Exception as error:
            return [Baseline(name="baseline", skipped=_why(error))]


_Fit = tuple[Baseline, Answer | None]


@dataclass(frozen=True, kw_only=True)
class _Way:
    name: str
    made_by: str
    fit: Callable[[Clock], tuple[Answer, int]]
    of_the_time: float


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, NoBaselineError) else user_code.line_of(error)


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """The baselines of a task, the features that they take, and how many test rows they answer."""

    ways: Sequence[_Way]
    names: Sequence[str]
    answered: int


def _ways(task: Task, splits: Splits, clock: Clock) -> _Chosen:
    spec = splits.spec
    if isinstance(task, Recommendation):
        rows = training_rows(splits, task.columns, _MOST_PAIRS, clock)
        most = min(MOST_ROWS, _MOST_OUTPUTS // (1 + 2 * recommending.FACTORS))
        return _Chosen(ways=_of_pairs(task, rows), names=task.columns, answered=most)
    if (count := labels_of(task)) > MOST_NUMBERS:
        raise NoBaselineError(f"none is for {count} numbers at once")
    names = columns.usable(spec)
    if not names:
        raise NoBaselineError("no input is a number, a class or a text")
    classes = classes_of(task)
    wanted = _MOST_VALUES // (columns.width(spec, names) * classes)
    rows = training_rows(splits, names, max(_FEWEST_ROWS, min(MOST_ROWS, wanted)), clock)
    known = Columns(spec, rows, classes)
    most = MOST_TEXTS if known.texts else MOST_ROWS
    without = [name for name in spec.inputs if name not in names]
    return _Chosen(
        ways=_of_columns(task, known, rows, without),
        names=names,
        answered=min(most, _MOST_OUTPUTS // max(classes, count)),
    )


def _of_columns(task: Task, known: Columns, rows: Rows, without: Sequence[str]) -> list[_Way]:
    is_regression = isinstance(task, Regression)
    trees = f"HistGradientBoosting{'Regressor' if is_regression else 'Classifier'}"
    line = "Ridge" if is_regression else "LogisticRegression"
    ways = []
    for kind, made_by, texts in ((Linear, line, True), (Boosting, trees, False)):
        left_out = [*without, *([] if texts else known.texts)]
        if not texts and not known.plain:
            continue
        only_texts = texts and not known.plain
        ways.append(
            _Way(
                name="TF-IDF, linear" if only_texts else kind.name,
                made_by=f"scikit-learn {made_by}"
                + (" of TF-IDF" if texts and known.texts else "")
                + (f", without {', '.join(left_out)}" if left_out else ""),
                fit=partial(fitted, kind(known), task, rows),
                of_the_time=0.4 if texts else 0.8,
            )
        )
    return ways


def _of_pairs(task: Recommendation, rows: Rows) -> list[_Way]:
    def way(name: str, made_by: str, make: Callable[..., Answer]) -> _Way:
        def fit(clock: Clock) -> tuple[Answer, int]:
            return make(task, rows, clock), rows.count

        return _Way(name=name, made_by=made_by, fit=fit, of_the_time=0.5)

    return [
        way("popularity", "counts of the training examples", recommending.popularity),
        way("item-item", "SciPy svds of the cosines of items", recommending.item_item),
    ]


def _fitted(ways: Sequence[_Way], of_rows: int, clock: Clock) -> Iterator[_Fit]:
    for way in ways:
        began = time.monotonic()
        made = Baseline(name=way.name, made_by=way.made_by, of_rows=of_rows)
        try:
            answer, count = way.fit(clock.share(way.of_the_time))
        except Exception as error:
            yield replace(made, skipped=_why(error)), None
            continue
        yield replace(made, rows=count, seconds=time.monotonic() - began), answer


def _answered(
    fits: Sequence[_Fit], splits: Splits, chosen: _Chosen, clock: Clock
) -> list[Baseline]:
    """Let all answer the first test examples, of which each shard has a random order."""
    made, outputs = [each for each, _ in fits], [list[Any]() for _ in fits]
    examples = splits.spec.examples("test")
    drawn = np.arange(examples) < chosen.answered
    for rows in batches(splits.spec, splits.test, chosen.names, drawn):
        for place, (_, answer) in enumerate(fits):
            if answer is None or made[place].skipped:
                continue
            began = time.monotonic()
            try:
                clock.check()
                outputs[place].append(answer(rows, clock))
            except Exception as error:
                made[place] = replace(made[place], skipped=_why(error))
            spent = made[place].seconds + time.monotonic() - began
            made[place] = replace(made[place], seconds=spent)
    return [
        each if each.skipped else replace(each, outputs=_joined(given))
        for each, given in zip(made, outputs, strict=True)
    ]


def _joined(parts: Sequence[Any]) -> Any:
    return tf.nest.map_structure(lambda *each: np.concatenate(each), *parts)

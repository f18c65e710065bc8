"""Metrics of slices: examples with the same label, or the same value of another feature."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from flotilla.trainer.tasks.base import Examples, Part, Tally, sample_examples
from flotilla.trainer.tasks.objective import Measuring, Objective, select_rows

# Maximum number of distinct values of a column that has a slice for each value. If there are more,
# numbers are divided into quartiles, and only the most frequent strings have a slice.
MOST_VALUES = 20
# Maximum number of distinct values to count. Once it is reached, new values get no slice.
_MOST_COUNTED = 1 << 16
# Condense the tallies after this many examples or output values, to limit their memory.
_MOST_ROWS, _MOST_NUMBERS = 1 << 22, 1 << 25
OTHER = "(other)"

Values = npt.NDArray[Any]
Places = npt.NDArray[np.int64]


class Cut(NamedTuple):
    """The slices of a feature: their names, and a function from values to slice indices."""

    names: tuple[str, ...]
    places: Callable[[Values], Places]


def slice_metrics(
    objective: Objective, examples: Examples, names: Mapping[str, tuple[str, ...]]
) -> dict[str, list[dict[str, Any]]]:
    """Return the slices of each column: `value`, `examples`, `metrics` and `intervals`."""
    if not names:
        return {}
    cuts = dict(_cuts(examples, names))
    tallies = {column: [objective.tally() for _ in cut.names] for column, cut in cuts.items()}
    every = [tally for some in tallies.values() for tally in some]
    for part in condensing(examples, every):
        for column, cut in cuts.items():
            places = cut.places(part.columns[column])
            if part.weights is not None:
                # Skip examples of weight 0. A slice that contains only these has no metrics.
                places = np.where(part.weights.ravel() > 0, places, -1)
            for place in np.unique(places[places >= 0]):
                tallies[column][place].add(select_rows(part, places == place))
    return {
        column: [
            _measure(name, tally)
            for name, tally in zip(cut.names, tallies[column], strict=True)
            if tally.count
        ]
        for column, cut in cuts.items()
    }


def _measure(name: str, tally: Measuring) -> dict[str, Any]:
    found = tally.result()
    metrics, intervals = found["metrics"], found["intervals"]
    return {"value": name, "examples": tally.count, "metrics": metrics, "intervals": intervals}


def condensing(examples: Examples, tallies: Sequence[Tally]) -> Iterator[Part]:
    """Yield the parts of the examples, and condense the tallies at regular intervals."""
    rows = numbers = 0
    for part in examples.parts():
        yield part
        outputs = tf.nest.flatten(part.outputs)
        rows, numbers = rows + len(outputs[0]), numbers + sum(map(np.size, outputs))
        if rows > _MOST_ROWS or numbers > _MOST_NUMBERS:
            for each in tallies:
                each.condense()
            rows = numbers = 0


def _cuts(examples: Examples, names: Mapping[str, tuple[str, ...]]) -> Iterable[tuple[str, Cut]]:
    counts: dict[str, Counter[Any]] = {column: Counter() for column in names}
    for part in examples.parts():
        for column, counter in counts.items():
            _count(counter, part.columns[column])
    for column, counter in counts.items():
        yield column, _cut(counter, names[column], column, examples)


def _count(counter: Counter[Any], values: Values) -> None:
    found, each = np.unique(values, return_counts=True)
    for value, count in zip(found.tolist(), each.tolist(), strict=True):
        # NaN does not equal itself, so each part would add another NaN.
        key = value if value == value else np.nan  # noqa: PLR0124
        if key in counter or len(counter) < _MOST_COUNTED:
            counter[key] += count


def _cut(counter: Counter[Any], names: tuple[str, ...], column: str, examples: Examples) -> Cut:
    values = sample_examples(examples).columns[column]
    if names:
        return Cut(names=names, places=lambda some: some.astype(np.int64))
    if len(counter) <= MOST_VALUES:
        return _cut_by_value(sorted(counter, key=_order), values.dtype)
    if values.dtype.kind in "iuf":
        return _quarters(values)
    frequent = [value for value, _ in counter.most_common(MOST_VALUES - 1)]
    return _cut_by_value(frequent, values.dtype, others=True)


def _order(value: Any) -> Any:
    return (value != value, value)  # noqa: PLR0124


def _cut_by_value(kept: list[Any], dtype: np.dtype[Any], *, others: bool = False) -> Cut:
    def places(some: Values) -> Places:
        found = np.full(len(some), len(kept) if others else -1, np.int64)
        for place, value in enumerate(kept):
            same = some == value if value == value else np.isnan(some)  # noqa: PLR0124
            found[same] = place
        return found

    plain = [np.array(value, dtype)[()] for value in kept]
    names = tuple(text(value) for value in plain)
    return Cut(names=(*names, OTHER) if others else names, places=places)


def _quarters(values: Values) -> Cut:
    # Use float64, because differences between large float32 values may overflow.
    finite = values[np.isfinite(values)].astype(np.float64)
    edges = np.unique(np.quantile(finite, [0, 0.25, 0.5, 0.75, 1])) if len(finite) else np.zeros(1)
    last = max(len(edges) - 2, 0)

    def places(some: Values) -> Places:
        wide = some.astype(np.float64)
        # The edges come from a sample. Put values beyond them into the first or last slice.
        found = np.clip(np.searchsorted(edges, wide, side="right") - 1, 0, last)
        return np.where(np.isfinite(wide), found, last + 1)

    names = tuple(f"{low:g} to {high:g}" for low, high in pairwise(edges))
    return Cut(names=(*(names or (f"{edges[0]:g}",)), "not finite"), places=places)


def text(value: Any) -> str:
    """Format a value of a feature for display."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return f"{value:g}" if isinstance(value, np.floating) else str(value)

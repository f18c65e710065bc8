"""Metrics of parts of the examples: by label, or by any feature that is one value an example."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.tasks.base import Part
from trainer.tasks.objective import Objective, at

# Numbers with more values than this are cut into quarters, texts keep the most frequent ones.
MOST_VALUES = 20
OTHER = "(other)"

Values = npt.NDArray[Any]
Rows = npt.NDArray[np.bool_]


def sliced(
    values: Values, objective: Objective, part: Part, names: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Return a row for each part: `value`, `examples`, `metrics` and `intervals`.

    Args:
        values: of the feature, one an example.
        objective: measures.
        part: all examples.
        names: of the values 0, 1, ..., where they have names, as those of the label do.
    """
    rows_of = list(_parts(values, names))
    return [
        {"value": value, "examples": int(rows.sum()), **objective.of_slice(at(part, rows))}
        for value, rows in rows_of
    ]


def _parts(values: Values, names: tuple[str, ...]) -> Iterator[tuple[str, Rows]]:
    found, counts = np.unique(values, return_counts=True)
    if names:
        for value in found:
            yield names[int(value)], values == value
    elif len(found) <= MOST_VALUES:
        for value in found:
            # NaN alone does not equal itself.
            yield text(value), values == value if value == value else np.isnan(values)  # noqa: PLR0124
    elif values.dtype.kind in "iuf":
        yield from _quarters(values)
    else:
        kept = found[np.argsort(-counts, kind="stable")][: MOST_VALUES - 1]
        for value in kept:
            yield text(value), values == value
        yield OTHER, ~np.isin(values, kept)


def _quarters(values: Values) -> Iterator[tuple[str, Rows]]:
    # Differences of the largest single floats have no place in a single float.
    values = values.astype(np.float64)
    edges = np.unique(np.quantile(values[np.isfinite(values)], [0, 0.25, 0.5, 0.75, 1]))
    for low, high in pairwise(edges):
        last = high == edges[-1]
        rows = (values >= low) & ((values <= high) if last else (values < high))
        if rows.any():
            yield f"{low:g} to {high:g}", rows
    if not np.isfinite(values).all():
        yield "not finite", ~np.isfinite(values)


def text(value: Any) -> str:
    """Return a feature's value as a person reads it."""
    if isinstance(value, bytes):
        return value.decode("utf-8", errors="replace")
    return f"{value:g}" if isinstance(value, np.floating) else str(value)

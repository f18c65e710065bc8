"""The decision threshold for the positive class, chosen on the validation split.

The threshold maximizes the weighted F1 of the positive class. If several thresholds do so, the one
closest to 0.5 is used. It lies midway between two probabilities, so that rounding differences
between exported forms of the model do not change decisions. It is 0.5 if all probabilities are
equal, or if no example is positive.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.data.read import evaluation_batches, stage_shards
from flotilla.trainer.evaluation.predictions import make_forward
from flotilla.trainer.evaluation.signature import map_outputs
from flotilla.trainer.events.progress import Work
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.tasks.base import Array, Floats
from flotilla.trainer.tasks.classification import Threshold
from flotilla.trainer.tasks.objective import Objective

SPLIT = "validation"
# Maximum number of examples to read. More would hardly change the threshold.
MOST_EXAMPLES = 1_000_000
_EVEN = 0.5
_CLOSE = 1e-12
log = logging.getLogger(__name__)


def choose_thresholds(  # noqa: PLR0913, PLR0917
    objective: Objective,
    model: keras.Model,
    spec: DatasetSpec,
    dataset: str,
    scratch: Path,
    batch_size: int,
) -> dict[str, Threshold]:
    """Return the threshold of each output that has a positive class, by output name."""
    parts = [name for name, part in objective.task.parts.items() if part.positive_by]
    if not parts or not spec.examples(SPLIT):
        if parts:
            log.info("there is no %s split, so the threshold stays %g", SPLIT, _EVEN)
        return {}
    files = stage_shards(dataset, scratch / SPLIT, SPLIT)
    every = -(-spec.examples(SPLIT) // MOST_EXAMPLES)
    batches = evaluation_batches(spec, files, batch_size=batch_size, of=every)
    forward = make_forward(objective, model)
    found: dict[str, list[tuple[Array, Floats, Floats]]] = {name: [] for name in parts}
    total = spec.examples(SPLIT) // every
    with Work(f"predicting the {SPLIT} split", "rows", total) as work:
        for batch in batches:
            _, labels, weights = keras.utils.unpack_x_y_sample_weight(batch)
            outputs = forward(batch[0])
            for name, columns in found.items():
                columns.append(_columns(name, labels, outputs, weights))
            work.add(len(tf.nest.flatten(labels)[0]))
    return {
        name: _choose(name, *map(np.concatenate, zip(*columns, strict=True)))
        for name, columns in found.items()
    }


def compute_thresholds(
    parts: Iterable[str], labels: Any, outputs: Any, weights: Any
) -> dict[str, Threshold]:
    """Return the threshold of each output, given a model's outputs for validation examples."""
    found = {}
    for name in parts:
        value = best(*_columns(name, labels, outputs, weights))
        found[name] = Threshold() if value is None else Threshold(value, SPLIT, len(weights))
    return found


def _columns(name: str, labels: Any, outputs: Any, weights: Any) -> tuple[Array, Floats, Floats]:
    labels, outputs = (each[name] if name else each for each in (labels, outputs))
    sure = tf.sigmoid(outputs[:, 0]).numpy()
    weighs = np.ones(len(sure)) if weights is None else np.asarray(weights, np.float64).ravel()
    return np.asarray(labels).ravel() == 1, sure, weighs


def _choose(name: str, positive: Array, sure: Floats, weights: Floats) -> Threshold:
    of = f" of {name!r}" if name else ""
    value = best(positive, sure, weights)
    if value is None:
        log.info(
            "no threshold%s separates the %d %s examples; using %g", of, len(sure), SPLIT, _EVEN
        )
        return Threshold()
    log.info("the threshold%s is %.4g, chosen on %d %s examples", of, value, len(sure), SPLIT)
    return Threshold(value=value, chosen_on=SPLIT, examples=len(sure))


def best(positive: Array, sure: Floats, weights: Floats) -> float | None:
    """Return the threshold with the highest F1, or None if no threshold divides the examples.

    Args:
        positive: whether each example is positive.
        sure: the probability that each example is positive, in the precision of decisions.
        weights: the weight of each example.
    """
    counts = np.isfinite(sure) & (weights > 0)
    order = np.argsort(-sure[counts], kind="stable")
    sure, positive, weights = (each[counts][order] for each in (sure, positive, weights))
    hits, taken = np.cumsum(weights * positive), np.cumsum(weights)
    # Use only the last of equal probabilities. Skip the lowest one: it has no lower neighbor.
    ends = np.flatnonzero(sure[:-1] != sure[1:])
    if not len(ends) or not hits[-1]:
        return None
    f1 = 2 * hits[ends] / (hits[-1] + taken[ends])
    above, below = sure[ends], sure[ends + 1]
    half = above / 2 + below / 2
    half = np.where((half < above) & (half >= below), half, below)
    able = np.flatnonzero(f1 >= f1.max() - _CLOSE)
    return float(half[able[np.argmin(np.abs(half[able] - _EVEN))]])


def read_thresholds(fields: Mapping[str, Any], names: Iterable[str]) -> dict[str, Threshold]:
    """Return the thresholds of an exported model's outputs, or 0.5 if its manifest has none."""
    said = map_outputs(fields.get("threshold", {}))
    return {name: Threshold(float(said.get(name, _EVEN))) for name in names}

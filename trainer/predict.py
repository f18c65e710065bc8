"""The answers of a model, and of a champion beside it, to examples that stream by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.data.spec import DatasetSpec
from trainer.errors import UserError
from trainer.figures import Floats, Labels
from trainer.refused_input import refused_input
from trainer.worst import Worst

Answer = Callable[[Mapping[str, tf.Tensor]], Floats]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """The answers to all examples, in order; the examples themselves are gone.

    Attributes:
        labels: [n].
        logits: [n, classes].
        champion: the champion's logits, or None without one.
        columns: values of the features to slice by, [n] each.
        worst: the examples with the highest losses.
    """

    labels: Labels
    logits: Floats
    champion: Floats | None
    columns: dict[str, Any]
    worst: Worst


def predict(
    model: keras.Model, spec: DatasetSpec, batches: tf.data.Dataset, champion: Answer | None = None
) -> Predictions:
    """Predict all examples of finite `labelled_columns`, batch by batch.

    Raises:
        UserError: there are no examples, or a model refuses them.
    """

    @tf.function(reduce_retracing=True)
    def forward(inputs: Any) -> tf.Tensor:
        return tf.cast(model(inputs, training=False), tf.float32)

    worst = Worst(spec)
    labels: list[Labels] = []
    answers: list[Floats] = []
    rival: list[Floats] = []
    columns: dict[str, list[Any]] = {}
    for inputs, given, values in batches:
        named = inputs if isinstance(inputs, Mapping) else {spec.inputs[0]: inputs}
        labels.append(given.numpy().astype(np.int64))
        with refused_input():
            answers.append(forward(inputs).numpy())
        if champion:
            rival.append(champion(named))
        for column, each in values.items():
            columns.setdefault(column, []).append(each.numpy())
        if _sound(spec, labels[-1], answers[-1]):
            worst.look(named, labels[-1], answers[-1])
    if not labels:
        raise UserError("there are no examples to predict")
    return Predictions(
        labels=np.concatenate(labels),
        logits=np.concatenate(answers),
        champion=np.concatenate(rival) if rival else None,
        columns={column: np.concatenate(each) for column, each in columns.items()},
        worst=worst,
    )


def _sound(spec: DatasetSpec, labels: Labels, logits: Floats) -> bool:
    # What is not is refused when all is counted.
    known = labels.min() >= 0 and labels.max() < spec.num_classes
    return bool(known and np.isfinite(logits).all())

"""The predictions of a model, and of the champion, for a stream of examples.

The examples with the highest losses, as pictures where an input is one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.data.spec import DatasetSpec, FeatureSpec
from trainer.errors import UserError
from trainer.evaluation.metrics import Floats, Labels, losses, softmax
from trainer.evaluation.slices import text
from trainer.models.registry import refused_input

MOST_WORST = 25
# Pixels of the longer side: larger than this a page does not show it.
LARGEST_SIDE = 256
_VALUES_IN_TEXT = 12
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True, kw_only=True)
class _Example:
    """One example with its inputs, copied out of the batch so that the batch can go."""

    loss: float
    row: dict[str, Any]
    inputs: dict[str, Any]


class Worst:
    """Collects the worst of all examples while they stream by; holds `MOST` of them."""

    def __init__(self, spec: DatasetSpec) -> None:
        """Collect examples of this dataset."""
        self._spec = spec
        self._kept: list[_Example] = []
        self._seen = 0

    def look(self, inputs: Mapping[str, Any], labels: Labels, logits: Floats) -> None:
        """Look at one batch: inputs by feature name, labels [n] and logits [n, classes]."""
        each = losses(labels, logits)
        probabilities = softmax(logits)
        for place in np.argsort(-each, kind="stable")[:MOST_WORST]:
            index = int(place)
            if len(self._kept) == MOST_WORST and each[index] <= self._kept[-1].loss:
                break
            row = {
                "index": self._seen + index,
                "label": int(labels[index]),
                "predicted": int(logits[index].argmax()),
                "loss": float(each[index]),
                "probability": float(probabilities[index, labels[index]]),
            }
            values = {name: self._copied(name, each[index]) for name, each in inputs.items()}
            self._kept.append(_Example(loss=row["loss"], row=row, inputs=values))
            self._kept.sort(key=lambda example: -example.loss)
            del self._kept[MOST_WORST:]
        self._seen += len(labels)

    def _copied(self, name: str, value: Any) -> Any:
        copy = np.array(value)
        return _shrunk(copy) if _is_image(self._spec.features[name]) else copy

    def write(self, folder: Path, names: list[str]) -> list[dict[str, Any]]:
        """Write the pictures to `folder` and return a row for each example, the worst first.

        A row holds `index` in the split, `label`, `predicted`, `loss`, `probability` of the label,
        and `picture` (a path below `folder`) or `inputs` (a text).
        """
        rows = []
        for place, example in enumerate(self._kept, start=1):
            row = {key: example.row[key] for key in ("index", "loss", "probability")}
            row |= {key: names[example.row[key]] for key in ("label", "predicted")}
            pictured = next((n for n in example.inputs if _is_image(self._spec.features[n])), None)
            if pictured is None:
                row["inputs"] = ", ".join(_described(n, v) for n, v in example.inputs.items())
            else:
                row["picture"] = f"worst/{place:02d}.png"
                path = folder / row["picture"]
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(_png(example.inputs[pictured]))
            rows.append(row)
        return rows


def _is_image(feature: FeatureSpec) -> bool:
    # A row of pixels is no picture, and neither is a table of a few columns.
    match feature.shape:
        case (height, width, channels):
            return feature.dtype != "string" and channels in _CHANNELS and min(height, width) > 1
        case (height, width):
            return feature.dtype == "uint8" and min(height, width) > 1
    return False


def _shrunk(image: Any) -> Any:
    height, width = image.shape[:2]
    scale = LARGEST_SIDE / max(height, width)
    if scale >= 1:
        return image
    size = (max(round(height * scale), 1), max(round(width * scale), 1))
    plain = image.reshape(height, width, -1).astype(np.float32)
    finite = np.nan_to_num(plain, posinf=0.0, neginf=0.0)
    small = tf.image.resize(finite, size, method="area").numpy()
    return np.round(small).astype(np.uint8) if image.dtype == np.uint8 else small


def _png(values: Any) -> bytes:
    image = values.reshape(*values.shape[:2], -1)
    if image.dtype != np.uint8:
        finite = np.nan_to_num(image.astype(np.float64), posinf=0.0, neginf=0.0)
        low, high = finite.min(), finite.max()
        image = np.round((finite - low) * (255 / ((high - low) or 1.0))).astype(np.uint8)
    encoded: bytes = tf.io.encode_png(image).numpy()
    return encoded


def _described(name: str, values: Any) -> str:
    flat = np.ravel(values)
    words = " ".join(text(value) for value in flat[:_VALUES_IN_TEXT])
    return f"{name} {words}" + (" ..." if len(flat) > _VALUES_IN_TEXT else "")


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
    opponent: list[Floats] = []
    columns: dict[str, list[Any]] = {}
    for inputs, given, values in batches:
        named = inputs if isinstance(inputs, Mapping) else {spec.inputs[0]: inputs}
        labels.append(given.numpy().astype(np.int64))
        with refused_input():
            answers.append(forward(inputs).numpy())
        if champion:
            opponent.append(champion(named))
        for column, each in values.items():
            columns.setdefault(column, []).append(each.numpy())
        if _sound(spec, labels[-1], answers[-1]):
            worst.look(named, labels[-1], answers[-1])
    if not labels:
        raise UserError("there are no examples to predict")
    return Predictions(
        labels=np.concatenate(labels),
        logits=np.concatenate(answers),
        champion=np.concatenate(opponent) if opponent else None,
        columns={column: np.concatenate(each) for column, each in columns.items()},
        worst=worst,
    )


def _sound(spec: DatasetSpec, labels: Labels, logits: Floats) -> bool:
    # What is not is refused when all is counted.
    known = labels.min() >= 0 and labels.max() < spec.num_classes
    return bool(known and np.isfinite(logits).all())

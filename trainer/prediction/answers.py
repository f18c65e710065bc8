"""The columns that a prediction writes: class names, probabilities, numbers.

The columns depend on the kind of task. A model with several outputs writes one column for each
output: a struct with the name of the output and these fields.

    classification            prediction, probability, probabilities by class
    binary classification     the same; the model's threshold determines the prediction
    multilabel classification prediction (a list), probabilities by class
    sequence to label         as for classification
    sequence labelling        prediction and probability (lists with the length of the example)
    regression                prediction
    ranking, recommendation   score, probability
    a user's task             its outputs, unchanged
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from flotilla.trainer.prediction.exported_model import ExportedModel
from flotilla.trainer.tasks.multi_output import group_by_output

# Maximum number of classes whose probabilities are a struct. With more, they are a list in class
# order.
MOST_NAMED = 1000
_HALF = 0.5
Answers = Mapping[str, NDArray[Any]]
Columns = dict[str, pa.Array]


def make_columns(model: ExportedModel, answers: Answers, lengths: Any) -> Columns:
    """Return the columns for a batch. `lengths` are the lengths of padded examples, or None."""
    if set(model.kinds) == {""}:
        return _columns(model, "", answers, lengths)
    found: Columns = {}
    own = group_by_output(model.kinds, answers)
    for name in model.kinds:
        inner = _columns(model, name, own[name], lengths)
        found[name] = pa.StructArray.from_arrays(list(inner.values()), list(inner))
    return found


def unsound(answers: Answers) -> int:
    """Return the number of examples with predictions that are not finite."""
    rows = [
        np.isfinite(each.reshape(len(each), -1)).all(axis=1)
        for each in answers.values()
        if each.dtype.kind == "f"
    ]
    return int((~np.logical_and.reduce(rows)).sum()) if rows else 0


def _columns(model: ExportedModel, output: str, answers: Answers, lengths: Any) -> Columns:
    labels = model.labels.get(output, ())
    made, needs = _KINDS.get(model.kinds[output], (_raw, ()))
    # A user's subclass of a built-in task may have other outputs.
    if not all(each in answers for each in needs):
        made = _raw
    if made is _binary:
        return _binary(labels, answers, model.thresholds.get(output, _HALF))
    return made(labels, answers, lengths)


def _classes(labels: Sequence[str], answers: Answers, _lengths: Any) -> Columns:
    each = answers["probabilities"]
    return _choose_class(labels, each, each.argmax(axis=-1))


def _choose_class(labels: Sequence[str], each: NDArray[Any], best: NDArray[Any]) -> Columns:
    names = _names(labels, each.shape[-1])
    return {
        "prediction": pa.array(names[best].tolist(), pa.string()),
        "probability": pa.array(np.take_along_axis(each, best[:, None], axis=-1)[:, 0]),
        "probabilities": _make_probabilities(names, each),
    }


def _binary(labels: Sequence[str], answers: Answers, threshold: float) -> Columns:
    second = answers["probability"]
    both = np.stack([1 - second, second], axis=-1)
    return _choose_class(labels, both, (second > np.float32(threshold)).astype(np.int64))


def _several(labels: Sequence[str], answers: Answers, _lengths: Any) -> Columns:
    each = answers["probabilities"]
    names = _names(labels, each.shape[-1])
    found = [names[row > _HALF].tolist() for row in each]
    return {
        "prediction": pa.array(found, pa.list_(pa.string())),
        "probabilities": _make_probabilities(names, each),
    }


def _places(labels: Sequence[str], answers: Answers, lengths: Any) -> Columns:
    each = answers["probabilities"]
    best = each.argmax(axis=-1)
    names = _names(labels, each.shape[-1])
    cut = [len(row) for row in each] if lengths is None else lengths.tolist()
    highest = each.max(axis=-1)
    predicted = [names[row[:size]].tolist() for row, size in zip(best, cut, strict=True)]
    sure = [row[:size].tolist() for row, size in zip(highest, cut, strict=True)]
    numbers: Any = pa.float32()
    for _ in range(best.ndim - 1):
        numbers = pa.list_(numbers)
    return {"prediction": pa.array(predicted), "probability": pa.array(sure, numbers)}


def _scores(_labels: Sequence[str], answers: Answers, _lengths: Any) -> Columns:
    return {"score": pa.array(answers["logit"]), "probability": pa.array(answers["probability"])}


def _raw(_labels: Sequence[str], answers: Answers, _lengths: Any) -> Columns:
    return {name: _nest(values) for name, values in answers.items()}


def _names(labels: Sequence[str], count: int) -> NDArray[Any]:
    known = list(labels) if len(labels) == count else [str(each) for each in range(count)]
    return np.array(known, object)


def _make_probabilities(names: NDArray[Any], each: NDArray[Any]) -> pa.Array:
    if len(names) > MOST_NAMED or len(set(names)) < len(names):
        return _nest(each)
    columns = [pa.array(np.ascontiguousarray(each[:, at])) for at in range(len(names))]
    return pa.StructArray.from_arrays(columns, names.tolist())


def _nest(values: NDArray[Any]) -> pa.Array:
    """Convert an array to an Arrow array with one nested list per example."""
    if values.dtype == object:
        return pa.array([_text(each) for each in values.tolist()])
    found = pa.array(values.reshape(-1))
    for size in values.shape[:0:-1]:
        offsets = np.arange(0, len(found) + 1, max(size, 1), dtype=np.int32)
        found = pa.ListArray.from_arrays(pa.array(offsets), found)
    return found


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(each) for each in value]
    return value.decode(errors="replace") if isinstance(value, bytes) else value


_Made = Callable[[Sequence[str], Answers, Any], Columns]
_KINDS: dict[str, tuple[_Made, tuple[str, ...]]] = {
    "classification": (_classes, ("probabilities",)),
    "sequence_to_label": (_classes, ("probabilities",)),
    "binary_classification": (_binary, ("probability",)),
    "multilabel_classification": (_several, ("probabilities",)),
    "sequence_labelling": (_places, ("probabilities",)),
    "regression": (lambda _labels, answers, _lengths: _raw((), answers, None), ("prediction",)),
    "ranking": (_scores, ("logit", "probability")),
    "recommendation": (_scores, ("logit", "probability")),
}

"""Predicts raw rows in MLflow: the loader module of the flavor `python_function`.

Each registered model has a copy of this file, which imports only NumPy, pandas, TensorFlow and, for
images, Pillow. `mlflow/model.json` describes the model:

    {"saved_model": its folder, "size": maximum number of rows in a batch,
     "inputs": [{"feature", "argument", "type" of the column, "shape", "dtype", "labels", "padding",
                 "length_of": the feature whose lengths this input has, or ""}],
     "outputs": [{"name", "kind", "labels", "threshold",
                  "answers": {column: key in the output of the SavedModel}}]}

Rows are converted as in `flotilla predict`, and the result has the same columns.
"""

from __future__ import annotations

import datetime
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

# Maximum number of classes whose probabilities have separate columns. With more, they are one list
# column in class order.
_MOST_NAMED = 1000
_HALF = 0.5
_WHOLE = 2.0**53
_CHOICES = ("classification", "sequence_to_label", "binary_classification")
_WORDS = {**dict.fromkeys(("true", "yes", "on", "t", "y"), 1.0),
          **dict.fromkeys(("false", "no", "off", "f", "n"), 0.0)}  # fmt: skip
# Lowercase strings that stand for a missing number.
_MISSING = frozenset(
    (
        "", "na", "n/a", "<na>", "#n/a", "#na", "#n/a n/a", "nan", "-nan", "1.#ind", "-1.#ind",
        "1.#qnan", "-1.#qnan", "null", "none", "nat", "\\n", "#div/0!", "#value!", "#ref!",
        "#num!", "#name?", "#null!", "-", "--", "---", "\u2013", "\u2014", "?", "??", ".", "..",
        "...", "*", "nil", "''", '""', "na.", "n.a.", "n.a", "n.d.", "n/d", "nd", "(null)",
        "<null>", "(none)", "(na)", "missing", "(missing)", "unknown", "(unknown)",
        "not available", "not applicable", "no data", "empty", "(empty)", "blank", "(blank)",
        "tbd", "undefined",
    )
)  # fmt: skip


def _load_pyfunc(folder: str) -> Predictor:
    """Load the model in a folder. MLflow calls this function."""
    return Predictor(Path(folder))


class Predictor:
    """A loaded model."""

    def __init__(self, folder: Path) -> None:
        """Load the SavedModel."""
        import tensorflow as tf

        facts = json.loads((folder / "mlflow" / "model.json").read_text(encoding="utf-8"))
        self._inputs: list[dict[str, Any]] = facts["inputs"]
        self._outputs: list[dict[str, Any]] = facts["outputs"]
        self._size = int(facts["size"])
        self._loaded = tf.saved_model.load(str(folder / facts["saved_model"]))
        self._serve = self._loaded.signatures["serving_default"]
        self._tensorflow = tf

    def predict(self, data: Any, params: Any = None) -> pd.DataFrame:  # noqa: ARG002
        """Return the columns of `flotilla predict` for a table, or for a dictionary of arrays."""
        columns = self._columns(data)
        rows = len(next(iter(columns.values())))
        if not rows:
            return pd.DataFrame()
        parts = [
            self._answer({name: each[at : at + self._size] for name, each in columns.items()})
            for at in range(0, rows, self._size)
        ]
        found = pd.concat(parts, ignore_index=True)
        return found.set_index(data.index) if isinstance(data, pd.DataFrame) else found

    def _columns(self, data: Any) -> dict[str, Any]:
        features = [each["feature"] for each in self._inputs]
        if isinstance(data, np.ndarray) and len(features) == 1:
            data = {features[0]: data}
        data = pd.DataFrame(data) if isinstance(data, list) else data
        needed = [each["feature"] for each in self._inputs if not each["length_of"]]
        if absent := [name for name in needed if name not in data]:
            raise ValueError(f"no column {absent[0]!r}: the model needs {', '.join(needed)}")
        return {name: data[name] for name in features if name in data}

    def _answer(self, columns: Mapping[str, Any]) -> pd.DataFrame:
        lengths: dict[str, list[int]] = {}
        given = {}
        for each in self._inputs:
            if each["shape"]:
                arrays = _arrays(each, list(columns[each["feature"]]), self._tensorflow)
                if None in each["shape"]:
                    lengths[each["feature"]] = [len(array) for array in arrays]
                given[each["argument"]] = _pad(each, arrays)
        for each in self._inputs:
            if not each["shape"]:
                column = columns.get(each["feature"], lengths.get(each["length_of"]))
                given[each["argument"]] = _scalars(each, column)
        tensors = {
            each["argument"]: self._tensorflow.constant(given[each["argument"]], each["dtype"])
            for each in self._inputs
        }
        answers = {name: each.numpy() for name, each in self._serve(**tensors).items()}
        cut = next(iter(lengths.values()), None)
        made: dict[str, Any] = {}
        for output in self._outputs:
            before = f"{output['name']}/" if output["name"] else ""
            own = {name: answers[key] for name, key in output["answers"].items()}
            made |= {f"{before}{name}": each for name, each in _decide(output, own, cut)}
        return pd.DataFrame(made)


def _scalars(wanted: Mapping[str, Any], column: Any) -> Any:
    """Return one value per row, converted to the type of the column."""
    dtype, labels = wanted["dtype"], wanted["labels"]
    array = np.asarray(column)
    if dtype == "string":
        return np.array([_text(value) for value in column], object)
    if labels and array.dtype.kind not in "iuf":
        places = {label: place for place, label in enumerate(labels)}
        found: Any = np.array([places.get(_text(value), -1) for value in column])
        if (found < 0).any():
            raise _refuse(wanted, list(column)[found.argmin()], "is not one of the classes")
        return found.astype(dtype)
    if array.dtype.kind in "iufb":
        found = array
    else:
        convert = _seconds if wanted["type"] == "time" else _number
        found = np.array([convert(wanted, value) for value in column])
    if dtype == "bool" or "int" in dtype:
        limits = (0, 1) if dtype == "bool" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        bad = ~((found == np.floor(found)) & (found >= limits[0]) & (found <= limits[1]))
        if found.dtype.kind != "b" and bad.any():
            raise _refuse(wanted, list(column)[bad.argmax()], f"is not of type {wanted['type']}")
    return found.astype(dtype)


def _text(value: Any) -> str:
    """Return a value as text without outer spaces. A float such as 2.0 is formatted as `2`."""
    if isinstance(value, bytes):
        return value.decode().strip()
    if isinstance(value, str):
        return value.strip()
    if _is_missing(value):
        return ""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, float | np.floating):
        wide = float(value)
        return str(int(wide)) if abs(wide) < _WHOLE and wide == int(wide) else str(value)
    return str(value)


def _number(wanted: Mapping[str, Any], value: Any) -> Any:
    if _is_missing(value):
        return np.nan
    if not isinstance(value, str | bytes):
        return value
    text = _text(value)
    if text.lower() in _MISSING:
        return np.nan
    if wanted["type"] == "bool" and text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return int(text) if "int" in wanted["dtype"] else float(text)
    except ValueError:
        raise _refuse(wanted, value, "is not a number") from None


def _seconds(wanted: Mapping[str, Any], value: Any) -> float:
    """Return a Unix timestamp. A time without a time zone is in UTC."""
    if _is_missing(value) or (isinstance(value, str) and value.strip().lower() in _MISSING):
        return np.nan
    if isinstance(value, int | float | np.number):
        return float(value)
    text = value.strip().replace("/", "-") if isinstance(value, str) else value
    try:
        time = pd.Timestamp(text)
    except ValueError:
        raise _refuse(wanted, value, "is not a time") from None
    time = time if time.tzinfo else time.tz_localize(datetime.UTC)
    return (time.value // 1000) / 10**6  # type: ignore[no-any-return]


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or value is pd.NaT or value != value  # noqa: PLR0124


def _arrays(wanted: Mapping[str, Any], values: Sequence[Any], tensorflow: Any) -> list[Any]:
    """Return one array per row, from lists, JSON strings or encoded images."""
    shape, found = wanted["shape"], []
    for value in values:
        if wanted["type"] == "image" and isinstance(value, bytes | bytearray):
            found.append(_pixels(bytes(value), shape, tensorflow))
            continue
        listed = json.loads(value or "[]") if isinstance(value, str) else value
        if wanted["dtype"] == "string":
            array = np.array([_text(each) for each in np.ravel(np.array(listed, object))], object)
            array = array.reshape(np.shape(np.array(listed, object)))
        else:
            array = np.asarray(listed if np.size(listed) else [], wanted["dtype"])
        if not array.size and None in shape:
            array = array.reshape([size or 0 for size in shape])
        if len(shape) != array.ndim or not all(
            size in (None, found) for size, found in zip(shape, array.shape, strict=True)
        ):
            raise _refuse(wanted, value, f"has the shape {list(array.shape)}, not {shape}")
        found.append(array)
    return found


def _pad(wanted: Mapping[str, Any], arrays: Sequence[Any]) -> Any:
    if None not in wanted["shape"]:
        return np.stack(arrays)
    longest = max(1, *(len(each) for each in arrays))
    fill, dtype = wanted["padding"], wanted["dtype"]
    if dtype == "string":
        fill, dtype = "", object
    found = np.full((len(arrays), longest, *wanted["shape"][1:]), fill, dtype)
    for place, each in enumerate(arrays):
        found[place, : len(each)] = each
    return found


def _pixels(data: bytes, shape: Sequence[int], tf: Any) -> Any:
    """Decode an image, rotate it according to its EXIF data, and resize it for the model."""
    from PIL import Image, ImageOps

    height, width, channels = shape
    with Image.open(io.BytesIO(data)) as image:
        turned = image.getexif().get(0x0112) not in (None, 0, 1)
        modes = ("L", "RGB") if image.format == "JPEG" else ("L", "LA", "I;16", "RGB", "RGBA")
        if turned or image.format not in ("JPEG", "PNG") or image.mode not in modes:
            mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
            pixels = np.asarray(ImageOps.exif_transpose(image).convert(mode))
            pixels = tf.constant(pixels.reshape((*pixels.shape[:2], channels)))
        else:
            pixels = tf.io.decode_image(data, channels, expand_animations=False)
    if tuple(pixels.shape[:2]) != (height, width):
        blended = tf.round(tf.image.resize(pixels, (height, width), antialias=True))
        pixels = tf.cast(tf.clip_by_value(blended, 0, 255), tf.uint8)
    return pixels.numpy()


def _refuse(wanted: Mapping[str, Any], value: Any, why: str) -> ValueError:
    return ValueError(f"column {wanted['feature']!r}: {str(value)[:40]!r} {why}")


def _decide(
    output: Mapping[str, Any], answers: Mapping[str, Any], lengths: Any
) -> Iterator[tuple[str, Any]]:
    kind, labels = output["kind"], output["labels"]
    if kind == "sequence_labelling":
        yield from _label_places(labels, answers["probabilities"], lengths)
    elif kind in _CHOICES or kind == "multilabel_classification":
        yield from _choose_classes(output, labels, answers)
    elif kind in ("ranking", "recommendation"):
        yield "score", answers["logit"]
        yield "probability", answers["probability"]
    else:
        for name, values in answers.items():
            yield name, _nest(values)


def _choose_classes(
    output: Mapping[str, Any], labels: Sequence[str], answers: Mapping[str, Any]
) -> Iterator[tuple[str, Any]]:
    if output["kind"] == "binary_classification":
        second = answers["probability"]
        each = np.stack([1 - second, second], axis=-1)
        best = (second > np.float32(output["threshold"])).astype(np.int64)
    else:
        each = answers["probabilities"]
        best = each.argmax(axis=-1)
    names = _names(labels, each.shape[-1])
    if output["kind"] == "multilabel_classification":
        yield "prediction", [names[row > _HALF].tolist() for row in each]
    else:
        yield "prediction", names[best]
        yield "probability", np.take_along_axis(each, best[:, None], axis=-1)[:, 0]
    if len(names) > _MOST_NAMED or len(set(names)) < len(names):
        yield "probabilities", each.tolist()
        return
    for place, name in enumerate(names):
        yield f"probabilities/{name}", each[:, place]


def _label_places(labels: Sequence[str], each: Any, lengths: Any) -> Iterator[tuple[str, Any]]:
    names = _names(labels, each.shape[-1])
    cut = [len(row) for row in each] if lengths is None else lengths
    rows = list(zip(each.argmax(axis=-1), each.max(axis=-1), cut, strict=True))
    yield "prediction", [names[best[:size]].tolist() for best, _, size in rows]
    yield "probability", [sure[:size].tolist() for _, sure, size in rows]


def _names(labels: Sequence[str], count: int) -> Any:
    known = list(labels) if len(labels) == count else [str(each) for each in range(count)]
    return np.array(known, object)


def _nest(values: Any) -> Any:
    if values.dtype == object:
        return [_texts(each) for each in values.tolist()]
    return values if values.ndim == 1 else values.tolist()


def _texts(value: Any) -> Any:
    if isinstance(value, list):
        return [_texts(each) for each in value]
    return value.decode(errors="replace") if isinstance(value, bytes) else value

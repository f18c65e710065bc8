"""Predictions of a model and its champion for a stream of examples, stored on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import keras
import numpy as np
import tensorflow as tf

from flotilla.trainer.evaluation.slices import condensing, text
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import layer_name
from flotilla.trainer.models.registry import report_bad_input
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.tasks.base import Array, Examples, Part, SplitError, Task
from flotilla.trainer.tasks.objective import Objective, cast_outputs

MOST_WORST = 25
# Maximum size of the longer side of an image on a page, in pixels.
LARGEST_SIDE = 256
_VALUES_IN_TEXT = 12
_CHANNELS = (1, 3, 4)
# Maximum number of values of a column in one part.
_VALUES_AT_ONCE = 1 << 22
MOST_ROWS = 1 << 16
# Maximum number of distinct strings of a column. Slices need only the most frequent ones.
MOST_TEXTS = 1 << 16
OTHER = b"(other)"


@dataclass(frozen=True, kw_only=True)
class _Example:
    """An example and its inputs, copied so that its batch can be freed."""

    loss: float
    row: dict[str, Any]
    inputs: dict[str, Any]


class Worst:
    """Keeps the `MOST_WORST` examples of a stream that have the highest losses."""

    def __init__(self, spec: DatasetSpec, task: Task) -> None:
        """Store the dataset's features and the task."""
        self._spec, self._task = spec, task
        self._kept: list[_Example] = []
        self._seen = 0

    def look(self, inputs: Mapping[str, Any], part: Part) -> None:
        """Add a batch: inputs keyed by feature name, and a part with their labels and outputs."""
        each = self._task.example_losses(part.labels, part.outputs)
        for place in np.argsort(-each, kind="stable")[:MOST_WORST]:
            index = int(place)
            full = len(self._kept) == MOST_WORST
            if not np.isfinite(each[index]) or (full and each[index] <= self._kept[-1].loss):
                break
            label, output = tf.nest.map_structure(
                lambda values, at=index: values[at], (part.labels, part.outputs)
            )
            loss = float(each[index])
            described = self._task.described(label, output)
            row = {"index": self._seen + index, "loss": loss, **described}
            values = {name: self._copy(name, each[index]) for name, each in inputs.items()}
            self._kept.append(_Example(loss=loss, row=row, inputs=values))
            self._kept.sort(key=lambda example: -example.loss)
            del self._kept[MOST_WORST:]
        self._seen += len(each)

    def _copy(self, name: str, value: Any) -> Any:
        copy = np.array(value)
        return _shrink(copy) if _is_image(self._spec.features[name]) else copy

    def write(self, folder: Path) -> list[dict[str, Any]]:
        """Write images to `folder` and return a row for each example, highest loss first.

        A row has `index` (in the split), `loss` and the task's cells for the example. For an image,
        it also has `picture`, a path below `folder`. Otherwise, it has `inputs`, a string, and
        `columns`, the value of each input.
        """
        rows = []
        for place, example in enumerate(self._kept, start=1):
            row = dict(example.row)
            pictured = next((n for n in example.inputs if _is_image(self._spec.features[n])), None)
            if pictured is None:
                texts = (f"{n} {_values(np.ravel(v))}" for n, v in example.inputs.items())
                row["inputs"] = ", ".join(texts)
                row["columns"] = {n: _cell(v) for n, v in example.inputs.items()}
            else:
                row["picture"] = f"worst/{place:02d}.png"
                path = folder / row["picture"]
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(_png(example.inputs[pictured]))
            rows.append(row)
        return rows


def _is_image(feature: FeatureSpec) -> bool:
    # An image has at least two rows and two columns of pixels. Without a channel axis of size 1, 3
    # or 4, treat only uint8 arrays as images, because arrays of other types may be tables.
    match feature.sizes:
        case (height, width, channels):
            return feature.dtype != "string" and channels in _CHANNELS and min(height, width) > 1
        case (height, width):
            return feature.dtype == "uint8" and min(height, width) > 1
    return False


def _shrink(image: Any) -> Any:
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


def _cell(values: Any) -> float | int | str:
    flat = np.ravel(values)
    if flat.size == 1 and flat.dtype.kind in "iuf" and np.isfinite(flat[0]):
        number: float | int = flat[0].item()
        return number
    return _values(flat)


def _values(flat: Any) -> str:
    words = " ".join(text(value) for value in flat[:_VALUES_IN_TEXT])
    return words + (" ..." if len(flat) > _VALUES_IN_TEXT else "")


Answer = Callable[[Mapping[str, tf.Tensor]], Any]
_OUTPUT, _CHAMPION, _COLUMN = "output", "champion_output", "column"
# The names of the columns for the fields of a part.
_OF_PART = ("label", _OUTPUT, "weight", _COLUMN)


class Column:
    """A column on disk, written batch by batch and read in parts that fit into memory.

    The format is `.npy` (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html).
    Strings are stored as indices into a list of distinct values. The list has a limited length
    unless `has_all_texts` is set.
    """

    def __init__(self, path: Path, rows: int, *, has_all_texts: bool = False) -> None:
        """Create a column for `rows` examples."""
        self.path = path
        self._rows, self._has_all_texts = rows, has_all_texts
        self._file: IO[bytes] | None = None
        self._texts: dict[bytes, int] = {}
        self._text_values: Array = np.array([OTHER], dtype=object)

    def add(self, values: Array) -> None:
        """Append the values of a batch [n, ...]."""
        stored = self._numbers(values) if values.dtype == object else values
        if self._file is None:
            self._begin(stored)
        assert self._file is not None
        self._file.write(np.ascontiguousarray(stored).tobytes())

    def end(self) -> None:
        """Close the file, after which all values can be read."""
        if self._file is not None:
            self._file.close()
        self._text_values = np.array([*self._texts, OTHER], dtype=object)

    @property
    def rows_at_once(self) -> int:
        """The number of examples in a part."""
        return max(1, min(MOST_ROWS, _VALUES_AT_ONCE // max(1, math.prod(self._shape))))

    def read(self, begin: int, end: int) -> Array:
        """Return the values of the examples `begin:end`."""
        # Copy the values, because pages of a memory map would stay in memory.
        found = np.array(np.load(self.path, mmap_mode="r")[begin:end])
        return self._text_values[found] if self._texts else found

    def _begin(self, first: Array) -> None:
        self._shape = first.shape[1:]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb")
        header = {
            "descr": np.lib.format.dtype_to_descr(first.dtype),
            "fortran_order": False,
            "shape": (self._rows, *self._shape),
        }
        np.lib.format.write_array_header_1_0(self._file, header)

    def _numbers(self, values: Array) -> Array:
        found = np.empty(values.shape, np.int32)
        for place, each in np.ndenumerate(values):
            fits = self._has_all_texts or len(self._texts) < MOST_TEXTS
            if fits and each not in self._texts:
                self._texts[each] = len(self._texts)
            # Index -1 stands for all values beyond the limit.
            found[place] = self._texts.get(each, -1)
        return found


class Stored:
    """Examples on disk with a model's outputs. See `flotilla.trainer.tasks.base.Examples`."""

    def __init__(self, count: int, columns: Part) -> None:
        """Store the number of examples, and a part whose values are of type `Column`."""
        self.count = count
        self._columns = columns

    def parts(self) -> Iterator[Part]:
        """Yield all examples in parts that fit into memory."""
        leaves = [each for each in tf.nest.flatten(self._columns) if each is not None]
        size = min(each.rows_at_once for each in leaves)
        for begin in range(0, self.count, size):
            end = min(begin + size, self.count)
            yield tf.nest.map_structure(
                lambda column, ends=(begin, end): None if column is None else column.read(*ends),
                self._columns,
            )


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Outputs of the models. `unsound` is the number of examples with non-finite outputs."""

    own: Stored
    champion: Stored | None
    unsound: tuple[int, int]
    worst: Worst


class Writer:
    """Writes the outputs of the models for a stream of examples."""

    def __init__(self, folder: Path, scratch: Path, rows: int, task: Task) -> None:
        """Store predictions in `folder`, and columns that only metrics need in `scratch`."""
        self._folder, self._scratch, self.rows = folder, scratch, rows
        # Store all strings of the task's columns, because metrics by user need all user ids.
        self._all_texts = task.columns
        self._columns: dict[str, Any] = {}
        self.count = 0

    def add(self, name: str, tree: Any) -> None:
        """Append a batch to the columns called `name`."""
        if name not in self._columns:
            self._columns[name] = self._open_columns(name, tree)
        for column, values in zip(
            tf.nest.flatten(self._columns[name]), tf.nest.flatten(tree), strict=True
        ):
            if column is not None:
                column.add(values)

    def add_batch(self, part: Part) -> None:
        """Append a batch."""
        for name, tree in zip(_OF_PART, part, strict=True):
            self.add(name, tree)
        self.count += len(tf.nest.flatten(part.labels)[0])

    def close(self) -> None:
        """Close the files. Repeated calls are allowed."""
        for column in tf.nest.flatten(self._columns):
            if column is not None:
                column.end()

    def get(self, outputs: str) -> Stored | None:
        """Return the examples with the outputs stored under this name, or None without outputs."""
        if outputs not in self._columns:
            return None
        self.close()
        chosen = {**self._columns, _OUTPUT: self._columns[outputs]}
        return Stored(self.count, Part(*(chosen[name] for name in _OF_PART)))

    def _open_columns(self, name: str, tree: Any) -> Any:
        if tree is None:
            return None
        folder = self._scratch if name == _COLUMN else self._folder
        if not isinstance(tree, Mapping):
            return Column(folder / f"{name}.npy", self.rows)
        paths = {key: folder / f"{name}_{n}_{layer_name(key)}.npy" for n, key in enumerate(tree)}
        return {
            key: Column(path, self.rows, has_all_texts=name == _COLUMN and key in self._all_texts)
            for key, path in paths.items()
        }


def make_forward(objective: Objective, model: keras.Model) -> Callable[[Any], Any]:
    """Return a function that computes the outputs for a batch of inputs. It raises `UserError`."""

    @tf.function(reduce_retracing=True)
    def forward(inputs: Any) -> Any:
        return objective.task.outputs(cast_outputs(model(inputs, training=False)))

    def ask(inputs: Any) -> Any:
        with report_bad_input():
            return forward(inputs)

    return ask


def predict(  # noqa: PLR0913, PLR0917
    objective: Objective,
    model: keras.Model,
    spec: DatasetSpec,
    batches: tf.data.Dataset,
    writer: Writer,
    champion: Answer | None = None,
    count: Callable[[int], None] = lambda _examples: None,
) -> Predictions:
    """Predict all batches of a finite dataset from `labelled_columns`, and write the outputs.

    `count` is called with the number of examples in each batch.

    Raises `SplitError` if a label is invalid for the task or all weights are 0, and `UserError` for
    other user errors.
    """
    forward = make_forward(objective, model)
    worst = Worst(spec, objective.task)
    own_bad = other_bad = 0
    weight = 0.0
    for batch, columns in batches:
        inputs, labels, weights = _arrays(keras.utils.unpack_x_y_sample_weight(batch))
        named = inputs if isinstance(inputs, Mapping) else {spec.inputs[0]: inputs}
        objective.task.check_labels(labels)
        outputs = _arrays(forward(batch[0]))
        part = Part(labels, outputs, weights, _arrays(columns))
        bad = unsound(outputs)
        own_bad += bad
        weight += 1.0 if weights is None else float(weights.sum())
        if champion:
            answers = champion(named)
            other_bad += unsound(answers)
            writer.add(_CHAMPION, answers)
        writer.add_batch(part)
        # Non-finite outputs have no loss. The caller raises an error once all of them are counted.
        if not bad:
            worst.look(named, part)
        count(len(tf.nest.flatten(labels)[0]))
    own = writer.get(_OUTPUT)
    if own is None:
        raise UserError("there are no examples to predict")
    if not weight:
        raise SplitError(f"only examples of weight 0: {spec.weight!r} is 0 for all of them")
    return Predictions(
        own=own, champion=writer.get(_CHAMPION), unsound=(own_bad, other_bad), worst=worst
    )


def measure_predictions(objective: Objective, examples: Examples) -> dict[str, Any]:
    """Return the metrics, intervals and details of the task for `metrics.json`."""
    tally = objective.tally()
    for part in condensing(examples, [tally]):
        tally.add(part)
    return _merge(tally.result(), objective.task.details(examples))


def _merge(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings recursively. Lists are joined. Otherwise, the second value wins."""
    found = dict(one)
    for name, value in other.items():
        known = found.get(name)
        if isinstance(known, Mapping) and isinstance(value, Mapping):
            found[name] = _merge(known, value)
        elif isinstance(known, list) and isinstance(value, list):
            found[name] = [*known, *value]
        else:
            found[name] = value
    return found


def unsound(outputs: Any) -> int:
    """Return the number of examples with non-finite outputs."""
    rows = [
        np.isfinite(each.reshape(len(each), -1)).all(axis=1) for each in tf.nest.flatten(outputs)
    ]
    return int((~np.logical_and.reduce(rows)).sum())


def _arrays(tree: Any) -> Any:
    return tf.nest.map_structure(lambda each: None if each is None else np.asarray(each), tree)

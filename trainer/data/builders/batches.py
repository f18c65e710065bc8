"""Read a prepared TFDS dataset in batches, in the order of its files."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from tensorflow_datasets.core.dataset_builder import FileReaderBuilder

from flotilla.trainer.data.features import Fit, Selection
from flotilla.trainer.data.images import UndecodableError, resize, stored_image
from flotilla.trainer.data.source import Part
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.names import length_name
from flotilla.trainer.runtime.errors import UserError

BATCH = 1024
_ROWS = 64
BATCH_BYTES = 64 << 20
# Types of features that a record stores as a plain number, a string or an encoded image.
_PLAIN = (tfds.features.ClassLabel, tfds.features.Text, tfds.features.Image)


def batches(
    name: str, source: tfds.core.DatasetBuilder, selection: Selection, part: Part
) -> Iterator[dict[str, Any]]:
    """Yield the selected features of a part's examples in batches. Raises `UserError`."""
    split, first, end = part.origin, part.where["first"], part.where["end"]
    left = end - first
    whole = end == source.info.splits[split].num_examples
    try:
        for batch in _arrays(source, selection, split, (first, -1 if whole else left)):
            left -= len(next(iter(batch.values())))
            if left < 0:
                break
            for image in _list_encoded(selection):
                batch[image] = list(_store(selection.specs[image], batch[image], name, split))
            yield batch
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0]
        raise UserError(_read_error(name, source, split, reason)) from error
    if left:
        reason = f"{abs(left)} examples {'fewer' if left > 0 else 'more'} than expected"
        raise UserError(_read_error(name, source, split, reason))


def _arrays(
    source: tfds.core.DatasetBuilder, selection: Selection, split: str, part: tuple[int, int]
) -> Iterator[dict[str, Any]]:
    if selection.targets or not any(spec.varies for spec in selection.specs.values()):
        yield from _dataset(source, selection, split, part).prefetch(2).as_numpy_iterator()
        return
    # Read the examples one at a time, because with `data.map`, the values of a feature may differ
    # in shape.
    order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    examples = source.as_dataset(split=split, read_config=order).skip(part[0]).take(part[1])
    kept = examples.map(lambda example: {path: _get(example, path) for path in selection.specs})
    rows = kept.prefetch(_ROWS).as_numpy_iterator()
    while chunk := list(itertools.islice(rows, _ROWS)):
        yield {name: _column([row[name] for row in chunk]) for name in selection.specs}


def _column(values: list[Any]) -> Any:
    found = np.empty(len(values), object)
    for index, value in enumerate(values):
        # TensorFlow returns a nested sequence as a ragged value.
        found[index] = value.to_list() if hasattr(value, "to_list") else value
    return found


def _list_encoded(selection: Selection) -> list[str]:
    return [name for name, spec in selection.specs.items() if spec.stored == "image"]


def _store(spec: FeatureSpec, column: Any, name: str, split: str) -> Iterator[bytes]:
    for data in column:
        try:
            yield stored_image(data, spec.sizes[-1])
        except UndecodableError as error:
            raise UserError(
                f"data.dataset: the split {split!r} of {name} has an image that cannot be decoded "
                f"({error})"
            ) from error


def _dataset(
    source: tfds.core.DatasetBuilder, selection: Selection, split: str, part: tuple[int, int]
) -> tf.data.Dataset:
    """Return batches of `part[1]` examples (-1 for all), after skipping the first `part[0]`."""
    size = max(1, min(BATCH, BATCH_BYTES // max(1, selection.example_bytes)))
    skipped, taken = part
    if not selection.fits and _is_plain(source, selection):
        return _records(source, selection, split, part, size)
    order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    examples = source.as_dataset(split=split, read_config=order, decoders=_skip_decoding(selection))
    fits = selection.fits.items()
    varying = [name for name, spec in selection.specs.items() if spec.varies]
    stored = selection.specs.keys() - set(map(length_name, varying))

    def select(example: Any) -> dict[str, tf.Tensor]:
        values = {path: _get(example, path) for path in stored}
        return {**values, **{path: fit_value(fit, values[path]) for path, fit in fits}}

    found = examples.skip(skipped).take(taken).map(select, num_parallel_calls=4)
    return found.ragged_batch(size) if varying else found.batch(size, num_parallel_calls=2)


def _skip_decoding(selection: Selection) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path in _list_encoded(selection):
        *outer, last = path.split("/")
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = tfds.decode.SkipDecoding()
    return tree


def fit_value(fit: Fit, value: Any) -> tf.Tensor:
    """Convert a feature of one example to its fixed shape and type."""
    if fit.method == "multi_hot":
        return tf.reduce_any(tf.one_hot(value, *fit.shape, on_value=True, off_value=False), 0)
    if fit.method == "nearest":
        value = tf.image.resize(value, fit.shape[-3:-1], method="nearest")
    if fit.method == "resize":
        value = resize(value, *fit.shape[-3:-1])
    if isinstance(value, tf.RaggedTensor):
        value = tf.cast(value, fit.dtype) if value.dtype != fit.dtype else value
        return value.to_tensor(fit.fill, shape=fit.shape)
    value = value if value.dtype == fit.dtype else tf.cast(value, fit.dtype)
    value = value[tuple(slice(size) for size in fit.shape)]
    after = [[0, size - tf.shape(value)[axis]] for axis, size in enumerate(fit.shape)]
    # Give the fill value the type of the feature, because a Python number becomes a 32-bit tensor.
    padded = tf.pad(value, after, constant_values=tf.constant(fit.fill, fit.dtype))
    return tf.ensure_shape(padded, fit.shape)


def _is_plain(source: tfds.core.DatasetBuilder, selection: Selection) -> bool:
    if not isinstance(source, FileReaderBuilder):
        return False
    # Compare exact types, because a subclass may store its values in another form.
    return source.info.file_format == tfds.core.FileFormat.TFRECORD and all(
        type(connector) in _PLAIN and path in source.info.features
        for path, connector in selection.connectors.items()
    )


def _records(
    source: tfds.core.DatasetBuilder,
    selection: Selection,
    split: str,
    part: tuple[int, int],
    size: int,
) -> tf.data.Dataset:
    """Return parsed batches of records. This is faster than TFDS, which parses single records."""
    classes, encoded = tfds.features.ClassLabel, _list_encoded(selection)
    wire = {
        name: tf.io.FixedLenFeature((), tf.int64 if type(connector) is classes else tf.string)
        for name, connector in selection.connectors.items()
    }

    def parse(records: tf.Tensor) -> dict[str, tf.Tensor]:
        columns = tf.io.parse_example(records, wire)
        return {
            name: columns[name]
            if name in encoded
            else connector.decode_batch_example(columns[name])
            for name, connector in selection.connectors.items()
        }

    paths = [str(path) for path in source.info.splits[split].filepaths]
    records = tf.data.TFRecordDataset(paths).skip(part[0]).take(part[1])
    return records.batch(size).map(parse, num_parallel_calls=2)


def _get(example: Any, path: str) -> Any:
    if path in example:
        return example[path]
    outer, _, inner = path.partition("/")
    return _get(example[outer], inner)


def _read_error(name: str, source: tfds.core.DatasetBuilder, split: str, reason: str) -> str:
    return (
        f"data.dataset: the split {split!r} of {name} in {source.data_dir} cannot be read "
        f"({reason}); delete that folder, and the next run will prepare the dataset again"
    )

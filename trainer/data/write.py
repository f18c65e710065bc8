"""Read a prepared TFDS dataset in batches, in the order of its files, and write it into shards.

The format is TFRecord: for each record its length (8 bytes, little-endian), the masked crc32c of
the length, the record, and its masked crc32c (https://www.tensorflow.org/tutorials/load_data/tfrecord,
"TFRecords format details").
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

from trainer.data.examples.images import UndecodableError, resized, stored_image
from trainer.data.examples.lengths import with_lengths
from trainer.data.features import Selection
from trainer.data.records import encode
from trainer.data.shapes import Fit
from trainer.data.spec import SPLITS, FeatureSpec, length_name, shard_name
from trainer.data.splits import Plan
from trainer.data.targets import Target, refuse_weight
from trainer.errors import UserError

BUFFER_BYTES = 64 << 20
_MASK = 0xA282EAD8
_WORD = 0xFFFFFFFF


class ShardWriter:
    """Deals records out over the shards in turn, so that their sizes differ by at most one.

    A writer of TensorFlow's keeps its file open; a thousand shards would need a thousand. Records
    are gathered in memory instead, and appended when there are enough of them.
    """

    def __init__(self, folder: Path, split: str, count: int) -> None:
        """Write `count` shards of `split` into `folder`."""
        self._paths = [folder / shard_name(split, index, count) for index in range(count)]
        self._pending: list[list[bytes]] = [[] for _ in range(count)]
        self._pending_bytes = 0
        self._added = 0
        self._crcs = [0] * count

    def add(self, record: bytes) -> None:
        """Add a record to the shard whose turn it is."""
        framed = _frame(record)
        self._pending[self._added % len(self._paths)].append(framed)
        self._added += 1
        self._pending_bytes += len(framed)
        if self._pending_bytes >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what has been added."""
        for index, path in enumerate(self._paths):
            data = b"".join(self._pending[index])
            with path.open("ab") as file:
                file.write(data)
            self._crcs[index] = google_crc32c.extend(self._crcs[index], data)
            self._pending[index].clear()
        self._pending_bytes = 0

    @property
    def examples(self) -> list[int]:
        """Records of each shard."""
        share, more = divmod(self._added, len(self._paths))
        return [share + (index < more) for index in range(len(self._paths))]

    @property
    def crcs(self) -> list[str]:
        """The crc32c of each shard, as far as it is written."""
        return [f"{crc:08x}" for crc in self._crcs]


def _frame(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    return b"".join((length, _masked_crc(length), record, _masked_crc(record)))


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK) & _WORD)


BATCH = 1024
_ROWS = 64
BATCH_BYTES = 64 << 20
# What these are in a record is plain: a number, a text, an encoded image.
_PLAIN = (tfds.features.ClassLabel, tfds.features.Text, tfds.features.Image)


def batches(
    name: str, source: tfds.core.DatasetBuilder, selection: Selection, split: str
) -> Iterator[dict[str, Any]]:
    """Yield the selected features of a split's examples as arrays, by feature name.

    Raises:
        UserError: a file is missing or damaged, or holds not as many examples as announced.
    """
    left = source.info.splits[split].num_examples
    try:
        for given in _arrays(source, selection, split):
            # Those for `data.map` have no role yet, and no feature of their lengths.
            batch = with_lengths(selection.specs, given) if selection.targets else given
            left -= len(next(iter(given.values())))
            if left < 0:
                break
            for image in _encoded(selection):
                batch[image] = list(_stored(selection.specs[image], batch[image], name, split))
            yield batch
    except tf.errors.OpError as error:
        reason = error.message.splitlines()[0]
        raise UserError(_unreadable(name, source, split, reason)) from error
    if left:
        reason = f"{abs(left)} examples {'too few' if left > 0 else 'too many'}"
        raise UserError(_unreadable(name, source, split, reason))


def _arrays(
    source: tfds.core.DatasetBuilder, selection: Selection, split: str
) -> Iterator[dict[str, Any]]:
    if selection.targets or not any(spec.varies for spec in selection.specs.values()):
        yield from _dataset(source, selection, split).prefetch(2).as_numpy_iterator()
        return
    # Of any shape, also of images: one by one.
    order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    examples = source.as_dataset(split=split, read_config=order)
    kept = examples.map(lambda example: {path: _at(example, path) for path in selection.specs})
    rows = kept.prefetch(_ROWS).as_numpy_iterator()
    while chunk := list(itertools.islice(rows, _ROWS)):
        yield {name: _column([row[name] for row in chunk]) for name in selection.specs}


def _column(values: list[Any]) -> Any:
    found = np.empty(len(values), object)
    for index, value in enumerate(values):
        # A sequence of sequences has lists of its own.
        found[index] = value.to_list() if hasattr(value, "to_list") else value
    return found


def _encoded(selection: Selection) -> list[str]:
    return [name for name, spec in selection.specs.items() if spec.stored == "image"]


def _stored(spec: FeatureSpec, column: Any, name: str, split: str) -> Iterator[bytes]:
    for data in column:
        try:
            yield stored_image(data, spec.sizes[-1])
        except UndecodableError as error:
            raise UserError(
                f"data.dataset: the split {split!r} of {name} has an image that does not decode "
                f"({error})"
            ) from error


def _dataset(source: tfds.core.DatasetBuilder, selection: Selection, split: str) -> tf.data.Dataset:
    size = _batch_size(selection)
    if not selection.fits and _is_plain(source, selection):
        return _records(source, selection, split, size)
    order = tfds.ReadConfig(interleave_cycle_length=1, try_autocache=False)
    examples = source.as_dataset(split=split, read_config=order, decoders=_undecoded(selection))
    fits = selection.fits.items()
    varying = [name for name, spec in selection.specs.items() if spec.varies]
    stored = selection.specs.keys() - set(map(length_name, varying))

    def kept(example: Any) -> dict[str, tf.Tensor]:
        values = {path: _at(example, path) for path in stored}
        return {**values, **{path: fitted(fit, values[path]) for path, fit in fits}}

    found = examples.map(kept, num_parallel_calls=4)
    return found.ragged_batch(size) if varying else found.batch(size, num_parallel_calls=2)


def _undecoded(selection: Selection) -> dict[str, Any]:
    """Return what makes TFDS give the bytes of images that are stored as they came."""
    tree: dict[str, Any] = {}
    for path in _encoded(selection):
        *outer, last = path.split("/")
        inner = tree
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = tfds.decode.SkipDecoding()
    return tree


def _batch_size(selection: Selection) -> int:
    """Return how many examples are in memory at once: fewer of large ones."""
    sizes = (math.prod(spec.sizes) * _bytes_of(spec) for spec in selection.specs.values())
    return max(1, min(BATCH, BATCH_BYTES // max(1, sum(sizes))))


def _bytes_of(spec: FeatureSpec) -> int:
    return 1 if spec.dtype == "string" else tf.as_dtype(spec.dtype).size


def fitted(fit: Fit, value: Any) -> tf.Tensor:
    """Return one feature of one example in its fixed shape and type."""
    if fit.method == "multi_hot":
        return tf.reduce_any(tf.one_hot(value, *fit.shape, on_value=True, off_value=False), 0)
    if fit.method in {"resize", "nearest"}:
        value = _resized(fit, value)
    if isinstance(value, tf.RaggedTensor):
        value = tf.cast(value, fit.dtype) if value.dtype != fit.dtype else value
        return value.to_tensor(fit.fill, shape=fit.shape)
    value = value if value.dtype == fit.dtype else tf.cast(value, fit.dtype)
    value = value[tuple(slice(size) for size in fit.shape)]
    after = [[0, size - tf.shape(value)[axis]] for axis, size in enumerate(fit.shape)]
    # The fill has to have the type: a Python number would be one of 32 bits.
    padded = tf.pad(value, after, constant_values=tf.constant(fit.fill, fit.dtype))
    return tf.ensure_shape(padded, fit.shape)


def _resized(fit: Fit, images: tf.Tensor) -> tf.Tensor:
    *_, height, width, _ = fit.shape
    if fit.method == "nearest":
        return tf.image.resize(images, (height, width), method="nearest")
    return resized(images, height, width)


def _is_plain(source: tfds.core.DatasetBuilder, selection: Selection) -> bool:
    # An exact type: a subclass may store anything.
    return source.info.file_format == tfds.core.FileFormat.TFRECORD and all(
        type(connector) in _PLAIN and path in source.info.features
        for path, connector in selection.connectors.items()
    )


def _records(
    source: tfds.core.DatasetBuilder, selection: Selection, split: str, size: int
) -> tf.data.Dataset:
    """Parse whole batches of records: three times as fast as TFDS, which takes one by one."""
    classes, encoded = tfds.features.ClassLabel, _encoded(selection)
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
    return tf.data.TFRecordDataset(paths).batch(size).map(parse, num_parallel_calls=2)


def _at(example: Any, path: str) -> Any:
    if path in example:
        return example[path]
    outer, _, inner = path.partition("/")
    return _at(example[outer], inner)


def _unreadable(name: str, source: tfds.core.DatasetBuilder, split: str, reason: str) -> str:
    return (
        f"data.dataset: the split {split!r} of {name} in {source.data_dir} cannot be read "
        f"({reason}); remove that folder, and it is made again"
    )


@dataclass(frozen=True, kw_only=True)
class Written:
    """The content of the shards: examples of each shard by split, and what the targets hold."""

    examples: Mapping[str, list[int]]
    targets: Mapping[str, Target]
    fingerprint: str


def write(
    name: str, source: tfds.core.DatasetBuilder, selection: Selection, plan: Plan, folder: Path
) -> Written:
    """Write the shards of all splits into `folder`.

    Examples are in the order of the source, which TFDS shuffled when it wrote it.

    Raises:
        UserError: a label or a weight is none, or the source cannot be read.
    """
    writers = {split: ShardWriter(folder, split, count) for split, count in plan.shards.items()}
    targets = {each: Target(each, selection.specs[each]) for each in selection.targets}
    for origin, destinations in plan.targets.items():
        start = 0
        for batch in batches(name, source, selection, origin):
            chosen = destinations[start : start + len(batch[selection.targets[0]])]
            start += len(chosen)
            for split, record in zip(chosen, encode(selection.specs, batch), strict=True):
                writers[SPLITS[split]].add(record)
            if selection.weight:
                refuse_weight(selection.weight, name, origin, batch[selection.weight])
            for target in targets.values():
                target.refuse(name, origin, batch[target.name])
                for split in writers:
                    target.add(split, batch[target.name][chosen == SPLITS.index(split)])
    for writer in writers.values():
        writer.flush()
    return Written(
        examples={split: writer.examples for split, writer in writers.items()},
        targets=targets,
        fingerprint=_fingerprint(writers),
    )


def _fingerprint(writers: Mapping[str, ShardWriter]) -> str:
    crcs = {split: writer.crcs for split, writer in writers.items()}
    return hashlib.sha256(json.dumps(crcs, sort_keys=True).encode()).hexdigest()

"""Fetch shards and make batches of them: the only data code that a training task needs.

This module does not import TFDS. All of `training_batches` and `evaluation_batches` is a TensorFlow
graph, which a `ClusterCoordinator` can run in a worker process without our Python code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.data.examples import lengths
from flotilla.trainer.data.records import parse
from flotilla.trainer.data.shards.fed_records import (
    allow_tensor_seed,
    epoch_of_records,
    evaluation_records,
    training_records,
    use_private_threads,
)
from flotilla.trainer.data.shards.shard_store import AT_ONCE, Streaming
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import UserError

# Bytes held in memory for shuffling, unless the caller gives a number of examples.
SHUFFLE_BYTES = 256 << 20
_TEXT_BYTES = 1024
# Assumed length of a sequence before any is read.
_LONG = 256
# Images that one thread decodes at a time.
_DECODED = 64

Files = str | Sequence[str | Path]


def stage_shards(uri: str, directory: Path, split: str, index: int = 0, of: int = 1) -> list[Path]:
    """Fetch the shards `index`, `index + of`, ... of a split, verified, and return their paths.

    Other shards in `directory` are removed, since a reader may read every file there.

    Raises:
        UserError: the split does not exist, or there are more readers than shards.
    """
    names = DatasetSpec.from_manifest(storage.read_manifest(uri)).files(split)
    if of > len(names):
        raise UserError(
            f"data.shards: {of} readers cannot share the {len(names)} shards of {split!r}; "
            f"set data.shards to {of} or more"
        )
    wanted = names[index::of]
    storage.fetch(uri, directory, only=set(wanted).__contains__)
    for path in directory.glob("*.tfrecord"):
        if path.name not in wanted:
            path.unlink()
    return [directory / name for name in wanted]


@tf.autograph.experimental.do_not_convert
def training_batches(  # noqa: PLR0913
    spec: DatasetSpec,
    files: Files | Streaming,
    *,
    batch_size: int,
    seed: int | tf.Tensor,
    taken: int = 0,
    shuffle_buffer: int | None = None,
    buckets: Sequence[int] = (),
) -> tf.data.Dataset:
    """Return endless batches, in a new order in every epoch; see `to_keras_batch` for their form.

    An epoch holds each example once. All batches are full, so a batch may reach into the next
    epoch; no example is skipped at the boundary. The same seed gives the same order.

    The first `taken` examples are skipped without reading them if the whole split fits in memory.
    Otherwise training continues in another order.

    A pattern of `files`, such as "shards/*.tfrecord", is resolved where the dataset runs.
    `shuffle_buffer` examples are held in memory; the default takes 256 MiB. If the whole split
    fits, it is read and parsed once and every order is equally likely.

    Features that vary in length are padded to the longest of the batch. With `buckets`, a batch
    holds examples whose lengths fall into the same bucket.
    """
    held = _fitting(spec) if shuffle_buffer is None else shuffle_buffer
    if fits_in_memory(spec, held):
        batches = _batch_from_memory(spec, _whole(files, seed), seed, taken)
        batches = batches.rebatch(batch_size, drop_remainder=True)
    else:
        batches = _shuffle(files, seed + taken, held)
        if buckets and lengths.varying(spec):
            batches = lengths.bucket_batches(spec, batches, buckets, batch_size)
        else:
            batches = batches.batch(batch_size, drop_remainder=True)
        batches = batches.map(
            lambda records: to_keras_batch(spec, records), num_parallel_calls=_parallel(spec)
        )
    batches = batches.prefetch(2)
    return use_private_threads(batches) if isinstance(files, Streaming) else batches


@tf.autograph.experimental.do_not_convert
def evaluation_batches(
    spec: DatasetSpec,
    files: Files | Streaming,
    *,
    batch_size: int,
    part: int | tf.Tensor = 0,
    of: int = 1,
) -> tf.data.Dataset:
    """Return batches of each example once, in the order of the files.

    With `of` above 1, return every `of`-th batch, from number `part` on. With streaming shards the
    part is a contiguous range instead, so that few shards are needed.
    """
    if isinstance(files, Streaming):
        shards = spec.shards["validation"]
        mine = evaluation_records(files, shards, batch_size=batch_size, part=part, of=of)
    else:
        records = _paths(files).flat_map(tf.data.TFRecordDataset).batch(batch_size)
        mine = records.shard(of, tf.cast(part, tf.int64))
    batches = mine.map(
        lambda batch: to_keras_batch(spec, batch), num_parallel_calls=_parallel(spec)
    )
    batches = batches.prefetch(2)
    return use_private_threads(batches) if isinstance(files, Streaming) else batches


def read_columns(
    spec: DatasetSpec, files: Files, columns: Sequence[str], batch_size: int = 4096
) -> Iterator[dict[str, Any]]:
    """Yield only some columns of all examples, in the order of the files."""
    records = _paths(files).flat_map(tf.data.TFRecordDataset).batch(batch_size)
    yield from records.map(partial(parse_features, spec, columns)).as_numpy_iterator()


@tf.autograph.experimental.do_not_convert
def labelled_columns(
    spec: DatasetSpec, files: Files, *, batch_size: int, columns: Sequence[str]
) -> tf.data.Dataset:
    """Return `(batch, {column: values})`, in the order of `evaluation_batches`.

    The columns may be features that no model takes. Variable lengths are padded to the longest of
    all examples, so that the outputs of all batches have one shape.
    """
    found = lengths.longest(spec, _paths(files).flat_map(tf.data.TFRecordDataset))
    spec = lengths.fix_lengths(spec, found)

    def add_columns(records: tf.Tensor) -> tuple[tuple[Any, ...], dict[str, tf.Tensor]]:
        return to_keras_batch(spec, records), parse_features(spec, columns, records)

    records = _paths(files).flat_map(tf.data.TFRecordDataset)
    batches = records.batch(batch_size).map(add_columns, num_parallel_calls=_parallel(spec))
    return batches.prefetch(2)


def _paths(files: Files) -> tf.data.Dataset:
    if isinstance(files, str):
        return tf.data.Dataset.list_files(files, shuffle=False)
    return tf.data.Dataset.from_tensor_slices([str(path) for path in files])


def fits_in_memory(spec: DatasetSpec, held: int = 0) -> bool:
    """Say whether the whole training split fits in `held` examples or in 256 MiB."""
    return spec.examples("train") <= (held or _fitting(spec)) and not lengths.varying(spec)


def _fitting(spec: DatasetSpec) -> int:
    def size(name: str) -> int:
        feature = spec.features[name]
        dtype = tf.as_dtype(feature.dtype)
        elements = math.prod(_LONG if each is None else each for each in feature.shape)
        return elements * (_TEXT_BYTES if dtype == tf.string else dtype.size)

    return max(1, SHUFFLE_BYTES // sum(size(name) for name in spec.roles))


def _has_images(spec: DatasetSpec) -> bool:
    return any(spec.features[name].stored == "image" for name in spec.roles)


def _parallel(spec: DatasetSpec) -> int | None:
    """Return the number of batches parsed in parallel: images take a hundred times as long."""
    return tf.data.AUTOTUNE if _has_images(spec) else None


def _batch_from_memory(
    spec: DatasetSpec, records: tf.data.Dataset, seed: int | tf.Tensor, taken: int
) -> tf.data.Dataset:
    def reorder(example: Any, number: Any) -> Any:
        # The number of examples in this task's shards.
        count = tf.shape(tf.nest.flatten(example)[0], tf.int64)[0]
        epoch = number + taken // count
        order = tf.random.experimental.stateless_shuffle(tf.range(count), (seed, epoch))
        order = order[tf.where(number == 0, taken % count, 0) :]
        return tf.nest.map_structure(lambda values: tf.gather(values, order), example)

    parsed = _parse(spec, records, spec.examples("train")).cache().repeat()
    return tf.data.Dataset.zip((parsed, tf.data.Dataset.counter())).map(reorder)


def read_whole_split(spec: DatasetSpec, files: Files) -> tf.data.Dataset:
    """Return the training split as one element, in the order of the files."""
    records = _paths(files).flat_map(tf.data.TFRecordDataset)
    return _parse(spec, records, spec.examples("train"))


def _parse(spec: DatasetSpec, records: tf.data.Dataset, examples: int) -> tf.data.Dataset:
    batches = records.batch(_DECODED if _has_images(spec) else examples)
    parsed = batches.map(
        lambda each: to_keras_batch(spec, each), num_parallel_calls=_parallel(spec)
    )
    return parsed.rebatch(examples)


def _whole(files: Files | Streaming, seed: int | tf.Tensor) -> tf.data.Dataset:
    if isinstance(files, Streaming):
        return epoch_of_records(files, seed)
    return _paths(files).flat_map(tf.data.TFRecordDataset)


def _shuffle(files: Files | Streaming, seed: int | tf.Tensor, held: int) -> tf.data.Dataset:
    if isinstance(files, Streaming):
        return training_records(files, seed, held)
    with allow_tensor_seed():
        # Even the largest number of paths is small compared with the examples.
        mixed = _paths(files).shuffle(1 << 16, seed=seed, reshuffle_each_iteration=True)
        records = mixed.interleave(tf.data.TFRecordDataset, cycle_length=AT_ONCE, block_length=16)
        return records.shuffle(held, seed=seed, reshuffle_each_iteration=True).repeat()


def to_keras_batch(spec: DatasetSpec, records: tf.Tensor) -> tuple[Any, ...]:
    """Return a Keras batch: inputs, labels, and weights if there are any.

    Several inputs or labels are mappings by feature name. Weights are float32.
    """
    values = parse_features(spec, spec.roles, records)
    inputs, labels = (_one_or_all(names, values) for names in (spec.inputs, spec.targets))
    if not spec.weight:
        return inputs, labels
    return inputs, labels, tf.cast(values[spec.weight], tf.float32)


def parse_features(
    spec: DatasetSpec, names: Sequence[str], records: tf.Tensor
) -> dict[str, tf.Tensor]:
    """Return some features of records; with swapped classes, 1 is the positive class."""
    values = parse({name: spec.features[name] for name in names}, records)
    return {name: _swap(v) if name in spec.swapped else v for name, v in values.items()}


def _swap(values: tf.Tensor) -> tf.Tensor:
    """Swap the numbers of two classes; other values stay."""
    if values.dtype == tf.bool:
        return ~values
    return tf.where((values == 0) | (values == 1), 1 - values, values)


def _one_or_all(names: Sequence[str], values: dict[str, tf.Tensor]) -> Any:
    return values[names[0]] if len(names) == 1 else {name: values[name] for name in names}

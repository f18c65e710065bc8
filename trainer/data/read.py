"""Fetch shards, and make batches of them: the only part of the data that a task of a cluster needs.

Nothing here imports TFDS. All of `training_batches` and `evaluation_batches` is a TensorFlow graph,
which a `ClusterCoordinator` can run in a worker's process, where none of our Python runs.
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
    epoch_of_records,
    evaluation_records,
    no_seed_of_the_graph,
    on_own_threads,
    training_records,
)
from flotilla.trainer.data.shards.shard_store import AT_ONCE, Streaming
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import UserError

# Of what is held in memory to be shuffled, unless the caller says how many examples.
SHUFFLE_BYTES = 256 << 20
_TEXT_BYTES = 1024
# What a sequence is taken for, before any is read.
_LONG = 256
# Images that one thread decodes at a time.
_DECODED = 64

Files = str | Sequence[str | Path]


def stage_shards(uri: str, directory: Path, split: str, index: int = 0, of: int = 1) -> list[Path]:
    """Fetch the shards `index`, `index + of`, ... of a split, verified, and return their paths.

    Other shards in `directory` are removed, since a reader may take all that it finds there.

    Raises:
        UserError: no such split, or more readers than shards.
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

    An epoch holds each example once. Batches are full, so that one may reach into the next epoch:
    nothing is skipped at the seam. The same seed gives the same order.

    So many examples that were `taken` before are passed over, without reading them, where the whole
    split fits in memory. Otherwise another order begins for them.

    A pattern of `files`, such as "shards/*.tfrecord", is resolved where the dataset runs.
    `shuffle_buffer` examples are held in memory; by default as many as take 256 MiB. Where the
    whole split fits, it is read and parsed once and every order is equally likely.

    Features that vary in length are padded to the longest of the batch. With `buckets` a batch is
    of examples that fall between the same two of these lengths.
    """
    held = _fitting(spec) if shuffle_buffer is None else shuffle_buffer
    if fits_in_memory(spec, held):
        batches = _from_memory(spec, _whole(files, seed), seed, taken)
        batches = batches.rebatch(batch_size, drop_remainder=True)
    else:
        batches = _shuffled(files, seed + taken, held)
        if buckets and lengths.varying(spec):
            batches = lengths.bucket_batches(spec, batches, buckets, batch_size)
        else:
            batches = batches.batch(batch_size, drop_remainder=True)
        batches = batches.map(
            lambda records: to_keras_batch(spec, records), num_parallel_calls=_parallel(spec)
        )
    batches = batches.prefetch(2)
    return on_own_threads(batches) if isinstance(files, Streaming) else batches


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

    With `of` above 1 it is every `of`-th of these batches, from number `part` on. Of shards that
    come and go it is as many of them in a row, so that few shards are needed.
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
    return on_own_threads(batches) if isinstance(files, Streaming) else batches


def read_columns(
    spec: DatasetSpec, files: Files, columns: Sequence[str], batch_size: int = 4096
) -> Iterator[dict[str, Any]]:
    """Yield some columns alone of all examples, in the order of the files."""
    records = _paths(files).flat_map(tf.data.TFRecordDataset).batch(batch_size)
    yield from records.map(partial(parse_features, spec, columns)).as_numpy_iterator()


@tf.autograph.experimental.do_not_convert
def labelled_columns(
    spec: DatasetSpec, files: Files, *, batch_size: int, columns: Sequence[str]
) -> tf.data.Dataset:
    """Return `(batch, {column: values})`, in the order of `evaluation_batches`.

    The columns may be features of the dataset that no model takes. What varies in length is padded
    to the longest of all examples, so that the outputs of all batches have one shape.
    """
    found = lengths.longest(spec, _paths(files).flat_map(tf.data.TFRecordDataset))
    spec = lengths.fix_lengths(spec, found)

    def with_columns(records: tf.Tensor) -> tuple[tuple[Any, ...], dict[str, tf.Tensor]]:
        return to_keras_batch(spec, records), parse_features(spec, columns, records)

    records = _paths(files).flat_map(tf.data.TFRecordDataset)
    batches = records.batch(batch_size).map(with_columns, num_parallel_calls=_parallel(spec))
    return batches.prefetch(2)


def _paths(files: Files) -> tf.data.Dataset:
    if isinstance(files, str):
        return tf.data.Dataset.list_files(files, shuffle=False)
    return tf.data.Dataset.from_tensor_slices([str(path) for path in files])


def fits_in_memory(spec: DatasetSpec, held: int = 0) -> bool:
    """Say whether the training split is held as a whole, in `held` examples or in 256 MiB."""
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
    """Return how many batches are parsed at once: images take a hundred times as long."""
    return tf.data.AUTOTUNE if _has_images(spec) else None


def _from_memory(
    spec: DatasetSpec, records: tf.data.Dataset, seed: int | tf.Tensor, taken: int
) -> tf.data.Dataset:
    def reordered(example: Any, number: Any) -> Any:
        # Of the shards that this task has.
        count = tf.shape(tf.nest.flatten(example)[0], tf.int64)[0]
        epoch = number + taken // count
        order = tf.random.experimental.stateless_shuffle(tf.range(count), (seed, epoch))
        order = order[tf.where(number == 0, taken % count, 0) :]
        return tf.nest.map_structure(lambda values: tf.gather(values, order), example)

    parsed = _parsed(spec, records, spec.examples("train")).cache().repeat()
    return tf.data.Dataset.zip((parsed, tf.data.Dataset.counter())).map(reordered)


def whole_in_memory(spec: DatasetSpec, files: Files) -> tf.data.Dataset:
    """Return the training split as one element, in the order of the files."""
    records = _paths(files).flat_map(tf.data.TFRecordDataset)
    return _parsed(spec, records, spec.examples("train"))


def _parsed(spec: DatasetSpec, records: tf.data.Dataset, examples: int) -> tf.data.Dataset:
    batches = records.batch(_DECODED if _has_images(spec) else examples)
    parsed = batches.map(
        lambda each: to_keras_batch(spec, each), num_parallel_calls=_parallel(spec)
    )
    return parsed.rebatch(examples)


def _whole(files: Files | Streaming, seed: int | tf.Tensor) -> tf.data.Dataset:
    if isinstance(files, Streaming):
        return epoch_of_records(files, seed)
    return _paths(files).flat_map(tf.data.TFRecordDataset)


def _shuffled(files: Files | Streaming, seed: int | tf.Tensor, held: int) -> tf.data.Dataset:
    if isinstance(files, Streaming):
        return training_records(files, seed, held)
    with no_seed_of_the_graph():
        # Even the most paths that a dataset may have are few compared with its examples.
        mixed = _paths(files).shuffle(1 << 16, seed=seed, reshuffle_each_iteration=True)
        records = mixed.interleave(tf.data.TFRecordDataset, cycle_length=AT_ONCE, block_length=16)
        return records.shuffle(held, seed=seed, reshuffle_each_iteration=True).repeat()


def to_keras_batch(spec: DatasetSpec, records: tf.Tensor) -> tuple[Any, ...]:
    """Return a batch as Keras has it: inputs, labels, and weights where there are some.

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
    """Return some features of records; of two classes 1 is the positive one."""
    values = parse({name: spec.features[name] for name in names}, records)
    return {name: _swapped(v) if name in spec.swapped else v for name, v in values.items()}


def _swapped(values: tf.Tensor) -> tf.Tensor:
    """Return the numbers of two classes in the other order; what is none of them stays."""
    if values.dtype == tf.bool:
        return ~values
    return tf.where((values == 0) | (values == 1), 1 - values, values)


def _one_or_all(names: Sequence[str], values: dict[str, tf.Tensor]) -> Any:
    return values[names[0]] if len(names) == 1 else {name: values[name] for name in names}

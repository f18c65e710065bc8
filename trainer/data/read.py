"""Fetch shards and make batches of them: the only data code that a training task needs.

This module does not import TFDS. `training_batches`, `evaluation_batches` and `make_random_access`
return pure TensorFlow graphs, so a `ClusterCoordinator` can run them in a worker without Python
code of this package. Streaming shards are read in a graph too, as a client of `ShardFeed`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any

import tensorflow as tf

from flotilla.trainer import storage
from flotilla.trainer.data import blocks
from flotilla.trainer.data.shard_feed import (
    ASK,
    FAILED,
    FOLDER,
    TRAIN,
    VALIDATION,
    Streaming,
    part_range,
)
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import UserError

# Size of the shuffle buffer in bytes, unless the caller gives a number of examples.
SHUFFLE_BYTES = 256 << 20
_TEXT_BYTES = 1024
# Assumed length of a sequence before any has been read.
_LONG = 256
# Stored forms that are completed per batch: images are decoded, and sequences padded.
_COMPLETED = ("image", "sequence")
_MOST_SHARDS = 1 << 20
# Number of images that a thread decodes at a time.
_DECODED = 64

Files = str | Sequence[str | Path]


def stage_shards(uri: str, directory: Path, split: str, index: int = 0, of: int = 1) -> list[Path]:
    """Fetch and verify the shards `index`, `index + of`, ... of a split, and return their paths.

    Other shards in `directory` are deleted, because a reader may read every file there. Raises
    `UserError` if the split does not exist, or has fewer shards than `of`, the number of readers.
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
    """Return endless batches, in a new order in every epoch. See `to_keras_batch` for their form.

    An epoch contains each example once. All batches are full, so a batch may extend into the next
    epoch. No example is skipped at the boundary. The same seed gives the same order.

    If the whole split fits in memory, the first `taken` examples of the order are skipped.
    Otherwise, training continues in another order.

    A pattern of `files`, such as "shards/*.tfrecord", is resolved where the dataset runs.

    If the whole split fits in memory, it is read and parsed once, and every order is equally
    likely. Otherwise, runs of blocks are read in random order into a buffer of `shuffle_buffer`
    examples, by default 256 MiB. Blocks are drawn from the buffer at random, and the rows of
    `blocks.MIXED` blocks at a time are permuted. Files given as a pattern then need an index of
    the blocks (`blocks.write_index`).

    Sequences are padded to the longest one of the batch. With `buckets`, a batch has examples whose
    lengths fall into the same bucket.
    """
    if fits_in_memory(spec, shuffle_buffer):
        batches = _batch_from_memory(spec, files, seed, taken)
        batches = batches.rebatch(batch_size, drop_remainder=True)
    else:
        names = dict.fromkeys([*spec.roles, *(blocks.length_names(spec) if buckets else ())])
        windows = _shuffle(spec, [*names], files, seed + taken, shuffle_buffer)
        if buckets and blocks.varying(spec):
            windows = blocks.fill_batches(spec, windows, buckets, batch_size)
        make = partial(to_keras_batch, spec)
        batches = _batch(spec, windows, make, batch_size, drop_remainder=True)
    batches = batches.prefetch(2)
    return _use_private_threads(batches) if isinstance(files, Streaming) else batches


@tf.autograph.experimental.do_not_convert
def evaluation_batches(
    spec: DatasetSpec,
    files: Files | Streaming,
    *,
    batch_size: int,
    part: int | tf.Tensor = 0,
    of: int = 1,
) -> tf.data.Dataset:
    """Return batches that contain each example once, in the order of the files.

    If `of` is above 1, return every `of`-th batch, starting with batch `part`. With streaming
    shards, return a contiguous range of batches instead, so that few shards are needed.
    """
    make = partial(to_keras_batch, spec)
    if isinstance(files, Streaming):
        parse = partial(_parse, spec, spec.roles)
        shards = spec.shards["validation"]
        rows = _evaluation_rows(files, shards, parse, batch_size=batch_size, part=part, of=of)
        return _use_private_threads(_batch(spec, rows, make, batch_size).prefetch(2))
    rows = read_rows(spec, files, spec.roles)
    return _batch(spec, rows, make, batch_size, part=part, of=of).prefetch(2)


def read_columns(
    spec: DatasetSpec, files: Files, columns: Sequence[str], batch_size: int = 4096
) -> Iterator[dict[str, Any]]:
    """Yield batches with the given columns of all examples, in the order of the files."""
    rows = read_rows(spec, files, columns)
    make = partial(complete_features, spec, columns)
    yield from _batch(spec, rows, make, batch_size).prefetch(2).as_numpy_iterator()


@tf.autograph.experimental.do_not_convert
def labelled_columns(
    spec: DatasetSpec, files: Files, *, batch_size: int, columns: Sequence[str]
) -> tf.data.Dataset:
    """Return pairs of a batch and a dict of columns, in the order of `evaluation_batches`.

    The columns may be features that no model uses. Sequences are padded to the longest one of all
    examples, so that the outputs of all batches have the same shape.
    """
    if blocks.varying(spec):
        windows = read_rows(spec, files, blocks.length_names(spec))
        spec = blocks.fix_lengths(spec, blocks.longest(spec, windows))

    def make(rows: blocks.Rows) -> tuple[tuple[Any, ...], dict[str, tf.Tensor]]:
        return to_keras_batch(spec, rows), complete_features(spec, columns, rows)

    rows = read_rows(spec, files, [*dict.fromkeys([*spec.roles, *columns])])
    return _batch(spec, rows, make, batch_size).prefetch(2)


def read_rows(spec: DatasetSpec, files: Files, names: Sequence[str]) -> tf.data.Dataset:
    """Return all examples as windows of the features `names`, in the order of the files."""
    return _parse(spec, names, _paths(files).flat_map(tf.data.TFRecordDataset))


def _paths(files: Files) -> tf.data.Dataset:
    if isinstance(files, str):
        return tf.data.Dataset.list_files(files, shuffle=False)
    return tf.data.Dataset.from_tensor_slices([str(path) for path in files])


def fits_in_memory(spec: DatasetSpec, held: int | None = None) -> bool:
    """Return whether `train` has fixed lengths and at most `held` rows or, without it, 256 MiB."""
    most = _fitting(spec) if held is None else held
    return spec.examples("train") <= most and not blocks.varying(spec)


def _fitting(spec: DatasetSpec) -> int:
    def size(name: str) -> int:
        feature = spec.features[name]
        dtype = tf.as_dtype(feature.dtype)
        elements = math.prod(_LONG if each is None else each for each in feature.shape)
        return elements * (_TEXT_BYTES if dtype == tf.string else dtype.size)

    return max(1, SHUFFLE_BYTES // sum(size(name) for name in spec.roles))


def _has_images(spec: DatasetSpec) -> bool:
    return any(spec.features[name].stored == "image" for name in spec.roles)


def _batch_from_memory(
    spec: DatasetSpec, files: Files | Streaming, seed: int | tf.Tensor, taken: int
) -> tf.data.Dataset:
    def reorder(example: Any, number: Any) -> Any:
        count = tf.shape(tf.nest.flatten(example)[0], tf.int64)[0]
        epoch = number + taken // count
        order = tf.random.experimental.stateless_shuffle(tf.range(count), (seed, epoch))
        order = order[tf.where(number == 0, taken % count, 0) :]
        return _gather(example, order)

    if isinstance(files, Streaming):
        rows = _parse(spec, spec.roles, _epoch_of_blocks(files, seed))
    else:
        rows = read_rows(spec, files, spec.roles)
    whole = _make_whole(spec, rows).cache().repeat()
    return tf.data.Dataset.zip((whole, tf.data.Dataset.counter())).map(reorder)


def _make_whole(spec: DatasetSpec, rows: tf.data.Dataset) -> tf.data.Dataset:
    """Return a dataset with one element, all rows of the training split."""
    examples = spec.examples("train")
    size = _DECODED if _has_images(spec) else examples
    return _batch(spec, rows, partial(to_keras_batch, spec), size).rebatch(examples)


def _shuffle(
    spec: DatasetSpec,
    names: Sequence[str],
    files: Files | Streaming,
    seed: int | tf.Tensor,
    held: int | None,
) -> tf.data.Dataset:
    """Return endless windows in random order. No window extends into the next epoch."""
    if not isinstance(files, Streaming):
        paths = _paths(files).batch(_MOST_SHARDS).get_single_element()
        index = _index(files)

    def shuffle_epoch(epoch: tf.Tensor) -> tf.data.Dataset:
        own = tf.cast(seed, tf.int64) + 104_729 * epoch
        if isinstance(files, Streaming):
            read = _epoch_of_blocks(files, seed, epoch)
        else:
            read = blocks.shuffle_blocks(paths, index, (seed, epoch))
        with _allow_tensor_seed():
            return read.shuffle(_count_held(spec, held), seed=own).batch(
                _count_blocks(spec, blocks.MIXED)
            )

    windows = tf.data.Dataset.counter().flat_map(shuffle_epoch)
    # Prepare the next window while this one is in use.
    features = {name: spec.features[name] for name in names}
    return blocks.permute_windows(features, windows, seed).prefetch(1)


def _index(files: Files) -> tf.Tensor:
    if isinstance(files, str):
        content = tf.io.read_file(str(PurePath(files).with_name(blocks.INDEX_FILE)))
    else:
        content = blocks.find_blocks([Path(path) for path in files])
    return blocks.decode_index(content)


def _count_held(spec: DatasetSpec, examples: int | None) -> int:
    found = max(1, (_fitting(spec) if examples is None else examples) // spec.block_rows)
    if examples is None and spec.block_rows > 1:
        return max(found, SHUFFLE_BYTES // blocks.BYTES)
    return found


def _count_blocks(spec: DatasetSpec, most: int) -> int:
    """Return `most`, or 1 if each block has a single row, because such rows may be large."""
    return most if spec.block_rows > 1 else 1


def _parse(spec: DatasetSpec, names: Sequence[str], records: tf.data.Dataset) -> tf.data.Dataset:
    features = {name: spec.features[name] for name in names}
    count = _count_blocks(spec, blocks.IN_ORDER)
    return records.batch(count).map(partial(blocks.parse_blocks, features))


def _batch(  # noqa: PLR0913
    spec: DatasetSpec,
    windows: tf.data.Dataset,
    make: Callable[[blocks.Rows], Any],
    size: int,
    *,
    part: int | tf.Tensor = 0,
    of: int = 1,
    drop_remainder: bool = False,
) -> tf.data.Dataset:
    """Return batches completed by `make`: all, or batches `part`, `part + of`, ... if `of` > 1."""
    # If no feature has to be completed per batch, applying `make` to whole windows is cheaper.
    late = any(spec.features[name].stored in _COMPLETED for name in windows.element_spec)
    batches = windows if late else windows.map(make)
    batches = batches.rebatch(size, drop_remainder=drop_remainder)
    if of > 1:
        batches = batches.shard(of, tf.cast(part, tf.int64))
    # Decode images in parallel, because they take 100 times as long as other features.
    parallel = tf.data.AUTOTUNE if _has_images(spec) else None
    return batches.map(make, num_parallel_calls=parallel) if late else batches


def to_keras_batch(spec: DatasetSpec, rows: blocks.Rows) -> tuple[Any, ...]:
    """Return a Keras batch: inputs, labels, and weights if there are any.

    If there are several inputs or labels, they are a dict by feature name. Weights are float32.
    """
    values = complete_features(spec, spec.roles, rows)
    inputs, labels = (_one_or_all(names, values) for names in (spec.inputs, spec.targets))
    if not spec.weight:
        return inputs, labels
    return inputs, labels, tf.cast(values[spec.weight], tf.float32)


def complete_features(
    spec: DatasetSpec, names: Sequence[str], rows: blocks.Rows
) -> dict[str, tf.Tensor]:
    """Return the features `names` of a batch. Swap the two classes of targets in `spec.swapped`."""
    values = blocks.complete(spec.features, {name: rows[name] for name in names})
    return {name: _swap(v) if name in spec.swapped else v for name, v in values.items()}


def _swap(values: tf.Tensor) -> tf.Tensor:
    if values.dtype == tf.bool:
        return ~values
    return tf.where((values == 0) | (values == 1), 1 - values, values)


def _one_or_all(names: Sequence[str], values: dict[str, tf.Tensor]) -> Any:
    return values[names[0]] if len(names) == 1 else {name: values[name] for name in names}


# Minimum number of consecutive examples per read, if the split is not held in memory.
RUN = 8
# Runs per block. With shorter runs, a batch parses more blocks. With longer runs, rows mix less.
_RUNS = 8
_AT_ONCE = 4


@dataclass(frozen=True, kw_only=True)
class ByNumber:
    """Graphs with which a worker reads examples by number.

    `held` returns a dataset of one element, which is the worker's state. `read` maps this element
    and a vector of example numbers to a batch. Reading is fastest in runs of `run` consecutive
    examples.
    """

    held: Callable[[], tf.data.Dataset]
    read: Callable[[Any, tf.Tensor], Any]
    run: int


def make_random_access(
    spec: DatasetSpec, folder: str, *, in_memory: bool | None = None
) -> ByNumber:
    """Return the graphs for the training split in `folder`, a path on the worker."""
    files = [f"{folder}/{name}" for name in spec.files("train")]
    if fits_in_memory(spec) if in_memory is None else in_memory:
        rows = partial(read_rows, spec, files, spec.roles)
        return ByNumber(held=lambda: _make_whole(spec, rows()), read=_gather, run=1)

    def held() -> tf.data.Dataset:
        path = tf.data.Dataset.from_tensors(f"{folder}/{blocks.INDEX_FILE}")
        return path.map(lambda path: blocks.decode_index(tf.io.read_file(path)))

    def read(index: tf.Tensor, numbers: tf.Tensor) -> Any:
        return to_keras_batch(spec, _read_rows(spec, files, index, numbers))

    run = max(RUN, spec.block_rows // _RUNS)
    return ByNumber(held=held, read=read, run=run)


def _gather(examples: Any, numbers: tf.Tensor) -> Any:
    return tf.nest.map_structure(lambda values: tf.gather(values, numbers), examples)


def _read_rows(
    spec: DatasetSpec, files: Sequence[str], index: tf.Tensor, numbers: tf.Tensor
) -> blocks.Rows:
    shards, size = spec.shards["train"], spec.block_rows
    ends = tf.constant([*accumulate(shards, initial=0)], tf.int64)
    block_ends = tf.constant(
        [*accumulate((-(-rows // size) for rows in shards), initial=0)], tf.int64
    )
    shard = tf.searchsorted(ends, numbers, side="right") - 1
    within = numbers - tf.gather(ends, shard)
    block, place = tf.unique(tf.gather(block_ends, shard) + within // size, tf.int64)
    of = tf.searchsorted(block_ends, block, side="right") - 1
    before = (block - tf.gather(block_ends, of)) * size
    rows = tf.minimum(tf.gather(tf.constant(shards, tf.int64), of) - before, size)
    read = _read_blocks(
        tf.gather(tf.constant(list(files)), of), tf.gather(index[:, blocks.OFFSET], block)
    )
    found = blocks.parse_blocks({name: spec.features[name] for name in spec.roles}, read)
    first = tf.cumsum(rows, exclusive=True)
    return blocks.gather_rows(found, tf.gather(first, place) + within % size)


def _read_blocks(names: tf.Tensor, offsets: tf.Tensor) -> tf.Tensor:
    def read(name: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
        return blocks.read_blocks(name, offset).take(1).get_single_element()

    found = tf.data.Dataset.from_tensor_slices((names, offsets))
    found = found.map(read, num_parallel_calls=_AT_ONCE)
    return found.batch(tf.size(offsets, tf.int64)).get_single_element()


# Number of private threads for datasets. Datasets that wait for shards would block shared threads.
_THREADS = 8
_NOTHING = "nothing"


def _epoch_of_blocks(
    streaming: Streaming, seed: int | tf.Tensor, epoch: int | tf.Tensor = 0
) -> tf.data.Dataset:
    """Return the training blocks of an epoch, interleaved from several shards."""
    names = _names(streaming, TRAIN, epoch, seed)
    read = partial(_read_fed, streaming, TRAIN)
    return names.interleave(read, cycle_length=streaming.at_once, block_length=1)


def _evaluation_rows(  # noqa: PLR0913
    streaming: Streaming,
    shards: Sequence[int],
    parse: Callable[[tf.data.Dataset], tf.data.Dataset],
    *,
    batch_size: int,
    part: int | tf.Tensor,
    of: int,
) -> tf.data.Dataset:
    """Return one of `of` parts of the validation split, as windows of rows.

    A part consists of whole batches. `shards` has the number of examples of each validation shard,
    and `parse` converts blocks to windows.
    """
    ranges = [part_range(shards, batch_size, number, of) for number in range(of)]
    part = tf.cast(part, tf.int64)
    skip, take = (
        tf.gather(tf.constant([getattr(each, name) for each in ranges], tf.int64), part)
        for name in ("skip", "take")
    )
    names = _names(streaming, VALIDATION, part, 0)
    rows = parse(names.flat_map(partial(_read_fed, streaming, VALIDATION)))
    done = parse(_done(streaming, VALIDATION, tf.constant("")))
    return blocks.slice_windows(rows, skip, take).concatenate(done)


def _use_private_threads(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Run a dataset in a private thread pool, because it may block."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = _THREADS
    return batches.with_options(options)


@contextmanager
def _allow_tensor_seed() -> Iterator[None]:
    """Clear the graph's seed in this block, because a tensor seed fails if that seed is 0."""
    graph = tf.compat.v1.get_default_graph()
    before, graph.seed = graph.seed, None
    try:
        yield
    finally:
        graph.seed = before


def _names(
    streaming: Streaming, reader: str, epoch: int | tf.Tensor, seed: int | tf.Tensor
) -> tf.data.Dataset:
    """Return the paths of an epoch's shards, each as soon as its shard is on disk."""
    epoch, seed = (tf.strings.as_string(tf.cast(each, tf.int64)) for each in (epoch, seed))

    def name_shard(number: tf.Tensor) -> tf.data.Dataset:
        parts = [reader, streaming.attempt, epoch, tf.strings.as_string(number)]
        key = tf.strings.join(parts, separator=" ")
        gate = tf.strings.join([f"{FOLDER}/{reader}.gate", tf.strings.as_string(number % 2)])
        asked = _send(tf.strings.join(["next ", key, " ", seed, "\n"]))
        # The gate has no records. Opening it blocks until the feed opens it for writing.
        passed = tf.data.FixedLengthRecordDataset(gate, record_bytes=1)
        answer = tf.data.Dataset.from_tensors(tf.strings.join([f"{FOLDER}/", key])).map(_read)
        answers = tf.data.Dataset.counter().flat_map(
            lambda _: asked.concatenate(passed).concatenate(answer)
        )
        return answers.filter(lambda found: found != _NOTHING).take(1)

    names = tf.data.Dataset.counter().flat_map(name_shard)
    return names.take_while(lambda name: name != "")


def _read(place: tf.Tensor) -> tf.Tensor:
    """Return the content of an answer file, or `_NOTHING` if the file does not exist."""
    is_there = tf.size(tf.io.matching_files(place)) > 0
    answer = tf.cond(is_there, lambda: tf.io.read_file(place), lambda: tf.constant(_NOTHING))
    has_failed = tf.debugging.Assert(answer != FAILED, ["no more shards will arrive"])
    with tf.control_dependencies([has_failed]):
        return tf.identity(answer)


def _read_fed(streaming: Streaming, reader: str, name: tf.Tensor) -> tf.data.Dataset:
    return tf.data.TFRecordDataset(name).concatenate(_done(streaming, reader, name))


def _done(streaming: Streaming, reader: str, name: tf.Tensor) -> tf.data.Dataset:
    """Return an empty dataset that reports a shard as read, or all shards if `name` is empty."""
    words = ["done", reader, streaming.attempt, name]
    return _send(tf.strings.join([tf.strings.join(words, separator=" "), "\n"]))


def _send(line: tf.Tensor) -> tf.data.Dataset:
    """Return an empty dataset that writes a line to the request pipe when it is read."""

    def write(line: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies([tf.io.write_file(ASK, line)]):
            return tf.identity(line)

    return tf.data.Dataset.from_tensors(line).map(write).filter(lambda _: False)

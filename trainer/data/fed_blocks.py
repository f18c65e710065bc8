"""Read blocks of streaming shards in a TensorFlow graph, as a client of `ShardFeed`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import tensorflow as tf

from flotilla.trainer.data.blocks import slice_windows
from flotilla.trainer.data.shard_feed import (
    ASK,
    FAILED,
    FOLDER,
    TRAIN,
    VALIDATION,
    Streaming,
    part_range,
)

# Number of private threads for datasets. Datasets that wait for shards would block shared threads.
_THREADS = 8
_NOTHING = "nothing"


def epoch_of_blocks(
    streaming: Streaming, seed: int | tf.Tensor, epoch: int | tf.Tensor = 0
) -> tf.data.Dataset:
    """Return the training blocks of an epoch, interleaved from several shards."""
    names = _names(streaming, TRAIN, epoch, seed)
    return names.interleave(
        lambda name: _blocks(streaming, TRAIN, name), cycle_length=streaming.at_once, block_length=1
    )


def evaluation_rows(  # noqa: PLR0913
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
    rows = parse(names.flat_map(lambda name: _blocks(streaming, VALIDATION, name)))
    done = parse(_done(streaming, VALIDATION, tf.constant("")))
    return slice_windows(rows, skip, take).concatenate(done)


def use_private_threads(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Run a dataset in a private thread pool, because it may block."""
    options = tf.data.Options()
    options.threading.private_threadpool_size = _THREADS
    return batches.with_options(options)


@contextmanager
def allow_tensor_seed() -> Iterator[None]:
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


def _blocks(streaming: Streaming, reader: str, name: tf.Tensor) -> tf.data.Dataset:
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

"""Make the shards of a dataset from the parts of a source.

First, each part is mapped to a folder with an Arrow file of rows and a file of statistics for each
split, and `sums.json`, which is written last. The folder may be published and read on another
machine. An Arrow file has chunks of about `CHUNK_BYTES`. Each chunk is shuffled, so any range of it
is a random selection of its rows.

Then, the shards are assembled: TFRecord files of blocks, whose sizes differ by at most one row. The
rows of a split are shuffled as a whole, in bounded memory (Rao 1961, Sandelius 1962): each row is
assigned to a random bucket, and each bucket is permuted in memory. Because the rows of a chunk are
already in random order, a bucket gets a contiguous range of each chunk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.blocks import choose_rows, encode_blocks, frame_record
from flotilla.trainer.data.columns import Column, Columns, make_columns, make_table, select_rows
from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.roles import format_names
from flotilla.trainer.data.source import Part, Source
from flotilla.trainer.data.splits import shard_counts
from flotilla.trainer.events.progress import Work
from flotilla.trainer.features.dataset_spec import BLOCK_ROWS, SPLITS, shard_name
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.accumulator import Accumulator
from flotilla.trainer.features.statistics.statistics import Statistics
from flotilla.trainer.runtime.errors import UserError

CHUNK_BYTES = 32 << 20
_SUMS, _ROWS, _STATISTICS = "sums.json", "{}.arrow", "{}.statistics.npz"


class Sums:
    """Statistics of the examples of one or more parts."""

    def __init__(self, selection: Selection, *, vocabulary: int, part: int = 0) -> None:
        """Create empty statistics. The part number `part` seeds the random samples."""
        self.examples = dict.fromkeys(SPLITS, 0)
        self.bytes = dict.fromkeys(SPLITS, 0)
        self.largest = 0
        self.targets = {each: Target(each, selection.specs[each]) for each in selection.targets}
        make = partial(Accumulator, selection.specs, selection.inputs, selection.targets)
        self.accumulators = {
            split: make(vocabulary=vocabulary, seed=(part, index))
            for index, split in enumerate(SPLITS)
        }

    def add(self, split: str, columns: Columns, table: pa.RecordBatch) -> None:
        """Add examples of a split, given as columns and as a table in stored form."""
        self.examples[split] += table.num_rows
        self.bytes[split] += table.nbytes
        self.largest = max(self.largest, sum(map(_largest, table.columns)))
        self.accumulators[split].add(columns)
        for target in self.targets.values():
            target.add(split, columns[target.name])

    def merge(self, other: Sums) -> None:
        """Add the statistics of other examples."""
        for split in SPLITS:
            self.examples[split] += other.examples[split]
            self.bytes[split] += other.bytes[split]
        self.largest = max(self.largest, other.largest)
        for name, target in other.targets.items():
            self.targets[name].merge(target)
        for split, accumulator in other.accumulators.items():
            self.accumulators[split].merge(accumulator)

    def save(self, folder: Path) -> None:
        """Save the statistics in a folder."""
        for split, accumulator in self.accumulators.items():
            path = folder / _STATISTICS.format(split)
            np.savez(path, **accumulator.arrays())  # type: ignore[arg-type]
        tree = {"examples": self.examples, "bytes": self.bytes, "largest": self.largest}
        tree["targets"] = {name: each.state() for name, each in self.targets.items()}
        (folder / _SUMS).write_text(json.dumps(tree), encoding="utf-8")


def _largest(column: pa.Array) -> int:
    if pa.types.is_large_list(column.type):
        return int(pc.max(pc.list_value_length(column)).as_py() or 0) * _largest(column.flatten())
    if pa.types.is_large_binary(column.type):
        return int(pc.max(pc.binary_length(column)).as_py() or 0)
    return int(column.type.byte_width)


class _ChunkWriter:
    """Writes the rows of a split to a file in chunks. The rows of each chunk are shuffled."""

    def __init__(self, path: Path, seed: tuple[int, ...]) -> None:
        self._path = path
        self._random = np.random.RandomState(seed)
        self._pending: list[pa.RecordBatch] = []
        self._pending_bytes = 0
        self._writer: Any = None

    def add(self, table: pa.RecordBatch) -> None:
        self._pending.append(table)
        self._pending_bytes += table.nbytes
        if self._pending_bytes >= CHUNK_BYTES:
            self.flush()

    def flush(self) -> None:
        if not self._pending:
            return
        rows = pa.concat_batches(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        if self._writer is None:
            self._writer = pa.ipc.new_file(self._path, rows.schema)
        self._writer.write_batch(rows.take(pa.array(self._random.permutation(rows.num_rows))))

    def __enter__(self) -> _ChunkWriter:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        if failed is None:
            self.flush()
        if self._writer is not None:
            self._writer.close()


def map_part(  # noqa: PLR0913
    source: Source,
    selection: Selection,
    part: Part,
    folder: Path,
    *,
    config: DataConfig,
    count: Callable[[int], None] = lambda _examples: None,
) -> None:
    """Read a part of a source, and write the stored form of its examples to `folder`.

    `count` is called with the number of examples of each batch. Raises `UserError` for an invalid
    label or weight.
    """
    folder.mkdir(parents=True)
    sums = Sums(selection, vocabulary=config.vocabulary, part=part.number)
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                _ChunkWriter(folder / _ROWS.format(split), (config.seed, part.number, index))
            )
            for index, split in enumerate(SPLITS)
        }
        for batch in source.read(part, selection):
            columns = make_columns(selection.specs, batch.columns)
            if selection.weight:
                weights = columns[selection.weight]
                refuse_weight(selection.weight, source.name, part.origin, weights)
            for target in sums.targets.values():
                target.refuse(source.name, part.origin, columns[target.name])
            for index in np.unique(batch.splits):
                split, rows = SPLITS[index], select_rows(columns, batch.splits == index)
                table = make_table(selection.specs, rows)
                writers[split].add(table)
                sums.add(split, rows, table)
            count(len(batch.splits))
    sums.save(folder)
    # Release the memory, because Arrow would otherwise keep as much as the largest part needed.
    pa.default_memory_pool().release_unused()


def read_sums(folder: Path, selection: Selection, *, vocabulary: int) -> Sums:
    """Return the statistics of the part in `folder`."""
    found = Sums(selection, vocabulary=vocabulary)
    tree = json.loads((folder / _SUMS).read_text(encoding="utf-8"))
    found.examples, found.bytes, found.largest = tree["examples"], tree["bytes"], tree["largest"]
    for name, state in tree["targets"].items():
        found.targets[name].restore(state)
    for split, accumulator in found.accumulators.items():
        with np.load(folder / _STATISTICS.format(split), allow_pickle=False) as arrays:
            accumulator.restore(arrays)
    return found


@dataclass(frozen=True)
class Chunk:
    """A chunk of a mapped part: its file, its index in the file, and its number of rows."""

    path: Path
    number: int
    rows: int

    def read(self, start: int, rows: int) -> pa.RecordBatch:
        """Return `rows` rows from index `start`. They are memory-mapped and read only when used."""
        with pa.memory_map(str(self.path)) as file:
            return pa.ipc.open_file(file).get_batch(self.number).slice(start, rows)


def list_chunks(folder: Path, split: str) -> list[Chunk]:
    """Return the chunks of one split of the mapped part in `folder`."""
    path = folder / _ROWS.format(split)
    if not path.exists():
        return []
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        return [
            Chunk(path, number, reader.get_batch(number).num_rows)
            for number in range(reader.num_record_batches)
        ]


# An integer at or above this limit is a quantity, not a class.
MOST_CLASSES = 1_000_000
_NAMED = 3


class Target:
    """Counts of the classes of one target, by split."""

    def __init__(self, name: str, spec: FeatureSpec) -> None:
        """Create empty counts."""
        self.name = name
        self._spec = spec
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._of_classes = np.dtype(spec.dtype).kind in "iub"
        self._multi_hot = spec.dtype == "bool" and spec.shape == (spec.num_classes,)

    def refuse(self, dataset: str, split: str, given: Column) -> None:
        """Raise `UserError` if an example lacks a class, or a numeric label is not finite."""
        values = _flatten(given)
        if values.dtype.kind in "fV":  # bfloat16 has the kind V.
            _refuse_infinite("label", self.name, dataset, split, values)
        elif self._spec.num_classes and self._spec.shape == () and values.min(initial=0) < 0:
            raise UserError(
                f"data.dataset: the split {split!r} of {dataset} has examples without a label "
                f"({self.name!r} is {values.min()}); write your own builder "
                "(data.dataset: package.module:Builder) that leaves them out"
            )

    def add(self, split: str, given: Column) -> None:
        """Count the classes in the labels `given` of a split. Numeric labels are not counted."""
        if not self._of_classes:
            return
        values = _flatten(given)
        if self._multi_hot:
            self._count(split, values.sum(axis=0, dtype=np.int64))
        elif values.max(initial=0) >= MOST_CLASSES:
            self._of_classes = False
        else:
            # Skip negative values, which are the padding of a sequence.
            self._count(split, np.bincount(values[values >= 0].astype(np.int64)))

    def _count(self, split: str, found: NDArray[np.int64]) -> None:
        before = self._counts.get(split, np.zeros(0, np.int64))
        length = max(len(found), len(before))
        self._counts[split] = _pad(found, length) + _pad(before, length)

    def merge(self, other: Target) -> None:
        """Add the counts of another `Target`."""
        self._of_classes = self._of_classes and other._of_classes
        for split, found in other._counts.items():
            self._count(split, found)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        counts = {split: each.tolist() for split, each in self._counts.items()}
        return {"of_classes": self._of_classes, "counts": counts}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state from `state()`."""
        self._of_classes = state["of_classes"]
        self._counts = {name: np.array(each, np.int64) for name, each in state["counts"].items()}

    def counts(self) -> dict[str, list[int]]:
        """Return the number of examples of each class by split, or {} if there are no classes.

        Every label of a sequence is counted. A vector of bools is counted element by element.
        """
        if not self._of_classes or not self._counts:
            return {}
        length = max(self._spec.num_classes, *(len(each) for each in self._counts.values()))
        return {split: _pad(each, length).tolist() for split, each in self._counts.items()}

    def notes(self) -> Iterator[str]:
        """Yield notes on classes without training examples, or with a single example."""
        names, train = self._spec.labels, self._counts.get("train")
        if not names or self._spec.shape or train is None:
            return
        counts = self.counts()
        total = dict(zip(names, np.sum([*counts.values()], axis=0), strict=True))
        trained = dict(zip(names, counts["train"], strict=True))
        lacking = [repr(name) for name in names if total[name] and not trained[name]]
        single = [repr(name) for name in names if total[name] == 1 and trained[name]]
        if lacking:
            yield (
                f"the label {self.name!r} has {format_names(lacking, _NAMED)} only in validation "
                "or test, but a model cannot learn a class without training examples; add some, or "
                "remove these rows"
            )
        if single:
            yield (
                f"the label {self.name!r} has only one example of {format_names(single, _NAMED)}; "
                "correct the spelling, merge classes, or add examples"
            )


def refuse_weight(name: str, dataset: str, split: str, values: NDArray[Any]) -> None:
    """Raise `UserError` if a weight is negative or not finite."""
    _refuse_infinite("weight", name, dataset, split, values)
    if values.min(initial=0) < 0:
        raise UserError(
            f"data.weight: the split {split!r} of {dataset} has an example with the weight "
            f"{values.min()} ({name!r}); a weight must be at least 0"
        )


def _refuse_infinite(key: str, name: str, dataset: str, split: str, values: NDArray[Any]) -> None:
    wide = values.astype(np.float64)
    if not (finite := np.isfinite(wide)).all():
        raise UserError(
            f"data.{key}: the split {split!r} of {dataset} has an example whose {name!r} is "
            f"{wide[~finite].flat[0]}; write your own builder (data.dataset: "
            "package.module:Builder) that leaves it out"
        )


def _pad(counts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    return np.pad(counts, (0, length - len(counts)))


def _flatten(values: Column) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    return values.flatten().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


# Number of blocks to encode together. More blocks would need more memory without being faster.
_BLOCKS = 64
#: Approximate size of the rows that are permuted in memory, in bytes.
BUCKET_BYTES = 64 << 20


class ShardWriter:
    """Writes the rows of a split to its shards, in order. `examples` has the size of each shard."""

    def __init__(  # noqa: PLR0913
        self,
        folder: Path,
        split: str,
        features: Mapping[str, FeatureSpec],
        *,
        examples: int,
        count: int,
        rows: int,
    ) -> None:
        """Create `count` empty shards for `examples` examples, in blocks of `rows` rows."""
        share, more = divmod(examples, count)
        self.examples = [share + (index < more) for index in range(count)]
        self._paths = [folder / shard_name(split, index, count) for index in range(count)]
        for path in self._paths:
            path.write_bytes(b"")
        self._crcs = [0] * count
        self._features, self._rows = features, rows
        self._shard, self._left = 0, self.examples[0]
        self._pending: list[pa.RecordBatch] = []

    def add(self, table: pa.RecordBatch) -> None:
        """Add the next rows. Rows of an incomplete block wait until it is full."""
        rows = pa.concat_batches([*self._pending, table])
        while rows.num_rows:
            size = min(rows.num_rows, self._left)
            size -= size % self._rows if size < self._left else 0
            if not size:
                break
            self._write(rows.slice(0, size))
            rows = rows.slice(size)
        # Copy the rows, because a slice would keep all rows in memory.
        self._pending = [rows.take(pa.array(np.arange(rows.num_rows)))]

    def _write(self, rows: pa.RecordBatch) -> None:
        crc = self._crcs[self._shard]
        with self._paths[self._shard].open("ab") as file:
            for start in range(0, rows.num_rows, self._rows * _BLOCKS):
                piece = rows.slice(start, self._rows * _BLOCKS)
                for block in encode_blocks(self._features, piece, self._rows):
                    frame = frame_record(block)
                    file.write(frame)
                    crc = google_crc32c.extend(crc, frame)
        self._crcs[self._shard] = crc
        self._left -= rows.num_rows
        if not self._left and self._shard + 1 < len(self._paths):
            self._shard += 1
            self._left = self.examples[self._shard]

    @property
    def crcs(self) -> list[str]:
        """The crc32c of the bytes written to each shard so far."""
        return [f"{crc:08x}" for crc in self._crcs]


def write_shards(  # noqa: PLR0913
    folder: Path,
    split: str,
    features: Mapping[str, FeatureSpec],
    columns: Mapping[str, Any],
    *,
    count: int = 1,
    rows: int = BLOCK_ROWS,
) -> tuple[int, ...]:
    """Write examples to shards, in order, and return the number of examples of each shard."""
    table = make_table(features, make_columns(features, columns))
    writer = ShardWriter(folder, split, features, examples=table.num_rows, count=count, rows=rows)
    writer.add(table)
    return tuple(writer.examples)


@dataclass(frozen=True, kw_only=True)
class Written:
    """Written shards: examples per shard by split, rows per block, statistics and fingerprint."""

    examples: Mapping[str, list[int]]
    block_rows: int
    sums: Sums
    fingerprint: str


def assemble(source: Source, parts: Sequence[Path], folder: Path, config: DataConfig) -> Written:
    """Write the shards of all splits to `folder`, from the mapped parts in the folders `parts`.

    The examples of each split are shuffled with the configured seed. Raises `UserError` if there
    are fewer training examples than shards, or no training or test examples.
    """
    selection = source.select()
    sums = Sums(selection, vocabulary=config.vocabulary)
    with Work("merging the statistics", "parts", len(parts)) as work:
        for part in parts:
            sums.merge(read_sums(part, selection, vocabulary=config.vocabulary))
            work.add(1)
    counts = shard_counts(source.name, sums.examples, config.shards)
    total = sum(sums.examples.values())
    rows = choose_rows(total, sum(sums.bytes.values()), sums.largest)
    writers = {
        split: ShardWriter(
            folder, split, selection.specs, examples=sums.examples[split], count=count, rows=rows
        )
        for split, count in counts.items()
    }
    with Work("writing the shards", "rows", total) as work:
        for split, writer in writers.items():
            chunks = [chunk for part in parts for chunk in list_chunks(part, split)]
            seed = (config.seed, SPLITS.index(split))
            for bucket in shuffle_rows(chunks, sums.bytes[split], seed):
                writer.add(bucket)
                work.add(bucket.num_rows)
                # Free the memory of this bucket before the next one is filled.
                del bucket
    with Work("writing the statistics"):
        _write_statistics(sums, counts, folder)
    crcs = json.dumps({split: writer.crcs for split, writer in writers.items()}, sort_keys=True)
    return Written(
        examples={split: writer.examples for split, writer in writers.items()},
        block_rows=rows,
        sums=sums,
        fingerprint=hashlib.sha256(crcs.encode()).hexdigest(),
    )


def shuffle_rows(
    chunks: Sequence[Chunk], size: int, seed: tuple[int, ...]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of chunks in uniformly random order. `size` is their total size in bytes."""
    random = np.random.RandomState(seed)
    count = -(-size // BUCKET_BYTES) or 1
    shares = [random.multinomial(chunk.rows, [1 / count] * count) for chunk in chunks]
    starts = [0] * len(chunks)
    for bucket in range(count):
        taken = [int(share[bucket]) for share in shares]
        order = pa.array(random.permutation(sum(taken)))
        # Do not assign the rows to a variable, which would keep them in memory while the caller
        # works.
        yield pa.concat_batches(
            [chunk.read(*each) for chunk, *each in zip(chunks, starts, taken, strict=True)]
        ).take(order)
        starts = [start + rows for start, rows in zip(starts, taken, strict=True)]


def _write_statistics(sums: Sums, splits: Iterable[str], folder: Path) -> None:
    found = {split: sums.accumulators[split] for split in splits}
    results = Statistics(splits={split: each.result() for split, each in found.items()})
    (folder / statistics.FILE).write_bytes(statistics.to_bytes(results))
    sketches = {split: each.sketch() for split, each in found.items()}
    (folder / statistics.EXAMPLES).write_bytes(statistics.sketches_to_bytes(sketches))

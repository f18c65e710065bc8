"""Make the shards of a dataset: TFRecord files of blocks. Their sizes differ by at most one row.

The rows of a split are shuffled as a whole, in bounded memory (Rao 1961, Sandelius 1962): each row
is assigned to a random bucket, and each bucket is permuted in memory. Because the rows of a chunk
are already in random order, a bucket gets a contiguous range of each chunk.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.blocks import choose_rows, encode_blocks
from flotilla.trainer.data.columns import make_columns, make_table
from flotilla.trainer.data.preparation.parts import Chunk, Sums, list_chunks, read_sums
from flotilla.trainer.data.source import Source
from flotilla.trainer.data.splits import shard_counts
from flotilla.trainer.data.tfrecords import frame_record
from flotilla.trainer.events.progress import Work
from flotilla.trainer.features.dataset_spec import BLOCK_ROWS, SPLITS, shard_name
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.statistics import Statistics
from flotilla.trainer.runtime.errors import UserError

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
    are fewer training examples than shards, or no test examples.
    """
    selection = source.select()
    sums = Sums(selection, vocabulary=config.vocabulary)
    with Work("merging the statistics", "parts", len(parts)) as work:
        for part in parts:
            sums.merge(read_sums(part, selection, vocabulary=config.vocabulary))
            work.add(1)
    if not sums.examples.get("test"):
        sizes = ", ".join(f"{count} {split}" for split, count in sums.examples.items())
        raise UserError(
            f"data.splits: {source.name} has no example for the test split ({sizes}); add "
            "examples, or raise data.splits.test"
        )
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

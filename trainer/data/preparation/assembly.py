"""Make the shards of a dataset from mapped parts.

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

import numpy as np
import pyarrow as pa

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.blocks import choose_rows
from flotilla.trainer.data.preparation.parts import Chunk, Sums, list_chunks, read_sums
from flotilla.trainer.data.preparation.shards import ShardWriter
from flotilla.trainer.data.source import Source
from flotilla.trainer.data.splits import shard_counts
from flotilla.trainer.events.progress.work import Work
from flotilla.trainer.features.dataset_spec import SPLITS
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.statistics import Statistics
from flotilla.trainer.runtime.errors import UserError

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Written:
    """The content of the shards: number of examples of each shard by split, and the statistics.

    `block_rows` is the number of rows of a block.
    """

    examples: Mapping[str, list[int]]
    block_rows: int
    sums: Sums
    fingerprint: str


def assemble(source: Source, parts: Sequence[Path], folder: Path, config: DataConfig) -> Written:
    """Write the shards of all splits to `folder`, from the folders of the parts, in order.

    The examples of each split are shuffled with the configured seed.

    Raises:
        UserError: there are fewer training examples than shards, or no test examples.
    """
    selection = source.select()
    sums = Sums(selection, vocabulary=config.vocabulary)
    with Work("adding up the statistics", "parts", len(parts)) as work:
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
    return Written(
        examples={split: writer.examples for split, writer in writers.items()},
        block_rows=rows,
        sums=sums,
        fingerprint=_fingerprint(writers),
    )


def shuffle_rows(
    chunks: Sequence[Chunk], size: int, seed: tuple[int, ...]
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of chunks with `size` bytes in total; every order is equally likely."""
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


def _fingerprint(writers: Mapping[str, ShardWriter]) -> str:
    crcs = {split: writer.crcs for split, writer in writers.items()}
    return hashlib.sha256(json.dumps(crcs, sort_keys=True).encode()).hexdigest()


def _write_statistics(sums: Sums, splits: Iterable[str], folder: Path) -> None:
    found = {split: sums.accumulators[split] for split in splits}
    results = Statistics(splits={split: each.result() for split, each in found.items()})
    (folder / statistics.FILE).write_bytes(statistics.to_bytes(results))
    sketches = {split: each.sketch() for split, each in found.items()}
    (folder / statistics.EXAMPLES).write_bytes(statistics.sketches_to_bytes(sketches))

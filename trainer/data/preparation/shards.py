"""The shards of a split: TFRecord files of blocks. Shard sizes differ by at most one example."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa

from flotilla.trainer.data.blocks import encode_blocks
from flotilla.trainer.data.columns import make_columns, make_table
from flotilla.trainer.data.tfrecords import frame_record
from flotilla.trainer.features.dataset_spec import BLOCK_ROWS, shard_name
from flotilla.trainer.features.feature_spec import FeatureSpec

# Number of blocks to encode together; more would need more memory and not be faster.
_BLOCKS = 64


class ShardWriter:
    """Writes the rows of a split to its shards, in order.

    Attributes:
        examples: number of examples of each shard.
    """

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
        """Write `examples` of a split to `count` shards, whose blocks have `rows` rows."""
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
        """Add the next rows; rows of an incomplete block wait until it is full."""
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
        """The crc32c of each shard as written so far."""
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
    """Write examples to shards, in order; return the number of examples of each shard."""
    table = make_table(features, make_columns(features, columns))
    writer = ShardWriter(folder, split, features, examples=table.num_rows, count=count, rows=rows)
    writer.add(table)
    return tuple(writer.examples)

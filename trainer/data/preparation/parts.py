"""A mapped part of a source: its rows by split, in random order, and their statistics.

The folder of a part has an Arrow file of rows and a file of statistics for each split, and
`sums.json`, which is written last. The folder may be published and read on another machine. An
Arrow file has chunks of about `CHUNK_BYTES`. Each chunk is shuffled, so any range of it is a random
selection of its rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.columns import Columns, make_columns, make_table, select_rows
from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.source import Part, Source
from flotilla.trainer.data.targets import Target, refuse_weight
from flotilla.trainer.features.dataset_spec import SPLITS
from flotilla.trainer.features.statistics.accumulator import Accumulator

CHUNK_BYTES = 32 << 20
_SUMS = "sums.json"


class Sums:
    """Statistics of the examples of one or more parts."""

    def __init__(self, selection: Selection, *, vocabulary: int, part: int = 0) -> None:
        """Create empty statistics. The part number `part` seeds the random samples."""
        self.examples = dict.fromkeys(SPLITS, 0)
        self.bytes = dict.fromkeys(SPLITS, 0)
        self.largest = 0
        self.targets = {each: Target(each, selection.specs[each]) for each in selection.targets}
        self.accumulators = {
            split: Accumulator(
                selection.specs,
                selection.inputs,
                selection.targets,
                vocabulary=vocabulary,
                seed=(part, index),
            )
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
            np.savez(_statistics(folder, split), **accumulator.arrays())  # type: ignore[arg-type]
        targets = {name: each.state() for name, each in self.targets.items()}
        tree = {
            "examples": self.examples,
            "bytes": self.bytes,
            "largest": self.largest,
            "targets": targets,
        }
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
                _ChunkWriter(_rows(folder, split), (config.seed, part.number, index))
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
            for split, chosen in _divide(columns, batch.splits):
                table = make_table(selection.specs, chosen)
                writers[split].add(table)
                sums.add(split, chosen, table)
            count(len(batch.splits))
    sums.save(folder)
    # Release the memory, because Arrow would otherwise keep as much as the largest part needed.
    pa.default_memory_pool().release_unused()


def _divide(columns: Columns, splits: NDArray[np.int8]) -> Iterator[tuple[str, Columns]]:
    for index, split in enumerate(SPLITS):
        chosen = splits == index
        if chosen.any():
            yield split, select_rows(columns, chosen)


def read_sums(folder: Path, selection: Selection, *, vocabulary: int) -> Sums:
    """Return the statistics of the part in `folder`."""
    found = Sums(selection, vocabulary=vocabulary)
    tree = json.loads((folder / _SUMS).read_text(encoding="utf-8"))
    found.examples, found.bytes = tree["examples"], tree["bytes"]
    found.largest = tree["largest"]
    for name, state in tree["targets"].items():
        found.targets[name].restore(state)
    for split, accumulator in found.accumulators.items():
        with np.load(_statistics(folder, split), allow_pickle=False) as arrays:
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
    path = _rows(folder, split)
    if not path.exists():
        return []
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        return [
            Chunk(path, number, reader.get_batch(number).num_rows)
            for number in range(reader.num_record_batches)
        ]


def _rows(folder: Path, split: str) -> Path:
    return folder / f"{split}.arrow"


def _statistics(folder: Path, split: str) -> Path:
    return folder / f"{split}.statistics.npz"

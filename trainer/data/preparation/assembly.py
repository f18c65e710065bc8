"""Make the shards of a dataset from mapped parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data.preparation.parts import Sums, read_part, read_sums
from flotilla.trainer.data.preparation.shards import ShardWriter
from flotilla.trainer.data.source import Source
from flotilla.trainer.data.splits import shard_counts
from flotilla.trainer.events.progress.work import Work
from flotilla.trainer.features.statistics import statistics
from flotilla.trainer.features.statistics.statistics import Statistics
from flotilla.trainer.runtime.errors import UserError

# Records per progress update.
_COUNTED = 4096


@dataclass(frozen=True, kw_only=True)
class Written:
    """The content of the shards: number of examples per shard and split, and the statistics."""

    examples: Mapping[str, list[int]]
    sums: Sums
    fingerprint: str


def assemble(source: Source, parts: Sequence[Path], folder: Path, config: DataConfig) -> Written:
    """Write the shards of all splits into `folder`, from the folders of the parts in their order.

    Records are distributed to the shards of their split in turn. If the source is not shuffled,
    each shard is shuffled by the configured seed.

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
            f"data.splits: no example of {source.name} is for test ({sizes}); give it more "
            "examples, or a larger share for data.splits.test"
        )
    counts = shard_counts(source.name, sums.examples, config.shards)
    writers = {split: ShardWriter(folder, split, count) for split, count in counts.items()}
    total = sum(sums.examples.values())
    with Work("writing the shards", "rows", total) as work:
        for split, writer in writers.items():
            for part in parts:
                records = read_part(part, split)
                while some := list(islice(records, _COUNTED)):
                    for record in some:
                        writer.add(record)
                    work.add(len(some))
            writer.flush()
    if not source.is_shuffled:
        with Work("shuffling the shards", "rows", total) as work:
            for writer in writers.values():
                writer.shuffle(config.seed, work.add)
    with Work("writing the statistics"):
        _write_statistics(sums, counts, folder)
    return Written(
        examples={split: writer.examples for split, writer in writers.items()},
        sums=sums,
        fingerprint=_fingerprint(writers),
    )


def _fingerprint(writers: Mapping[str, ShardWriter]) -> str:
    crcs = {split: writer.crcs for split, writer in writers.items()}
    return hashlib.sha256(json.dumps(crcs, sort_keys=True).encode()).hexdigest()


def _write_statistics(sums: Sums, splits: Iterable[str], folder: Path) -> None:
    found = {split: sums.accumulators[split] for split in splits}
    results = Statistics(splits={split: each.result() for split, each in found.items()})
    (folder / statistics.FILE).write_bytes(statistics.to_bytes(results))
    sketches = {split: each.sketch() for split, each in found.items()}
    (folder / statistics.EXAMPLES).write_bytes(statistics.sketches_to_bytes(sketches))

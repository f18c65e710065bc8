"""A mapped part of a source: its encoded records by split, and their statistics.

A folder has one file of records per split, in the order of the source, the lengths of the records,
and `sums.json`, which is written last. It may be published and read on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.records import encode
from flotilla.trainer.data.source import Part, Source
from flotilla.trainer.data.targets import Target, refuse_weight
from flotilla.trainer.features.dataset_spec import SPLITS
from flotilla.trainer.features.statistics.accumulator import Accumulator

_SUMS = "sums.json"
_READ_BYTES = 1 << 20


class Sums:
    """Statistics over the examples of one part, or of several."""

    def __init__(self, selection: Selection, *, vocabulary: int, part: int = 0) -> None:
        """Begin with no examples; the number of the part seeds the samples."""
        self.examples = dict.fromkeys(SPLITS, 0)
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

    def add(self, columns: Mapping[str, Any], splits: Any) -> None:
        """Add examples; `splits` holds the index of each into `SPLITS`."""
        for index, split in enumerate(SPLITS):
            chosen = splits == index
            if not chosen.any():
                continue
            self.examples[split] += int(chosen.sum())
            kept = {name: _chosen(values, chosen) for name, values in columns.items()}
            self.accumulators[split].add(kept)
            for target in self.targets.values():
                target.add(split, kept[target.name])

    def merge(self, other: Sums) -> None:
        """Add the statistics of further examples."""
        for split, count in other.examples.items():
            self.examples[split] += count
        for name, target in other.targets.items():
            self.targets[name].merge(target)
        for split, accumulator in other.accumulators.items():
            self.accumulators[split].merge(accumulator)

    def save(self, folder: Path) -> None:
        """Write the statistics into a folder."""
        for split, accumulator in self.accumulators.items():
            np.savez(_statistics(folder, split), **accumulator.arrays())  # type: ignore[arg-type]
        targets = {name: each.state() for name, each in self.targets.items()}
        tree = {"examples": self.examples, "targets": targets}
        (folder / _SUMS).write_text(json.dumps(tree), encoding="utf-8")

    def restore(self, folder: Path) -> None:
        """Continue with the statistics saved in a folder."""
        tree = json.loads((folder / _SUMS).read_text(encoding="utf-8"))
        self.examples |= tree["examples"]
        for name, state in tree["targets"].items():
            self.targets[name].restore(state)
        for split, accumulator in self.accumulators.items():
            with np.load(_statistics(folder, split), allow_pickle=False) as arrays:
                accumulator.restore(arrays)


def _chosen(values: Any, chosen: Any) -> Any:
    if isinstance(values, np.ndarray):
        return values[chosen]
    return [value for value, take in zip(values, chosen, strict=True) if take]


def map_part(  # noqa: PLR0913
    source: Source,
    selection: Selection,
    part: Part,
    folder: Path,
    *,
    vocabulary: int,
    count: Callable[[int], None] = lambda _examples: None,
) -> None:
    """Read a part of a source, encode its examples, and write them into `folder`.

    `count` is called with the examples of each batch.

    Raises:
        UserError: the part cannot be read, or has an invalid label or weight.
    """
    folder.mkdir(parents=True)
    sums = Sums(selection, vocabulary=vocabulary, part=part.number)
    lengths: dict[str, list[int]] = {split: [] for split in SPLITS}
    with ExitStack() as stack:
        files = [stack.enter_context(_records(folder, split).open("wb")) for split in SPLITS]
        for batch in source.read(part, selection):
            _refuse(source, selection, sums, part, batch.columns)
            records = encode(selection.specs, batch.columns)
            for split, record in zip(batch.splits.tolist(), records, strict=True):
                files[split].write(record)
                lengths[SPLITS[split]].append(len(record))
            sums.add(batch.columns, batch.splits)
            count(len(batch.splits))
    for split, each in lengths.items():
        np.save(_lengths(folder, split), np.array(each, np.uint32))
    sums.save(folder)


def read_sums(folder: Path, selection: Selection, *, vocabulary: int) -> Sums:
    """Return the statistics of a part that was mapped into `folder`."""
    found = Sums(selection, vocabulary=vocabulary)
    found.restore(folder)
    return found


def read_part(folder: Path, split: str) -> Iterator[bytes]:
    """Yield the records of a split, in the order of the source."""
    with _records(folder, split).open("rb", buffering=_READ_BYTES) as file:
        for length in np.load(_lengths(folder, split)).tolist():
            yield file.read(length)


def _refuse(
    source: Source, selection: Selection, sums: Sums, part: Part, columns: Mapping[str, Any]
) -> None:
    if selection.weight:
        refuse_weight(selection.weight, source.name, part.origin, columns[selection.weight])
    for target in sums.targets.values():
        target.refuse(source.name, part.origin, columns[target.name])


def _records(folder: Path, split: str) -> Path:
    return folder / f"{split}.records"


def _lengths(folder: Path, split: str) -> Path:
    return folder / f"{split}.lengths.npy"


def _statistics(folder: Path, split: str) -> Path:
    return folder / f"{split}.statistics.npz"

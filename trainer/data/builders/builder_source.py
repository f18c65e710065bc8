"""A TFDS builder as a source. `splits.plan` assigns its examples to train, validation and test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from numpy.typing import NDArray

from flotilla.trainer.config.data import DataConfig
from flotilla.trainer.data import features
from flotilla.trainer.data.builders import datasets
from flotilla.trainer.data.builders.download import download
from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.png import quicken
from flotilla.trainer.data.preparation.beam import pipeline_options
from flotilla.trainer.data.source import Batch, Part, Source
from flotilla.trainer.data.splits import plan

PART_BYTES = 64 << 20


class BuilderSource(Source):
    """The dataset named by `data.dataset`. TFDS stores its files in `data_dir`."""

    def __init__(self, config: DataConfig, data_dir: Path) -> None:
        """Find the builder. Raises `ConfigError`."""
        self._config = config
        self._data_dir = data_dir
        self.name = config.dataset
        self.identity = {"version": str(self._builder.version)} | datasets.content(self._builder)

    def __getstate__(self) -> dict[str, Any]:
        """Omit the builder from the pickle. Each process creates it from the configuration."""
        return {name: value for name, value in vars(self).items() if name != "_builder"}

    @cached_property
    def _builder(self) -> Any:
        return datasets.builder(self._config, self._data_dir)

    def select(self) -> Selection:
        """Return the selected features, from the builder's metadata."""
        return features.select(self._config, self._builder.info)

    def fetch(self) -> None:
        """Download and prepare the dataset. Raises `UserError`."""
        quicken(self.select().connectors.values())
        if datasets.is_folder(self._builder) or datasets.is_drawn(self._builder):
            return
        runner = self._config.runner
        is_beam = isinstance(self._builder, tfds.core.BeamBasedBuilder)
        options = pipeline_options(runner) if is_beam or runner.name == "beam" else None
        download(self.name, self._builder, self._config.manual_dir, beam_options=options)

    def parts(self) -> Sequence[Part]:
        """Return the parts. Each part is a range of a split."""
        selection = self.select()
        size = max(1, PART_BYTES // max(1, selection.example_bytes))
        ranges = [
            (origin, first, min(first + size, len(targets)))
            for origin, targets in self._plan().items()
            for first in range(0, len(targets), size)
        ]
        return [
            Part(number=number, origin=origin, where={"first": first, "end": end})
            for number, (origin, first, end) in enumerate(ranges)
        ]

    @property
    def total(self) -> int:
        """The number of examples in the splits that are used."""
        return sum(map(len, self._plan().values()))

    def read(self, part: Part, selection: Selection) -> Iterator[Batch]:
        """Yield the examples of a part."""
        splits = self._plan()[part.origin]
        at = part.where["first"]
        for columns in self._batches(selection, part):
            # Count the values of any column, because examples for `data.map` have no targets.
            count = len(next(iter(columns.values())))
            yield Batch(columns=columns, splits=splits[at : at + count])
            at += count

    def _batches(self, selection: Selection, part: Part) -> Iterator[dict[str, Any]]:
        if datasets.is_drawn(self._builder):
            for columns in self._builder.columns(
                part.origin, part.where["first"], part.where["end"]
            ):
                yield {name: columns[name] for name in selection.specs}
            return
        from flotilla.trainer.data.builders.batches import batches  # noqa: PLC0415

        yield from batches(self.name, self._builder, selection, part)

    def _plan(self) -> dict[str, NDArray[np.int8]]:
        if datasets.is_drawn(self._builder):
            sizes = dict(self._builder.sizes)
        else:
            sizes = {name: split.num_examples for name, split in self._builder.info.splits.items()}
        config = self._config
        return plan(self.name, sizes, validation=config.validation, seed=config.seed)

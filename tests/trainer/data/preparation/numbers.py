"""A source of numbered examples in a module that other processes can import."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flotilla.trainer.data.features import Selection
from flotilla.trainer.data.source import Batch, Part, Source
from flotilla.trainer.features.feature_spec import FeatureSpec
from flotilla.trainer.runtime.errors import UserError


@dataclass
class Numbers(Source):
    """A source of `count` parts with `size` examples each; reading a part adds a file to `seen`."""

    seen: Path
    count: int = 5
    size: int = 20
    breaks: int = -1
    kills: int = -1
    name: str = "numbers"

    @property
    def identity(self):
        return {"numbers": self.count * self.size}

    def select(self) -> Selection:
        number = FeatureSpec(shape=(), dtype="int64", stored="int")
        label = FeatureSpec(shape=(), dtype="int64", stored="int", num_classes=4)
        specs = {"number": number, "label": label}
        return Selection(
            inputs=("number",), targets=("label",), specs=specs, connectors={}, fits={}
        )

    def fetch(self) -> None:
        self.seen.mkdir(exist_ok=True)

    def parts(self) -> Sequence[Part]:
        return [Part(number=number, origin="") for number in range(self.count)]

    def read(self, part: Part, selection: Selection) -> Iterator[Batch]:
        del selection
        if part.number == self.breaks:
            raise UserError(f"part {part.number} is broken")
        if part.number == self.kills:
            os.kill(os.getpid(), signal.SIGKILL)
        number = np.arange(self.size) + part.number * self.size
        for half in np.split(number, 2):
            splits = (half % 10 == 0).astype(np.int8) + 2 * (half % 10 == 1)
            yield Batch(columns={"number": half, "label": half % 4}, splits=splits.astype(np.int8))
        with (self.seen / str(part.number)).open("a") as file:
            file.write("read\n")

"""The statistics of a dataset: `statistics.json`, and `examples.npz` next to it.

`statistics.json` has statistics for people and models. Models read it only when needed (`Learnt`).
`examples.npz` has the sketches of each split, by which datasets are compared: hashes of examples,
and a sample of their values.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import parse, parse_record

FILE, EXAMPLES = "statistics.json", "examples.npz"
SCHEMA = 1
NUMBER, TEXT, CLASS, TENSOR, IMAGE = "number", "text", "class", "tensor", "image"
# A function that returns the content of `statistics.json` and its folder's URI, or empty values.
Read = Callable[[], tuple[bytes, str]]
#: Kind of a feature whose dataset has not been prepared.
UNKNOWN_KIND = "unknown"


# The values of a string feature are categories if at most `_FEW_VALUES` of them are distinct, or if
# each occurs at least `_TIMES` times on average.
_FEW_VALUES, _TIMES = 20, 10


def are_repeated(distinct: int, examples: int) -> bool:
    """Return whether the values of a string feature repeat, as names of towns usually do."""
    return distinct <= max(_FEW_VALUES, examples // _TIMES)


@dataclass(frozen=True, kw_only=True)
class FeatureStatistics:
    """Statistics of a feature in one split.

    Attributes:
        kind: number, text, class, tensor or image. For an encoded image, the statistics are those
            of its size in bytes.
        examples: number of examples of the split.
        missing: number of examples without a value, such as NaN or an empty string.
        mean: mean of the numbers, or of all elements of a tensor. Like `std`, `least` and `most`,
            it is None if there are no numbers.
        means: mean of each element of an input vector. `stds` has the standard deviations.
        quantiles: equally spaced quantiles of a sample of the examples, including minimum and
            maximum. For a tensor, they are quantiles of the examples' means.
        counts: number of examples by value, the most frequent first. Classes are given by name.
        distinct: number of distinct values of a number, a text or a class, estimated if large.
        words: for input texts, number of examples by word, in lower case and without punctuation.
            In scripts without spaces, each letter is a word.
        pairs: for input texts, number of examples by pair of consecutive words, which are separated
            by a space.
        association: association with each label in a sample, from 0 to 1: a correlation, a
            correlation ratio, or Cramér's V.
    """

    kind: str
    examples: int
    missing: int = 0
    mean: float | None = None
    std: float | None = None
    least: float | None = None
    most: float | None = None
    means: tuple[float, ...] = ()
    stds: tuple[float, ...] = ()
    quantiles: tuple[float, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    distinct: int = 0
    words: Mapping[str, int] = field(default_factory=dict)
    pairs: Mapping[str, int] = field(default_factory=dict)
    association: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class SplitStatistics:
    """Statistics of a split: its number of examples, and its features by name."""

    examples: int
    features: Mapping[str, FeatureStatistics] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ExampleSketch:
    """Sketch of the examples of a split.

    Attributes:
        hashes: the smallest hashes of the inputs, sorted.
        copies: number of examples of each hash.
        is_whole: whether `hashes` contains the hashes of all examples.
        sample: values of randomly drawn examples, as columns of numbers by name.
    """

    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))
    copies: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    is_whole: bool = True
    sample: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Statistics of a dataset by split."""

    schema: int = SCHEMA
    splits: Mapping[str, SplitStatistics] = field(default_factory=dict)


def to_bytes(statistics: Statistics) -> bytes:
    """Return the content of `statistics.json`."""
    return json.dumps(statistics, default=vars, allow_nan=False).encode()


def from_bytes(data: bytes, uri: str) -> Statistics:
    """Parse `statistics.json`. Raises `UserError` if another version wrote it."""
    try:
        found = parse_record(Statistics, parse(data))
    except ValueError:
        found = None
    if found is None or found.schema != SCHEMA:
        raise UserError(
            f"{uri}/{FILE} has no statistics of this version; prepare the dataset again"
        )
    return found


def sketches_to_bytes(sketches: Mapping[str, ExampleSketch]) -> bytes:
    """Return the content of `examples.npz`. Equal sketches give equal bytes."""
    arrays: dict[str, Any] = {}
    for split, each in sketches.items():
        arrays |= {f"{split}/hashes": each.hashes, f"{split}/copies": each.copies}
        arrays[f"{split}/is_whole"] = np.array(each.is_whole)
        # Name the arrays by number, because a column's name may have any characters and any length.
        columns = json.dumps(list(each.sample))
        arrays[f"{split}/columns"] = np.frombuffer(columns.encode(), np.uint8)
        values = enumerate(each.sample.values())
        arrays |= {f"{split}/sample/{number}": column for number, column in values}
    out = io.BytesIO()
    # NumPy writes the same date for every file in the archive, so the bytes are reproducible.
    np.savez(out, **arrays)
    return out.getvalue()


def sketches_from_bytes(data: bytes, uri: str) -> dict[str, ExampleSketch]:
    """Parse `examples.npz` into sketches by split. Raises `UserError` if it is corrupted."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        splits = dict.fromkeys(name.split("/")[0] for name in arrays)
        return {split: _sketch(split, arrays) for split in splits}
    except (ValueError, KeyError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise UserError(f"{uri}/{EXAMPLES} is damaged; prepare the dataset again") from error


def _sketch(split: str, arrays: Mapping[str, Any]) -> ExampleSketch:
    columns = json.loads(arrays[f"{split}/columns"].tobytes())
    return ExampleSketch(
        hashes=arrays[f"{split}/hashes"],
        copies=arrays[f"{split}/copies"],
        is_whole=bool(arrays[f"{split}/is_whole"]),
        sample={name: arrays[f"{split}/sample/{at}"] for at, name in enumerate(columns)},
    )


class Learnt:
    """Statistics of the training split, for a model."""

    def __init__(self, read: Read) -> None:
        """Create the statistics. `read` is called at the first access."""
        self._read = read
        #: Content of `statistics.json`, which checkpoints store, or empty before the first access.
        self.data = b""

    @cached_property
    def features(self) -> Mapping[str, FeatureStatistics]:
        """The statistics of each feature, by name.

        Raises:
            UserError: the statistics cannot be read.
        """
        data, uri = self._read()
        if not data:
            return {}
        found = from_bytes(data, uri).splits["train"].features
        self.data = data
        return found


#: The statistics before preparation, when no feature is known.
NOTHING = Learnt(lambda: (b"", ""))

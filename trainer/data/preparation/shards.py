"""The shards of a split: TFRecord files whose sizes differ by at most one record."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import google_crc32c
import numpy as np

from flotilla.trainer.data.tfrecords import frame_record, places
from flotilla.trainer.features.dataset_spec import shard_name

BUFFER_BYTES = 64 << 20


class ShardWriter:
    """Distributes records over the shards in turn, so that their sizes differ by at most one.

    TensorFlow's writer keeps its file open, and a thousand shards would need a thousand open files.
    So records are buffered in memory, and appended in batches.
    """

    def __init__(self, folder: Path, split: str, count: int) -> None:
        """Write `count` shards of `split` into `folder`."""
        self._paths = [folder / shard_name(split, index, count) for index in range(count)]
        self._pending: list[list[bytes]] = [[] for _ in range(count)]
        self._pending_bytes = 0
        self._added = 0
        self._crcs = [0] * count

    def add(self, record: bytes) -> None:
        """Add a record to the next shard."""
        frame = frame_record(record)
        self._pending[self._added % len(self._paths)].append(frame)
        self._added += 1
        self._pending_bytes += len(frame)
        if self._pending_bytes >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what has been added."""
        for index, path in enumerate(self._paths):
            data = b"".join(self._pending[index])
            with path.open("ab") as file:
                file.write(data)
            self._crcs[index] = google_crc32c.extend(self._crcs[index], data)
            self._pending[index].clear()
        self._pending_bytes = 0

    def shuffle(self, seed: int, count: Callable[[int], None]) -> None:
        """Shuffle the records of each shard; call it after the last `flush`.

        Records are read from the memory-mapped file, so that memory does not grow with it. `count`
        is called with the number of records of each shard.
        """
        for index, (path, examples) in enumerate(zip(self._paths, self.examples, strict=True)):
            self._crcs[index] = _shuffle(path, np.random.RandomState((seed, index)))
            count(examples)

    @property
    def examples(self) -> list[int]:
        """Number of records of each shard."""
        share, more = divmod(self._added, len(self._paths))
        return [share + (index < more) for index in range(len(self._paths))]

    @property
    def crcs(self) -> list[str]:
        """The crc32c of each shard as written so far."""
        return [f"{crc:08x}" for crc in self._crcs]


def _shuffle(path: Path, random: np.random.RandomState) -> int:
    """Rewrite a shard in a random order; return its crc32c."""
    if not path.stat().st_size:
        return 0
    part, crc = path.with_suffix(".part"), 0
    with (
        path.open("rb") as file,
        part.open("wb") as out,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        frames = places(data)
        for index in random.permutation(len(frames) - 1):
            frame = data[frames[index] : frames[index + 1]]
            out.write(frame)
            crc = google_crc32c.extend(crc, frame)
    part.replace(path)
    return crc

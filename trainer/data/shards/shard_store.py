"""The disk limit `data.disk` of a dataset, and the shards that a task keeps within it.

The chief and all workers make the same decision about streaming, because it depends only on the
configuration, the manifest and the number of workers.

Readers announce the shards that they will use, in order. A thread prefetches the next shards while
there is room, and evicts the shards that will be used last. A held shard is never evicted. A shard
counts toward the limit from the start of its fetch. This module does not import TensorFlow.
"""

from __future__ import annotations

import math
import random
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path

from flotilla.trainer import storage
from flotilla.trainer.config.data import parse_size
from flotilla.trainer.config.schema import Config
from flotilla.trainer.features.dataset_spec import DatasetSpec
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.storage import Manifest
from flotilla.trainer.storage.errors import report_errors

TRAIN, VALIDATION = "train", "validation"
# Paths in a worker's working folder: pipes and answers, shards, and the pipe for requests.
FOLDER = "feed"
SHARDS = "held"
ASK = f"{FOLDER}/ask"
FAILED = "failed"
# Maximum number of shards that training interleaves, if the disk has room for them.
AT_ONCE = 8
# Maximum number of announced shards of a reader that the store considers.
LOOKAHEAD = 1024


@dataclass(frozen=True, kw_only=True)
class Streaming:
    """Parameters of streaming shards, of which at most `limit` bytes are on a worker's disk.

    Training interleaves `at_once` shards. `attempt` identifies the graphs of this attempt.
    """

    limit: int
    at_once: int
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass(frozen=True, kw_only=True)
class PartRange:
    """A range of examples: skip `skip` in shards `first` to `last` (exclusive), and take `take`."""

    first: int
    last: int
    skip: int
    take: int


def plan_streaming(config: Config, manifest: Manifest, workers: int) -> Streaming | None:
    """Return the streaming parameters, or None if all shards fit on disk. Raises `ConfigError`."""
    if not config.data.disk:
        return None
    spec, sizes = DatasetSpec.from_manifest(manifest), {e.path: e.bytes for e in manifest.files}
    train = [sizes[name] for name in spec.files(TRAIN)]
    measured = [sizes[name] for name in spec.files(VALIDATION)] if VALIDATION in spec.shards else []
    of = max(1, workers) if config.data.partition == "disjoint" else 1
    limit = parse_size(config.data.disk)
    if max(sum(train[index::of]) for index in range(of)) + sum(measured) <= limit:
        return None
    if config.cluster.in_process:
        raise ConfigError(
            "data.disk: with cluster.in_process all workers share one folder, and shards cannot "
            "be streamed; use only one of the two settings"
        )
    largest = max(train)
    other = max([*sorted(train)[:-1], *measured], default=0)
    if largest + other > limit:
        count = math.ceil(2.2 * sum(train) / limit)
        raise ConfigError(
            f"data.disk: {config.data.disk} is too small: a shard of {_megabytes(largest)} is read "
            f"while another of {_megabytes(other)} is downloaded; set data.disk to "
            f"{_megabytes(largest + other)} or more, or data.shards to {count} or more"
        )
    # Leave room for `at_once` shards being read, as many being fetched, and one more shard.
    room = (limit - max(largest, other)) // (2 * largest)
    return Streaming(limit=limit, at_once=max(1, min(AT_ONCE, room)))


def _megabytes(size: int) -> str:
    return f"{math.ceil(size / 10**5) / 10:.1f}MB" if size >= 10**6 else f"{size}B"


def shuffle_shards(names: Sequence[str], seed: int, epoch: int) -> list[str]:
    """Return the shards in a random order that depends on the seed and the epoch."""
    return random.Random(f"{seed} {epoch}").sample(names, len(names))


def part_range(shards: Sequence[int], batch_size: int, part: int, of: int) -> PartRange:
    """Return the range of examples of a part of a split. A part is a whole number of batches.

    `shards` has the number of examples of each shard. Parts differ by at most one batch.
    """
    examples = sum(shards)
    batches = math.ceil(examples / batch_size)
    begin, end = (min(examples, batches * number // of * batch_size) for number in (part, part + 1))
    if begin == end:
        return PartRange(first=0, last=0, skip=0, take=0)
    ends = [sum(shards[: index + 1]) for index in range(len(shards))]
    first = next(index for index, last in enumerate(ends) if last > begin)
    last = next(index for index, last in enumerate(ends) if last >= end) + 1
    return PartRange(first=first, last=last, skip=begin - sum(shards[:first]), take=end - begin)


class ShardStore:
    """Fetches and verifies shards of a dataset. All methods are thread-safe."""

    def __init__(
        self, uri: str, folder: Path, *, limit: int, changed: Callable[[], None] = lambda: None
    ) -> None:
        """Start with an empty folder, deleting files of an earlier attempt. Raises `UserError`.

        `limit` is the maximum size in bytes. It must cover the held shards and the largest other
        shard. `changed` is called by the thread after each fetch, whether it succeeded or not.
        """
        self.uri, self.folder, self.limit = uri, folder, limit
        self._manifest = storage.read_manifest(uri)
        self._sizes = {entry.path: entry.bytes for entry in self._manifest.files}
        self._lock = threading.Condition()
        self._local: set[str] = set()
        self._held: dict[str, set[str]] = {}
        self._demanded: dict[str, str] = {}
        self._upcoming: dict[str, Sequence[str]] = {}
        self._fetching = ""
        self._closed = False
        self.error: Exception | None = None
        self.changed = changed
        with report_errors(f"use {folder}"):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        self._thread = threading.Thread(target=self._fetch_all, name="shards", daemon=True)
        self._thread.start()

    def will_use(self, reader: str, names: Sequence[str]) -> None:
        """Announce the next shards of a reader, in order. This replaces earlier announcements."""
        with self._lock:
            self._upcoming[reader] = names
            self._lock.notify_all()

    def try_hold(self, reader: str, name: str) -> bool:
        """Return whether a shard is on disk, and hold it or fetch it next. Raises fetch errors."""
        with self._lock:
            if self.error:
                raise self.error
            if name not in self._sizes:
                raise ValueError(f"{self.uri} holds no {name}")
            if name in self._local:
                self._held.setdefault(name, set()).add(reader)
                self._demanded.pop(reader, None)
                return True
            self._demanded[reader] = name
            self._lock.notify_all()
            return False

    def release(self, reader: str, name: str = "") -> None:
        """Release one or all shards of a reader. They stay on disk until room is needed."""
        with self._lock:
            for each in [name] if name else [*self._held]:
                self._held.get(each, set()).discard(reader)
                if not self._held.get(each):
                    self._held.pop(each, None)
            if not name:
                self._demanded.pop(reader, None)
            self._lock.notify_all()

    def close(self) -> None:
        """Start no more fetches. A running fetch continues."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()

    def _fetch_all(self) -> None:
        try:
            while name := self._next():
                only = {name}.__contains__
                storage.fetch(self.uri, self.folder, only=only, manifest=self._manifest)
                with self._lock:
                    self._local.add(name)
                    self._fetching = ""
                    self._lock.notify_all()
                self.changed()
        # After any error, notify the readers that wait for a shard.
        except Exception as error:
            with self._lock:
                self.error = error
                self._lock.notify_all()
            self.changed()

    def _next(self) -> str:
        """Wait until a shard can be fetched, make room for it, and return it, or "" if closed."""
        with self._lock:
            while not self._closed:
                order = [*self._demanded.values(), *self._merge_announced()]
                name = next((each for each in order if each not in self._local), "")
                if name and self._make_room(name, order):
                    self._fetching = name
                    return name
                self._lock.wait()
            return ""

    def _merge_announced(self) -> Iterator[str]:
        lists = [islice(names, LOOKAHEAD) for names in self._upcoming.values()]
        for row in zip_longest(*lists):
            yield from (name for name in row if name is not None)

    def _make_room(self, name: str, order: Sequence[str]) -> bool:
        """Evict shards needed after `name`, the latest first. Return whether `name` fits."""
        place: dict[str, int] = {}
        for index, each in enumerate(order):
            place.setdefault(each, index)
        last = len(order)
        free = [each for each in sorted(self._local) if not self._held.get(each)]
        later = [each for each in free if place.get(each, last) > place[name]]
        later.sort(key=lambda each: place.get(each, last))
        lacking = self._count_bytes() + self._sizes[name] - self.limit
        if lacking > sum(self._sizes[each] for each in later):
            return False
        while lacking > 0:
            gone = later.pop()
            with report_errors(f"make room for {name}"):
                (self.folder / gone).unlink(missing_ok=True)
            self._local.remove(gone)
            lacking -= self._sizes[gone]
        return True

    def _count_bytes(self) -> int:
        return sum(self._sizes[name] for name in {*self._local, self._fetching} - {""})

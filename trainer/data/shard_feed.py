"""Serves shards to graphs in a worker process. Graphs cannot run Python code of this package.

A graph can read and write files, and it blocks when it opens a named pipe that has no writer.
Therefore a reader, `flotilla.trainer.data.read`, does this for each shard:

1. It writes `next READER ATTEMPT EPOCH NUMBER SEED` to the pipe `ask`, which never blocks.
2. It reads the pipe `READER.gate0`, or `gate1` if NUMBER is odd. This blocks until the feed opens
   the gate, when the shard is on disk. The feed closes the gate at the next request.
3. It reads the file `READER ATTEMPT EPOCH NUMBER`, which contains the path of the shard. It is
   empty at the end of an epoch, and `FAILED` if the feed has failed. If it does not exist, the gate
   was opened for another request, and the reader starts again.
4. After the last block of a shard, it writes `done READER ATTEMPT NAME` to `ask`.

A graph of an earlier attempt may still wait at a gate: all its requests fail.

A `ShardStore` keeps the shards of a task within the limit `data.disk`. Readers announce the shards
that they will use, in order. A thread prefetches the next shards while there is room, and evicts
the shards that will be used last. A held shard is never evicted. A shard counts toward the limit
from the start of its fetch. This module does not import TensorFlow.
"""

from __future__ import annotations

import math
import os
import random
import selectors
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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

# A function that returns the shards of an epoch in order, given a seed and the number of the epoch.
Order = Callable[[int, int], Sequence[str]]
_CHUNK = 1 << 16


@dataclass(frozen=True)
class _Ask:
    reader: str
    attempt: str
    epoch: int
    number: int
    seed: int


class ShardFeed:
    """Serves shards of a `ShardStore` to the graphs of this process, in a thread."""

    def __init__(self, uri: str, workdir: Path, *, limit: int, orders: Mapping[str, Order]) -> None:
        """Start serving the readers that are keys of `orders`. Raises `UserError`."""
        self.error: Exception | None = None
        self._ended = threading.Event()
        self._workdir, self._folder, self._orders = workdir.absolute(), workdir / FOLDER, orders
        self._asked: dict[str, _Ask] = {}
        self._over: set[str] = set()
        self._gates: dict[str, int] = {}
        self._rest = b""
        self._closing = False
        with report_errors(f"use {self._folder}"):
            if self._folder.exists():
                shutil.rmtree(self._folder)
            self._folder.mkdir(parents=True)
            gates = (self._folder / f"{reader}.gate{odd}" for reader in orders for odd in (0, 1))
            for path in (workdir / ASK, *gates):
                os.mkfifo(path)
            # Also open the pipe for writing, so that reads never reach its end and writers never
            # block.
            self._requests = os.open(workdir / ASK, os.O_RDWR | os.O_NONBLOCK)
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._requests, selectors.EVENT_READ, self._take_requests)
        self._selector.register(self._woken, selectors.EVENT_READ, self._take_wake)
        self.store = ShardStore(uri, workdir / SHARDS, limit=limit, changed=self._wake)
        threading.Thread(target=self._serve, name="shard-feed", daemon=True).start()

    def wait(self) -> None:
        """Block until a fetch fails, and raise its error. Return when the feed is closed."""
        self._ended.wait()
        if self.error and not self._closing:
            raise self.error

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """If a fetch failed, raise its error, not the graph's. Close the feed after the block."""
        try:
            yield
        except Exception:
            if self.error and not self._closing:
                raise self.error from None
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Notify all readers that no more shards will come, and unblock them."""
        self._closing = True
        self.store.close()
        self._wake()

    def _wake(self) -> None:
        # If the pipe is full, the bytes in it will wake the thread anyway.
        with suppress(BlockingIOError):
            os.write(self._wakes, b".")

    def _serve(self) -> None:
        while True:
            try:
                for key, _ in self._selector.select():
                    key.data()
            # After any error, unblock the readers.
            except Exception as error:
                self.error = self.error or error
                self._ended.set()
                self._answer_all()

    def _take_wake(self) -> None:
        os.read(self._woken, _CHUNK)
        if self._closing:
            raise RuntimeError("the shard feed is closed")
        if self.store.error:
            raise self.store.error
        self._answer_all()

    def _take_requests(self) -> None:
        *lines, self._rest = (self._rest + os.read(self._requests, _CHUNK)).split(b"\n")
        for line in lines:
            verb, reader, attempt, *more = line.decode().split(" ")
            if verb == "next":
                self._take_next(_Ask(reader, attempt, *map(int, more)))
            elif (now := self._asked.get(reader)) and now.attempt == attempt:
                self.store.release(reader, Path(more[0]).name)
                if not more[0]:
                    self.store.will_use(reader, ())
                    self._forget(self._asked.pop(reader))

    def _forget(self, ask: _Ask) -> None:
        self._path(ask).unlink(missing_ok=True)
        if ask.reader in self._gates:
            os.close(self._gates.pop(ask.reader))

    def _take_next(self, ask: _Ask) -> None:
        if ask.attempt in self._over:
            self._path(ask).write_text(FAILED, encoding="utf-8")
            return
        before = self._asked.get(ask.reader)
        if before == ask:
            return
        if before:
            self._forget(before)
            self._over |= {before.attempt} - {ask.attempt}
        self._asked[ask.reader] = ask
        if ask.number == 0:
            self.store.release(ask.reader)
        self._answer(ask)
        order = self._orders[ask.reader]
        following = order(ask.seed, ask.epoch + 1) if ask.reader == TRAIN else ()
        upcoming = [*order(ask.seed, ask.epoch)[ask.number + 1 :], *following]
        self.store.will_use(ask.reader, upcoming)

    def _answer_all(self) -> None:
        for ask in [*self._asked.values()]:
            self._answer(ask)

    def _answer(self, ask: _Ask) -> None:
        """Answer a request and open its gate, unless its shard is not yet on disk."""
        if ask.reader in self._gates:
            return
        order = self._orders[ask.reader](ask.seed, ask.epoch)
        if self.error:
            answer = FAILED
        elif ask.number >= len(order):
            answer = ""
        elif self.store.try_hold(ask.reader, name := order[ask.number]):
            answer = f"{SHARDS}/{name}"
        else:
            return
        self._path(ask).write_text(answer, encoding="utf-8")
        gate = self._folder / f"{ask.reader}.gate{ask.number % 2}"
        # Open the gate for reading too, so that this call does not wait for the reader.
        self._gates[ask.reader] = os.open(gate, os.O_RDWR | os.O_NONBLOCK)

    def _path(self, ask: _Ask) -> Path:
        return self._folder / f"{ask.reader} {ask.attempt} {ask.epoch} {ask.number}"


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
    """Return the streaming parameters, or None if all shards fit on disk. Raises `ConfigError`.

    The chief and all workers make the same decision, because it depends only on the configuration,
    the manifest and the number of workers.
    """
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

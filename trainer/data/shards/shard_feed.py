"""Serves shards to graphs in a worker process. Graphs cannot run Python code of this package.

A graph can read and write files, and it blocks when it opens a named pipe that has no writer.
Therefore a reader, `flotilla.trainer.data.shards.fed_blocks`, does this for each shard:

1. It writes `next READER ATTEMPT EPOCH NUMBER SEED` to the pipe `ask`, which never blocks.
2. It reads the pipe `READER.gate0`, or `gate1` if NUMBER is odd. This blocks until the feed opens
   the gate, when the shard is on disk. The feed closes the gate at the next request.
3. It reads the file `READER ATTEMPT EPOCH NUMBER`, which contains the path of the shard. It is
   empty at the end of an epoch, and `FAILED` if the feed has failed. If it does not exist, the gate
   was opened for another request, and the reader starts again.
4. After the last block of a shard, it writes `done READER ATTEMPT NAME` to `ask`.

A graph of an earlier attempt may still wait at a gate: all its requests fail. This module does not
import TensorFlow.
"""

from __future__ import annotations

import os
import selectors
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flotilla.trainer.data.shards.shard_store import ASK, FAILED, FOLDER, SHARDS, TRAIN, ShardStore
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

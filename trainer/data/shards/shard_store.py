"""The shards that a task has on its disk, within a number of bytes.

Readers say which shards they will use, in order. One thread fetches those that are used next, as
far as there is room, and removes what is used last. What a reader holds is never removed. The bytes
of a shard count from the moment in which its fetch begins. Free of TensorFlow.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, zip_longest
from pathlib import Path

from trainer import storage
from trainer.storage.errors import reported

# How many of the shards that a reader will use are looked at.
LOOKAHEAD = 1024


class ShardStore:
    """Fetches shards of one dataset into a folder, verified; all methods are thread-safe."""

    def __init__(
        self, uri: str, folder: Path, *, limit: int, changed: Callable[[], None] = lambda: None
    ) -> None:
        """Begin with an empty folder: what another attempt left there is removed.

        Args:
            uri: the published dataset.
            folder: holds the shards, and what is being fetched.
            limit: bytes; at least those of the shards that are held, and the largest other one.
            changed: called by the thread whenever a shard has come or a fetch has failed.

        Raises:
            UserError: the dataset or the folder cannot be used.
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
        with reported(f"use {folder}"):
            if folder.exists():
                shutil.rmtree(folder)
            folder.mkdir(parents=True)
        self._thread = threading.Thread(target=self._fetch_all, name="shards", daemon=True)
        self._thread.start()

    @property
    def bytes_used(self) -> int:
        """Bytes of all shards that are here or being fetched."""
        with self._lock:
            return self._used()

    def will_use(self, reader: str, names: Sequence[str]) -> None:
        """Say what a reader will use next, in order, in place of what it said before."""
        with self._lock:
            self._upcoming[reader] = names
            self._lock.notify_all()

    def try_hold(self, reader: str, name: str) -> bool:
        """Hold a shard for a reader if it is here; otherwise fetch it before all others.

        Raises:
            UserError: a shard could not be fetched, now or before.
        """
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

    def hold(self, reader: str, name: str) -> Path:
        """Hold a shard for a reader, and return its path when it is here; see `try_hold`."""
        with self._lock:
            while not self.try_hold(reader, name):
                self._lock.wait()
        return self.folder / name

    def release(self, reader: str, name: str = "") -> None:
        """Release a shard that a reader holds, or all of them; it stays until room is needed."""
        with self._lock:
            for each in [name] if name else [*self._held]:
                self._held.get(each, set()).discard(reader)
                if not self._held.get(each):
                    self._held.pop(each, None)
            if not name:
                self._demanded.pop(reader, None)
            self._lock.notify_all()

    def close(self) -> None:
        """Fetch nothing more; a fetch that has begun goes on."""
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
        # Whatever it is, who waits for a shard has to know.
        except Exception as error:
            with self._lock:
                self.error = error
                self._lock.notify_all()
            self.changed()

    def _next(self) -> str:
        """Wait until a shard can be fetched, make room for it, and return it; "" at the end."""
        with self._lock:
            while not self._closed:
                order = [*self._demanded.values(), *self._in_turn()]
                name = next((each for each in order if each not in self._local), "")
                if name and self._make_room(name, order):
                    self._fetching = name
                    return name
                self._lock.wait()
            return ""

    def _in_turn(self) -> Iterator[str]:
        lists = [islice(names, LOOKAHEAD) for names in self._upcoming.values()]
        for row in zip_longest(*lists):
            yield from (name for name in row if name is not None)

    def _make_room(self, name: str, order: Sequence[str]) -> bool:
        """Remove shards that are used later than `name`, the last ones first, until it fits."""
        place: dict[str, int] = {}
        for index, each in enumerate(order):
            place.setdefault(each, index)
        last = len(order)
        free = [each for each in sorted(self._local) if not self._held.get(each)]
        later = [each for each in free if place.get(each, last) > place[name]]
        later.sort(key=lambda each: place.get(each, last))
        lacking = self._used() + self._sizes[name] - self.limit
        if lacking > sum(self._sizes[each] for each in later):
            return False
        while lacking > 0:
            gone = later.pop()
            with reported(f"make room for {name}"):
                (self.folder / gone).unlink(missing_ok=True)
            self._local.remove(gone)
            lacking -= self._sizes[gone]
        return True

    def _used(self) -> int:
        return sum(self._sizes[name] for name in {*self._local, self._fetching} - {""})

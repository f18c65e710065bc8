"""Checkpoints in an object store: valid on this machine at once, published in the background.

Training never waits for the store, but for the last checkpoint. What was saved and not yet
published when a task died is found by its next life on the same machine, and published then.

What a task has to bring to a store while it trains: carried in the background, one at a time.

Things of one slot replace each other: of two checkpoints that wait, the newer one is enough.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from trainer import events, storage
from trainer.checkpoints.checkpoints import Checkpoints, RestoredCheckpoint, publish_anew
from trainer.checkpoints.history import read_validations
from trainer.checkpoints.index import list_checkpoints
from trainer.errors import ClusterLostError, RunInterruptedError, UserError

Upload = Callable[[], None]
log = logging.getLogger(__name__)


class UploadQueue:
    """One thread that runs errands; never more than one is on its way."""

    def __init__(self) -> None:
        """Start the thread, which ends with the process."""
        self._waiting: dict[str, Upload] = {}
        self._failed: dict[str, tuple[Upload, UserError]] = {}
        self._broken: BaseException | None = None
        self._busy = False
        self._change = threading.Condition()
        threading.Thread(target=self._run, name="outbox", daemon=True).start()

    def put(self, slot: str, errand: Upload) -> None:
        """Have `errand` run soon, in place of one that waits in the same slot.

        Raises:
            UserError: an earlier errand failed in a way that will not pass by itself.
        """
        with self._change:
            self._raise_lasting()
            self._waiting[slot] = errand
            self._change.notify_all()

    def flush(self) -> None:
        """Wait until all is carried; what a store was not available for is tried once more.

        Raises:
            UserError: something could not be carried.
        """
        with self._change:
            self._wait()
            for slot, (errand, _) in self._failed.items():
                self._waiting.setdefault(slot, errand)
            self._failed.clear()
            self._change.notify_all()
            self._wait()
            self._raise_lasting()
            for _, error in self._failed.values():
                raise error

    def _wait(self) -> None:
        self._change.wait_for(lambda: not self._waiting and not self._busy)

    def _raise_lasting(self) -> None:
        if self._broken:
            raise self._broken
        for _, error in self._failed.values():
            if not isinstance(error, storage.Unavailable):
                raise error

    def _run(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: bool(self._waiting))
                slot = next(iter(self._waiting))
                errand = self._waiting.pop(slot)
                self._busy = True
            failure = self._attempt(errand)
            with self._change:
                self._busy = False
                # A newer one is about to show whether it still fails.
                if failure and slot not in self._waiting:
                    self._failed[slot] = (errand, failure)
                elif not failure:
                    self._failed.pop(slot, None)
                self._change.notify_all()

    def _attempt(self, errand: Upload) -> UserError | None:
        try:
            errand()
        except UserError as error:
            log.warning("%s", error)
            events.emit(events.UploadFailed(reason=str(error)))
            return error
        except BaseException as error:
            # A bug has to end training as it would on its own thread.
            self._broken = error
        return None


def checkpoints_of(uri: str, *, alone: bool, **settings: Any) -> Checkpoints:
    """Return the checkpoints below `uri`, in a file system or in an object store.

    `alone` says whether no other task has to find the same newest checkpoint; the `settings` are
    those of `Checkpoints`.
    """
    if storage.local_path(uri):
        return Checkpoints(uri, **settings)
    kept = RemoteCheckpoints(uri, **settings)
    kept.alone = alone
    return kept


class RemoteCheckpoints(Checkpoints):
    """The checkpoints of one run in an object store."""

    alone = True

    def __init__(self, uri: str, *, scratch: Path, **settings: Any) -> None:
        """Keep what is not published yet below `scratch`."""
        super().__init__(uri, scratch=scratch, **settings)
        self._outbox = UploadQueue()
        self._unpublished = storage.uri_of(scratch / "unpublished")
        self._logs = scratch / "logs"
        self._carried = ""
        self._measured: list[dict[str, Any]] = []

    @property
    def logs(self) -> Path:
        """Return the folder for TensorBoard's files, which are uploaded with each checkpoint."""
        return self._logs

    def newest(self) -> RestoredCheckpoint | None:
        """Fetch the newest valid checkpoint, published or not; see `Checkpoints.newest`."""
        found = super().newest()
        if found and found.uri.startswith(self._unpublished):
            self.last = storage.join(self.uri, storage.name_of(found.uri))
            self._hand_over(storage.name_of(found.uri))
        return found

    def write(self, uri: str, data: bytes) -> None:
        """Write a small file in the background; only the newest content counts."""
        self._outbox.put(uri, partial(super().write, uri, data))

    def measured(self) -> list[dict[str, Any]]:
        """Return what the evaluator had measured when the store was last asked, and ask it anew."""
        self._outbox.put("measured", self._ask_measured)
        return self._measured

    @contextmanager
    def flushed(self) -> Iterator[None]:
        """Wait at the end until all is published.

        A life that is to begin again does not wait: the next one finds what it left.

        Raises:
            UserError: the last checkpoint could not be published.
        """
        try:
            yield
        except ClusterLostError:
            raise
        except RunInterruptedError:
            self._outbox.flush()
            raise
        except UserError:
            try:
                self._outbox.flush()
            except UserError as error:
                log.warning("%s", error)
            raise
        self._outbox.flush()

    def _candidates(self) -> list[tuple[str, int]]:
        there = list_checkpoints(self.uri)
        reached = {step for _, step in there}
        here = [pair for pair in list_checkpoints(self._unpublished) if pair[1] not in reached]
        return sorted([*there, *(here if self.alone else [])], key=lambda pair: pair[1])

    def _publish(self, folder: Path, uri: str, fields: Mapping[str, Any]) -> None:
        name = storage.name_of(uri)
        here = storage.join(self._unpublished, name)
        publish_anew(folder, here, fields)
        # While the store is away, what waits is replaced by what is newer.
        for old, _ in list_checkpoints(self._unpublished):
            if old not in (here, self._carried):
                storage.delete(old)
        self._hand_over(name)

    def _hand_over(self, name: str) -> None:
        self._outbox.put("checkpoint", partial(self._carry, name))
        self._outbox.put("logs", self._carry_logs)

    def _carry(self, name: str) -> None:
        here = self._carried = storage.join(self._unpublished, name)
        folder = storage.local_path(here)
        if folder is None or not storage.is_published(here):
            return
        self.lease.check()
        manifest = storage.read_manifest(here)
        there = storage.join(self.uri, name)
        try:
            if there in self.passed_over:
                # It may have the same manifest, and other files.
                storage.delete(there)
            storage.publish(folder, there, kind=manifest.kind, fields=manifest.fields)
        except (storage.Conflict, storage.Corrupt, storage.UnknownSchema):
            # What stands there goes, and an upload may have lasted: it may be another's by now.
            self.lease.check()
            publish_anew(folder, there, manifest.fields)
        self.passed_over.discard(there)
        self.published(there, manifest.fields["global_step"])
        storage.delete(here)

    def _ask_measured(self) -> None:
        try:
            self._measured = read_validations(self.uri)
        except UserError as error:
            # Training to the end is no failure.
            log.warning("%s", error)

    def _carry_logs(self) -> None:
        self.lease.require()
        for path in sorted(self._logs.glob("*")):
            storage.write_bytes(storage.join(self.uri, "logs", path.name), path.read_bytes())

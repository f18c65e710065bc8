"""Checkpoints in an object store: valid on this machine at once, published in the background.

Training waits for the store only at the last checkpoint. A checkpoint that was saved but not yet
published when a task died is found by its next attempt on the same machine, and published then.

`UploadQueue` runs one upload at a time. Uploads of one slot replace each other: of two checkpoints
that wait, only the newer one is uploaded.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from trainer import events, storage
from trainer.checkpoints.checkpoints import Checkpoints, RestoredCheckpoint, publish_anew
from trainer.checkpoints.history import HISTORY_FILE, read_validations
from trainer.checkpoints.index import list_checkpoints
from trainer.checkpoints.rows import RowFile, SegmentedRowFile
from trainer.errors import ClusterLostError, RunInterruptedError, UserError

Upload = Callable[[], None]
log = logging.getLogger(__name__)


class UploadQueue:
    """A thread that runs uploads, one at a time."""

    def __init__(self) -> None:
        """Start the thread, which ends with the process."""
        self._waiting: dict[str, Upload] = {}
        self._failed: dict[str, tuple[Upload, UserError]] = {}
        self._broken: BaseException | None = None
        self._busy = False
        self._change = threading.Condition()
        threading.Thread(target=self._run, name="uploads", daemon=True).start()

    def put(self, slot: str, upload: Upload) -> None:
        """Queue `upload`, in place of one that waits in the same slot.

        Raises:
            UserError: an earlier upload failed for a reason that retries cannot fix.
        """
        with self._change:
            self._raise_lasting()
            self._waiting[slot] = upload
            self._change.notify_all()

    def flush(self) -> None:
        """Wait until all uploads are done; those that failed are tried once more.

        Raises:
            UserError: an upload failed.
        """
        with self._change:
            self._wait()
            for slot, (upload, _) in self._failed.items():
                self._waiting.setdefault(slot, upload)
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
                upload = self._waiting.pop(slot)
                self._busy = True
            failure = self._attempt(upload)
            with self._change:
                self._busy = False
                # A newer upload of the slot will show whether it still fails.
                if failure and slot not in self._waiting:
                    self._failed[slot] = (upload, failure)
                elif not failure:
                    self._failed.pop(slot, None)
                self._change.notify_all()

    def _attempt(self, upload: Upload) -> UserError | None:
        try:
            upload()
        except UserError as error:
            log.warning("%s", error)
            events.emit(events.UploadFailed(reason=str(error)))
            return error
        except BaseException as error:
            # A bug has to end training, as it would on the thread of training.
            self._broken = error
        return None


class LogFiles:
    """TensorBoard's files in a folder of this machine, on their way to an object store."""

    def __init__(self, folder: Path, uri: str) -> None:
        """Upload what is below `folder` to the same paths below `uri`."""
        self.folder = folder
        self._uri = uri
        self._uploaded: dict[Path, int] = {}
        self._has_failed = False

    def upload(self) -> None:
        """Upload what has grown; the first failure is a warning, and none ends training."""
        try:
            for path in sorted(self.folder.rglob("*")):
                if not path.is_file() or self._uploaded.get(path) == path.stat().st_size:
                    continue
                data = path.read_bytes()
                place = path.relative_to(self.folder)
                storage.write_bytes(storage.join(self._uri, *place.parts), data)
                self._uploaded[path] = len(data)
        except (UserError, OSError) as error:
            level = logging.DEBUG if self._has_failed else logging.WARNING
            log.log(level, "the logs for TensorBoard are not uploaded: %s", error)
            self._has_failed = True


def checkpoints_of(uri: str, *, alone: bool, **settings: Any) -> Checkpoints:
    """Return the checkpoints below `uri`, in a file system or in an object store.

    `alone` says whether no other task has to find the same newest checkpoint. The other settings
    are those of `Checkpoints`.
    """
    if storage.local_path(uri):
        return Checkpoints(uri, **settings)
    return RemoteCheckpoints(uri, alone=alone, **settings)


class RemoteCheckpoints(Checkpoints):
    """The checkpoints of one run in an object store."""

    def __init__(self, uri: str, *, scratch: Path, alone: bool = True, **settings: Any) -> None:
        """Keep checkpoints that are not published yet below `scratch`."""
        super().__init__(uri, scratch=scratch, **settings)
        self._alone = alone
        self._uploads = UploadQueue()
        self._pending = storage.uri_of(scratch / "unpublished")
        self._log_files = LogFiles(scratch / "logs", storage.join(self.uri, "logs"))
        self._uploading = ""
        self._measured: list[dict[str, Any]] = []

    @property
    def logs(self) -> Path:
        """Return the folder for TensorBoard's files, which are uploaded with each checkpoint."""
        return self._log_files.folder

    def newest(self) -> RestoredCheckpoint | None:
        """Fetch the newest valid checkpoint, published or not yet; see `Checkpoints.newest`."""
        found = super().newest()
        if found and found.uri.startswith(self._pending):
            self.last = storage.join(self.uri, storage.name_of(found.uri))
            self._queue(storage.name_of(found.uri))
        return found

    @cached_property
    def history(self) -> RowFile:
        """Return the writer of the history, which is uploaded before each checkpoint."""
        uri = storage.join(self.uri, HISTORY_FILE)
        return SegmentedRowFile(uri, self._require_lease)

    def measured(self) -> list[dict[str, Any]]:
        """Return the validations of the last read, and queue the next read."""
        self._uploads.put("measured", self._read_measured)
        return self._measured

    @contextmanager
    def flushed(self) -> Iterator[None]:
        """Wait at the end until all is published.

        An attempt that ends by `ClusterLostError` does not wait: the next one finds what it left.

        Raises:
            UserError: the last checkpoint could not be published.
        """
        try:
            yield
        except ClusterLostError:
            raise
        except RunInterruptedError:
            self._flush()
            raise
        except UserError:
            try:
                self._flush()
            except UserError as error:
                log.warning("%s", error)
            raise
        self._flush()

    def _flush(self) -> None:
        self._uploads.put("history", self.history.upload)
        self._uploads.flush()

    def _candidates(self) -> list[tuple[str, int]]:
        there = list_checkpoints(self.uri)
        reached = {step for _, step in there}
        here = [pair for pair in list_checkpoints(self._pending) if pair[1] not in reached]
        return sorted([*there, *(here if self._alone else [])], key=lambda pair: pair[1])

    def _publish(self, folder: Path, uri: str, fields: Mapping[str, Any]) -> None:
        name = storage.name_of(uri)
        here = storage.join(self._pending, name)
        publish_anew(folder, here, fields)
        # While the store is unavailable, a newer checkpoint replaces one that waits.
        for old, _ in list_checkpoints(self._pending):
            if old not in (here, self._uploading):
                storage.delete(old)
        self._queue(name)

    def _queue(self, name: str) -> None:
        self._uploads.put("checkpoint", partial(self._upload, name))
        self._uploads.put("logs", self._upload_logs)

    def _upload(self, name: str) -> None:
        here = self._uploading = storage.join(self._pending, name)
        folder = storage.local_path(here)
        if folder is None or not storage.is_published(here):
            return
        self.lease.check()
        # A run that goes on from the checkpoint has the rows up to there.
        self.history.upload()
        manifest = storage.read_manifest(here)
        there = storage.join(self.uri, name)
        try:
            if there in self.passed_over:
                # It may have the same manifest, and other content.
                storage.delete(there)
            storage.publish(folder, there, kind=manifest.kind, fields=manifest.fields)
        except (storage.Conflict, storage.Corrupt, storage.UnknownSchema):
            # It is about to be replaced, and the upload took time: another job may own it by now.
            self.lease.check()
            publish_anew(folder, there, manifest.fields)
        self.passed_over.discard(there)
        self.published(there, manifest.fields["global_step"])
        storage.delete(here)

    def _read_measured(self) -> None:
        try:
            self._measured = read_validations(self.uri)
        except UserError as error:
            # Without early stopping training is merely longer.
            log.warning("%s", error)

    def _upload_logs(self) -> None:
        self.lease.require()
        self._log_files.upload()

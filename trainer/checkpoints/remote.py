"""Checkpoints in an object store: saved locally first, and published in the background."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from flotilla.trainer import storage
from flotilla.trainer.checkpoints.checkpoints import Checkpoints, RestoredCheckpoint
from flotilla.trainer.checkpoints.history import (
    HISTORY_FILE,
    RowFile,
    SegmentedRowFile,
    read_validations,
)
from flotilla.trainer.checkpoints.index import list_checkpoints, publish_anew
from flotilla.trainer.checkpoints.uploads import LogFiles
from flotilla.trainer.runtime.errors import UserError

log = logging.getLogger(__name__)


def open_checkpoints(uri: str, *, alone: bool, **settings: Any) -> Checkpoints:
    """Open the checkpoints below `uri`. Set `alone` if no other task reads the newest of them."""
    if storage.local_path(uri):
        return Checkpoints(uri, **settings)
    return RemoteCheckpoints(uri, alone=alone, **settings)


class RemoteCheckpoints(Checkpoints):
    """The checkpoints of one run in an object store."""

    def __init__(self, uri: str, *, scratch: Path, alone: bool = True, **settings: Any) -> None:
        """Keep checkpoints below `scratch` until they are published."""
        super().__init__(uri, scratch=scratch, **settings)
        self._alone = alone
        self._pending = storage.uri_of(scratch / "unpublished")
        self._log_files = LogFiles(scratch / "logs", storage.join(self.uri, "logs"))
        self._uploading = ""
        self._measured: list[dict[str, Any]] = []

    @property
    def logs(self) -> Path:
        """The folder for TensorBoard's files, which are uploaded with each checkpoint."""
        return self._log_files.folder

    def newest(self) -> RestoredCheckpoint | None:
        """Fetch the newest valid checkpoint, published or pending. See `Checkpoints.newest`."""
        found = super().newest()
        if found and found.uri.startswith(self._pending):
            self.last = storage.join(self.uri, storage.name_of(found.uri))
            self._queue(storage.name_of(found.uri))
        return found

    @cached_property
    def history(self) -> RowFile:
        """The writer of the history, which is uploaded before each checkpoint."""
        uri = storage.join(self.uri, HISTORY_FILE)
        return SegmentedRowFile(uri, self._require_lease)

    def read_validations(self) -> list[dict[str, Any]]:
        """Return the validations that the last background read found, and queue another read."""
        self.uploads.put("measured", self._refresh_validations)
        return self._measured

    def flush(self) -> None:
        """Wait until all saves are published, with the history. Raises `UserError`."""
        try:
            self.uploads.put("history", self.history.upload)
        finally:
            super().flush()

    def _candidates(self) -> list[tuple[str, int]]:
        there = list_checkpoints(self.uri)
        reached = {step for _, step in there}
        here = [pair for pair in list_checkpoints(self._pending) if pair[1] not in reached]
        return sorted([*there, *(here if self._alone else [])], key=lambda pair: pair[1])

    def _publish(self, folder: Path, uri: str, fields: Mapping[str, Any]) -> None:
        # Require the lease already here, because a run also resumes from pending checkpoints.
        self.lease.require()
        name = storage.name_of(uri)
        here = storage.join(self._pending, name)
        publish_anew(folder, here, fields)
        # While the store is unavailable, a newer checkpoint replaces a waiting one.
        for old, _ in list_checkpoints(self._pending):
            if old not in (here, self._uploading):
                storage.delete(old)
        self._queue(name)

    def _queue(self, name: str) -> None:
        self.uploads.put("checkpoint", partial(self._upload, name))
        self.uploads.put("logs", self._upload_logs)

    def _upload(self, name: str) -> None:
        here = self._uploading = storage.join(self._pending, name)
        folder = storage.local_path(here)
        if folder is None or not storage.is_published(here):
            return
        self.prepare_publication()
        manifest = storage.read_manifest(here)
        there = storage.join(self.uri, name)
        try:
            if there in self.passed_over:
                # Delete it, because `publish` would keep invalid files under the same manifest.
                storage.delete(there)
            storage.publish(folder, there, kind=manifest.kind, fields=manifest.fields)
        except (storage.Conflict, storage.Corrupt, storage.UnknownSchema):
            # Check the lease before replacing a checkpoint: another job may have taken over the run
            # during the upload.
            self.lease.check()
            publish_anew(folder, there, manifest.fields)
        self.passed_over.discard(there)
        self.note_published(there, manifest.fields["global_step"])
        storage.delete(here)

    def prepare_publication(self) -> None:
        """Check the lease, and upload the history, which must precede its checkpoint."""
        super().prepare_publication()
        self.history.upload()

    def _is_shared(self, uri: str) -> bool:
        return not uri.startswith(self._pending)

    def _refresh_validations(self) -> None:
        try:
            self._measured = read_validations(self.uri)
        except UserError as error:
            # Only log the error, because nothing but early stopping needs the validations.
            log.warning("%s", error)

    def _upload_logs(self) -> None:
        self.lease.require()
        self._log_files.upload()

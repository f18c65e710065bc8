"""Uploads to an object store: a queue for checkpoints and history, and TensorBoard's files."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flotilla.trainer import events, storage
from flotilla.trainer.runtime.errors import UserError

log = logging.getLogger(__name__)


class _Upload(NamedTuple):
    """An upload, and a function to call if a newer upload replaces it."""

    run: Callable[[], None]
    replaced: Callable[[], None]


class UploadQueue:
    """A thread that runs uploads, one at a time.

    A newer upload replaces a waiting one in the same slot.
    """

    def __init__(self) -> None:
        """Create an empty queue. The first upload starts a daemon thread."""
        self._waiting: dict[str, _Upload] = {}
        self._failed: dict[str, tuple[_Upload, UserError]] = {}
        self._broken: BaseException | None = None
        self._busy = False
        self._change = threading.Condition()
        self._begun = False

    def put(
        self, slot: str, run: Callable[[], None], replaced: Callable[[], None] = lambda: None
    ) -> None:
        """Queue an upload, which replaces a waiting or failed one in the same slot.

        `replaced` is called, on any thread, when a newer upload replaces this one. Raises
        `UserError` if an earlier upload failed for a reason that retries cannot fix.
        """
        with self._change:
            self._raise_lasting()
            if not self._begun:
                self._begun = True
                threading.Thread(target=self._run, name="uploads", daemon=True).start()
            older = [self._waiting.get(slot), self._failed.get(slot, (None,))[0]]
            self._waiting[slot] = _Upload(run, replaced)
            self._change.notify_all()
        for each in older:
            if each:
                each.replaced()

    def flush(self) -> None:
        """Wait for all uploads, and retry failed ones once. Raises `UserError`."""
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
                # Ignore the error if a newer upload waits, which will show whether it persists.
                is_replaced = failure is not None and slot in self._waiting
                if failure and not is_replaced:
                    self._failed[slot] = (upload, failure)
                elif not failure:
                    self._failed.pop(slot, None)
            if is_replaced:
                upload.replaced()
            with self._change:
                self._busy = False
                self._change.notify_all()

    def _attempt(self, upload: _Upload) -> UserError | None:
        try:
            upload.run()
        except UserError as error:
            log.warning("%s", error)
            events.emit(events.UploadFailed(reason=str(error)))
            return error
        except BaseException as error:
            # A bug must end training, as it would on the training thread.
            self._broken = error
        return None


class LogFiles:
    """TensorBoard's files in a local folder, which are uploaded to an object store."""

    def __init__(self, folder: Path, uri: str) -> None:
        """Copy the files in `folder` to the same paths below `uri` at each `upload`."""
        self.folder = folder
        self._uri = uri
        self._uploaded: dict[Path, int] = {}
        self._has_failed = False

    def upload(self) -> None:
        """Upload the files that have grown. Log the first failure as a warning, others as debug."""
        try:
            for path in sorted(self.folder.rglob("*")):
                # Skip links, because a user's program may link to files that are not logs.
                if (
                    path.is_symlink()
                    or not path.is_file()
                    or self._uploaded.get(path) == path.stat().st_size
                ):
                    continue
                data = path.read_bytes()
                place = path.relative_to(self.folder)
                storage.write_bytes(storage.join(self._uri, *place.parts), data)
                self._uploaded[path] = len(data)
        except (UserError, OSError) as error:
            level = logging.DEBUG if self._has_failed else logging.WARNING
            log.log(level, "the TensorBoard logs cannot be uploaded: %s", error)
            self._has_failed = True

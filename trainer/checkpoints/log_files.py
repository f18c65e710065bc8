"""TensorBoard's files of a run, uploaded as they grow."""

from __future__ import annotations

import logging
from pathlib import Path

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError

log = logging.getLogger(__name__)


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

"""A probe of a storage root, which writes, reads, lists and deletes one small file."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage.errors import StoreError, StoreUnavailable
from flotilla.trainer.storage.publishing import choose_store
from flotilla.trainer.storage.store import describe, shorter_retry
from flotilla.trainer.storage.uri import join, local_path, name_of

SILENT, FILES, ALTERED = "SILENT", "FILES", "ALTERED"
# Maximum time to retry the requests of one action, in seconds.
SECONDS = 5.0

Result = TypeVar("Result")


class Unfit(UserError):  # noqa: N818
    """A storage root is unusable.

    Attributes:
        trouble: a name in `store.Trouble`, or `SILENT` (no response in time), `FILES` (a file
            system error) or `ALTERED` (the content read differs from the content written).
        actions: the actions that failed with this trouble: write, read, list, delete.
    """

    def __init__(self, trouble: str, actions: tuple[str, ...], reason: str) -> None:
        """Build the message from the failed actions and the reason."""
        super().__init__(f"cannot {', '.join(actions)}: {reason}")
        self.trouble = trouble
        self.actions = actions
        self.reason = reason


class Probe:
    """A test file with a unique name directly below a URI. `remove` may be called at any time."""

    def __init__(self, root: str) -> None:
        """Choose the name of the file. Raises `UserError` for an invalid URI."""
        self.uri = join(root, f"doctor-{uuid.uuid4().hex[:12]}")
        self._root = root
        folder = local_path(root)
        parents = (folder, *folder.parents) if folder else ()
        # The folders that a write would create, innermost first.
        self._missing = [each for each in parents if not each.exists()]
        self._stopped = threading.Event()
        self._failed: list[Unfit] = []
        self.is_left = False
        self._writing = False

    def examine(self) -> None:
        """Write, read, list and delete the file. Raises `Unfit` for the first trouble found."""
        self._failed.clear()
        data = f"flotilla doctor {self.uri}\n".encode()
        with shorter_retry(SECONDS):
            store = choose_store(self.uri)
            try:
                self.is_left = self._writing = True
                self._do("write", lambda: store.write(self.uri, data))
                self._writing = False
                if self._failed:
                    # The failed write may still create the file, or may have created only its
                    # folders.
                    self.is_left = self._failed[0].trouble in (SILENT, FILES)
                    return
                if self._do("read", lambda: store.read(self.uri)) not in (data, None):
                    said = f"the content read from {self.uri} differs from the content written"
                    self._failed.append(Unfit(ALTERED, ("read",), said))
                names = self._do("list", lambda: store.children(self._root))
                if names is not None and name_of(self.uri) not in names:
                    said = f"{self._root} does not list a file that it contains"
                    self._failed.append(Unfit(ALTERED, ("list",), said))
            finally:
                self._do("delete", self.remove)
                self._report()

    def remove(self) -> None:
        """Remove the written file and the created folders. Raises `OSError` if that fails."""
        if not self.is_left:
            return
        with shorter_retry(SECONDS):
            choose_store(self.uri).discard(self.uri)
        for folder in self._missing:
            with suppress(OSError):
                folder.rmdir()
        # A write that is still in progress may create the file again.
        self.is_left = self._writing

    def stop(self) -> None:
        """Make `examine` skip its remaining actions, except the deletion of the file."""
        self._stopped.set()

    def _do(self, action: str, act: Callable[[], Result]) -> Result | None:
        silent = any(each.trouble == SILENT for each in self._failed)
        if action != "delete" and (silent or self._stopped.is_set()):
            return None
        try:
            return act()
        except StoreUnavailable as error:
            self._failed.append(Unfit(SILENT, (action,), describe(error.__cause__ or error)))
        except StoreError as error:
            self._failed.append(Unfit(error.trouble, (action,), describe(error.__cause__ or error)))
        except OSError as error:
            self._failed.append(Unfit(FILES, (action,), error.strerror or describe(error)))
        return None

    def _report(self) -> None:
        if self._failed:
            first = self._failed[0]
            same = [each for each in self._failed if each.trouble == first.trouble]
            actions = tuple(action for each in same for action in each.actions)
            raise Unfit(first.trouble, actions, first.reason)

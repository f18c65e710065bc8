"""A controller that reconciles in a separate thread after every change of the store."""

import threading
from abc import ABC, abstractmethod
from typing import Self

from tests.kubernetes.store import Store

RESYNC_SECONDS = 0.1


class Reconciler(ABC):
    """Reconciles actual and desired state during its `with` block, unless it is `down`."""

    def __init__(self, store: Store) -> None:
        self.down = False
        self._store = store
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        with self._store.changed:
            self._stopping = True
            self._store.changed.notify_all()
        self._thread.join()

    @abstractmethod
    def reconcile(self) -> None:
        """Reconcile once; the caller holds the store's lock."""

    def _run(self) -> None:
        reconciled = -1
        while not self._stopping:
            with self._store.changed:
                if not self.down:
                    self.reconcile()
                # The version is unchanged, so nothing is left to do until the next event.
                if self._store.version() == reconciled:
                    self._store.changed.wait(RESYNC_SECONDS)
                reconciled = self._store.version()

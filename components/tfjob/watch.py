"""Follow the objects of one kind: list, then watch from there, whatever happens to the stream."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus

from components.tfjob.client import Api, RefusedError, Tree, UnreachableError

log = logging.getLogger(__name__)
FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0


class Watch(threading.Thread):
    """Tells of every object that is there, changes or goes; a daemon that ends when told to.

    `tell(object, gone)` is called from this thread. After an outage, or when the API has forgotten
    the version that was seen last (410), the list is read again: what vanished meanwhile is told
    as gone with its last known state.
    """

    def __init__(
        self,
        api: Api,
        kind: str,
        query: Mapping[str, str],
        tell: Callable[[Tree, bool], None],
        refused: Callable[[RefusedError], None],
    ) -> None:
        """Begin nothing yet; `refused` is called once when the API will not have it."""
        super().__init__(name=f"watch {kind}", daemon=True)
        self._api = api
        self._kind = kind
        self._query = query
        self._tell = tell
        self._refused = refused
        self._known: dict[str, Tree] = {}
        self._version = ""
        self._wait = FIRST_WAIT
        self._halted = threading.Event()

    def stop(self) -> None:
        """Tell nothing more."""
        self._halted.set()

    def run(self) -> None:
        """List and watch until stopped."""
        while not self._halted.is_set():
            try:
                if not self._version:
                    self._list()
                self._watch()
                self._wait = FIRST_WAIT
            except RefusedError as error:
                if not error.is_forgotten:
                    self._refused(error)
                    return
                self._version = ""
            except UnreachableError as error:
                log.warning("the watch of %s broke off: %s", self._kind, error)
                self._halted.wait(max(self._wait, error.wait))
                self._wait = min(2 * self._wait, LONGEST_WAIT)

    def _list(self) -> None:
        found, self._version = self._api.list_of(self._kind, self._query)
        there = {tree["metadata"]["uid"]: tree for tree in found}
        for uid in self._known.keys() - there.keys():
            self._happened(self._known[uid], gone=True)
        for tree in there.values():
            self._happened(tree, gone=False)

    def _watch(self) -> None:
        """Follow the stream to its end."""
        for event in self._api.watch(self._kind, self._query, self._version):
            tree = event["object"]
            if event["type"] == "ERROR":
                raise RefusedError(int(tree.get("code", HTTPStatus.GONE)), str(tree.get("message")))
            self._version = tree["metadata"]["resourceVersion"]
            self._wait = FIRST_WAIT
            if event["type"] != "BOOKMARK":
                self._happened(tree, gone=event["type"] == "DELETED")
            if self._halted.is_set():
                break

    def _happened(self, tree: Tree, *, gone: bool) -> None:
        if self._halted.is_set():
            return
        if gone:
            self._known.pop(tree["metadata"]["uid"], None)
        else:
            self._known[tree["metadata"]["uid"]] = tree
        self._tell(tree, gone)

"""List the objects of one kind, then watch them from that version on, across broken streams."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus

from components.kubernetes.api.client import Api, RefusedError, UnreachableError
from components.kubernetes.api.kinds import Resource
from components.kubernetes.names import Tree

log = logging.getLogger(__name__)
FIRST_WAIT, LONGEST_WAIT = 0.5, 10.0


class Watch(threading.Thread):
    """A daemon thread that reports every object that is added, modified or deleted.

    `on_event(object, deleted)` is called from this thread. After an outage, or when the version
    that was seen last has expired (410), the list is read again: objects that vanished meanwhile
    are reported as deleted, with their last known state.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        query: Mapping[str, str],
        on_event: Callable[[Tree, bool], None],
        on_refused: Callable[[RefusedError], None],
        known: Iterable[Tree] = (),
    ) -> None:
        """Do not start yet; `known` objects that the first list lacks are reported as deleted."""
        super().__init__(name=f"watch {resource.plural}", daemon=True)
        self._api = api
        self._resource = resource
        self._query = query
        self._on_event = on_event
        self._on_refused = on_refused
        self._known = {item["metadata"]["uid"]: item for item in known}
        self._version = ""
        self._wait = FIRST_WAIT
        self.stopped = threading.Event()

    def run(self) -> None:
        """List and watch until `stopped` is set; report nothing after that."""
        while not self.stopped.is_set():
            try:
                if not self._version:
                    self._list()
                self._watch()
                self._wait = FIRST_WAIT
            except RefusedError as error:
                if error.code != HTTPStatus.GONE:
                    self._on_refused(error)
                    return
                self._version = ""
            except UnreachableError as error:
                log.warning("the watch of %s broke off, retrying: %s", self._resource.plural, error)
                self.stopped.wait(max(self._wait, error.retry_after))
                self._wait = min(2 * self._wait, LONGEST_WAIT)

    def _list(self) -> None:
        items, self._version = self._api.list_of(self._resource, self._query)
        listed = {item["metadata"]["uid"]: item for item in items}
        for uid in self._known.keys() - listed.keys():
            self._report(self._known[uid], deleted=True)
        for item in listed.values():
            self._report(item, deleted=False)

    def _watch(self) -> None:
        """Follow the stream to its end."""
        for event in self._api.watch(self._resource, self._query, self._version):
            item = event["object"]
            if event["type"] == "ERROR":
                raise RefusedError(int(item.get("code", HTTPStatus.GONE)), str(item.get("message")))
            self._version = item["metadata"]["resourceVersion"]
            self._wait = FIRST_WAIT
            if event["type"] != "BOOKMARK":
                self._report(item, deleted=event["type"] == "DELETED")
            if self.stopped.is_set():
                break

    def _report(self, item: Tree, *, deleted: bool) -> None:
        if self.stopped.is_set():
            return
        if deleted:
            self._known.pop(item["metadata"]["uid"], None)
        else:
            self._known[item["metadata"]["uid"]] = item
        self._on_event(item, deleted)

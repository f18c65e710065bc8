"""The objects of a small Kubernetes API: versions, watches, selectors, garbage collection."""

from __future__ import annotations

import copy
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

Tree = dict[str, Any]
SECONDS = 60


class RefusedError(Exception):
    """An answer of the API that is no success."""

    def __init__(self, code: int, reason: str, message: str = "") -> None:
        super().__init__(message or reason)
        self.code = code
        self.status = {
            "kind": "Status",
            "apiVersion": "v1",
            "status": "Failure",
            "code": code,
            "reason": reason,
            "message": message or reason,
        }


def now() -> str:
    """Return the time as Kubernetes writes it, to the microsecond."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Store:
    """All objects by kind (`tfjobs`, `pods`, `events`), namespace and name.

    Attributes:
        changed: is notified at every change; also the lock of all that is here.
        graceful: kinds that somebody else removes once they are marked for deletion.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.graceful: set[str] = set()
        self.history: list[tuple[int, str, str, Tree]] = []
        self._objects: dict[tuple[str, str, str], Tree] = {}
        self._version = 1
        self._forgotten = 0

    def create(self, kind: str, namespace: str, tree: Tree) -> Tree:
        with self.changed:
            key = (kind, namespace, tree["metadata"]["name"])
            if key in self._objects:
                raise RefusedError(409, "AlreadyExists", f'{kind} "{key[2]}" already exists')
            made = copy.deepcopy(tree)
            made["metadata"] |= {
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now(),
            }
            self._objects[key] = made
            return self._noted("ADDED", kind, made)

    def get(self, kind: str, namespace: str, name: str) -> Tree:
        with self.changed:
            found = self._objects.get((kind, namespace, name))
            if found is None:
                raise RefusedError(404, "NotFound", f'{kind} "{name}" not found')
            return copy.deepcopy(found)

    def all(self, kind: str, namespace: str = "", labels: str = "", fields: str = "") -> list[Tree]:
        with self.changed:
            return [
                copy.deepcopy(tree)
                for (its_kind, its_namespace, _), tree in self._objects.items()
                if its_kind == kind
                and namespace in ("", its_namespace)
                and selected(tree, labels, fields)
            ]

    def change(self, kind: str, namespace: str, name: str, by: Callable[[Tree], None]) -> Tree:
        """Let a function change an object in place; nothing happens when it changes nothing."""
        with self.changed:
            tree = self.get(kind, namespace, name)
            by(tree)
            if tree == self._objects[kind, namespace, name]:
                return tree
            self._objects[kind, namespace, name] = tree
            return self._noted("MODIFIED", kind, tree)

    def patch(self, kind: str, namespace: str, name: str, body: Tree) -> Tree:
        """Merge a patch in (RFC 7396); a resource version in it has to be the newest."""

        def by(tree: Tree) -> None:
            asked = body.get("metadata", {}).get("resourceVersion")
            if asked and asked != tree["metadata"]["resourceVersion"]:
                raise RefusedError(409, "Conflict", "the object has been modified")
            _merge(tree, body)

        return self.change(kind, namespace, name, by)

    def delete(self, kind: str, namespace: str, name: str, uid: str = "") -> None:
        with self.changed:
            tree = self.get(kind, namespace, name)
            if uid and uid != tree["metadata"]["uid"]:
                raise RefusedError(409, "Conflict", "the UID in the precondition does not match")
            if kind in self.graceful:
                stamp = {"metadata": {"deletionTimestamp": now()}}
                if not tree["metadata"].get("deletionTimestamp"):
                    self.patch(kind, namespace, name, stamp)
                return
            self.remove(kind, namespace, name)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Take an object away for good, and delete what it owned."""
        with self.changed:
            gone = self._objects.pop((kind, namespace, name), None)
            if gone is None:
                return
            self._noted("DELETED", kind, gone)
            uid = gone["metadata"]["uid"]
            for (its_kind, its_namespace, its_name), tree in list(self._objects.items()):
                owners = tree["metadata"].get("ownerReferences", [])
                if uid in [owner["uid"] for owner in owners]:
                    self.delete(its_kind, its_namespace, its_name)

    def version(self) -> int:
        return self._version

    def forget(self) -> None:
        """Forget the history: a watch from any version so far is answered with 410."""
        with self.changed:
            self._forgotten = self._version
            self.history.clear()
            self.changed.notify_all()

    def since(self, version: int) -> list[tuple[int, str, str, Tree]]:
        """Return what happened after a version; raises 410 when that was forgotten."""
        with self.changed:
            if version < self._forgotten:
                raise RefusedError(410, "Expired", f"too old resource version: {version}")
            return [each for each in self.history if each[0] > version]

    def wait(self, until: Callable[[], Any]) -> Any:
        """Return the first true value of a function that is asked after every change."""
        with self.changed:
            assert self.changed.wait_for(until, timeout=SECONDS), "it never came to that"
            return until()

    def _noted(self, event: str, kind: str, tree: Tree) -> Tree:
        self._version += 1
        tree["metadata"]["resourceVersion"] = str(self._version)
        self.history.append((self._version, event, kind, copy.deepcopy(tree)))
        self.changed.notify_all()
        return copy.deepcopy(tree)


def selected(tree: Tree, labels: str, fields: str) -> bool:
    """Say whether an object has these labels and fields (`a=b,c=d`, and `a` for any value)."""
    own = tree["metadata"].get("labels", {})
    for part in filter(None, labels.split(",")):
        name, equals, value = part.partition("=")
        if name not in own or (equals and own[name] != value):
            return False
    for part in filter(None, fields.split(",")):
        path, _, value = part.partition("=")
        node: Any = tree
        for key in path.split("."):
            node = node.get(key, {})
        if node != value:
            return False
    return True


def _merge(tree: Tree, patch: Tree) -> None:
    for key, value in patch.items():
        if value is None:
            tree.pop(key, None)
        elif isinstance(value, dict):
            below = tree.setdefault(key, {})
            _merge(below, value)
        else:
            tree[key] = value

"""Stores the objects of a small Kubernetes API, with versions, watches and garbage collection."""

import copy
import random
import threading
import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from tests.kubernetes import admission, limits

Tree = dict[str, Any]
SECONDS = 180
# This finalizer keeps an object that is deleted in the foreground until its dependents are gone.
FOREGROUND = "foregroundDeletion"
# Kubernetes generates names from these characters: no vowels and no look-alike digits.
_LETTERS = "bcdfghjklmnpqrstvwxz2456789"


class RefusedError(Exception):
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


class NotServedError(Exception):
    """The API server does not serve this path; it responds with a 404 without an object."""


def now(seconds: int = 0) -> str:
    """Return the current time plus `seconds` in Kubernetes's format, which has whole seconds."""
    return (datetime.now(UTC) + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """All objects by kind, namespace and name. The condition `changed` is also the lock.

    Attributes:
        graceful: kinds whose objects are only marked for deletion; another component removes them.
        webhooks: functions that are called with each created object and its kind.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.graceful: set[str] = set()
        self.labels: dict[str, dict[str, str]] = {}
        self.webhooks: list[Callable[[str, Tree], None]] = []
        self.history: list[tuple[int, str, str, Tree]] = []
        self._objects: dict[tuple[str, str, str], Tree] = {}
        self._version = 1
        self._expired = 0

    def create(self, kind: str, namespace: str, tree: Tree) -> Tree:
        with self.changed:
            made = self.admitted(kind, namespace, tree)
            self._objects[kind, namespace, made["metadata"]["name"]] = made
            return self._record("ADDED", kind, made)

    def admitted(self, kind: str, namespace: str, tree: Tree) -> Tree:
        """Return the object that would be created: the response to `dryRun=All`."""
        with self.changed:
            made = copy.deepcopy(tree)
            if not made["metadata"].get("name"):
                made["metadata"]["name"] = generated(made["metadata"]["generateName"])
            name = made["metadata"]["name"]
            if (kind, namespace, name) in self._objects:
                raise RefusedError(409, "AlreadyExists", f'{kind} "{name}" already exists')
            self._admit(kind, namespace, made)
            made["metadata"] |= {
                "namespace": namespace,
                "uid": str(uuid.uuid4()),
                "creationTimestamp": now(),
            }
            return made

    def _admit(self, kind: str, namespace: str, tree: Tree) -> None:
        for webhook in self.webhooks:
            webhook(kind, tree)
        quotas = self.all("resourcequotas", namespace)
        if kind == "pods":
            accounts = {each["metadata"]["name"] for each in self.all("serviceaccounts", namespace)}
            # Pods that have ended do not count against a quota.
            there = [pod for pod in self.all("pods", namespace) if not _has_ended(pod)]
            refusal = admission.refusal(tree, self.labels.get(namespace, {}))
            refusal = refusal or limits.excess(tree, namespace, accounts, quotas, there)
        else:
            refusal = limits.too_many(kind, tree, quotas, len(self.all(kind, namespace)))
        if refusal:
            raise RefusedError(403, "Forbidden", refusal)

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
        """Let a function modify an object in place; an event is emitted only if it changes."""
        with self.changed:
            tree = self.get(kind, namespace, name)
            by(tree)
            before = self._objects[kind, namespace, name]
            if tree == before:
                return tree
            self._objects[kind, namespace, name] = tree
            changed = self._record("MODIFIED", kind, tree)
            meta = tree["metadata"]
            released = before["metadata"].get("finalizers") and not meta.get("finalizers")
            if released and meta.get("deletionGracePeriodSeconds") == 0:
                self.remove(kind, namespace, name)
            return changed

    def patch(
        self,
        kind: str,
        namespace: str,
        name: str,
        body: Tree,
        check: Callable[[Tree, Tree], None] | None = None,
    ) -> Tree:
        """Merge a patch (RFC 7396); a resource version in the patch must be the current one.

        `check` receives the old and new objects; it may modify the new object or raise an error.
        """

        def by(tree: Tree) -> None:
            required = body.get("metadata", {}).get("resourceVersion")
            if required and required != tree["metadata"]["resourceVersion"]:
                raise RefusedError(409, "Conflict", "the object has been modified")
            uid = body.get("metadata", {}).get("uid")
            if uid and uid != tree["metadata"]["uid"]:
                raise RefusedError(422, "Invalid", f'"{name}": metadata.uid: field is immutable')
            old = copy.deepcopy(tree)
            _merge(tree, body)
            if check:
                check(old, tree)

        return self.change(kind, namespace, name, by)

    def delete(
        self, kind: str, namespace: str, name: str, uid: str = "", grace: int | None = None
    ) -> None:
        """Delete an object; a running pod is only marked, unless `grace` is 0 seconds."""
        with self.changed:
            tree = self.get(kind, namespace, name)
            if uid and uid != tree["metadata"]["uid"]:
                raise RefusedError(409, "Conflict", "the UID in the precondition does not match")
            if grace is None:
                grace = int(tree.get("spec", {}).get("terminationGracePeriodSeconds", 30))
            if kind not in self.graceful or (kind == "pods" and not (grace and _runs(tree))):
                self.remove(kind, namespace, name)
            elif not tree["metadata"].get("deletionTimestamp"):
                stamp = {"deletionTimestamp": now(grace), "deletionGracePeriodSeconds": grace}
                self.patch(kind, namespace, name, {"metadata": stamp})

    def delete_as(
        self, propagation: str, kind: str, namespace: str, name: str, uid: str = ""
    ) -> None:
        """Delete an object; its dependents are deleted after it, before it, or not at all."""
        with self.changed:
            tree = self.get(kind, namespace, name)
            is_same = uid in ("", tree["metadata"]["uid"])
            if is_same and propagation != "Background" and self._part(kind, tree, propagation):
                return
            self.delete(kind, namespace, name, uid)

    def remove(self, kind: str, namespace: str, name: str) -> None:
        """Remove an object, and delete its dependents; finalizers delay the removal."""
        with self.changed:
            found = self._objects.get((kind, namespace, name))
            if found is None:
                return
            if found["metadata"].get("finalizers"):
                self.change(kind, namespace, name, lambda tree: _mark(kind, tree))
                return
            removed = self._objects.pop((kind, namespace, name))
            self._record("DELETED", kind, removed)
            for its_kind, tree in self._owned(removed):
                self.delete(its_kind, namespace, tree["metadata"]["name"])
            self._release(removed)

    def _owned(self, owner: Tree) -> list[tuple[str, Tree]]:
        uid = owner["metadata"]["uid"]
        return [
            (kind, tree)
            for (kind, _, _), tree in list(self._objects.items())
            if uid in [each["uid"] for each in tree["metadata"].get("ownerReferences", [])]
        ]

    def _part(self, kind: str, tree: Tree, propagation: str) -> bool:
        """Orphan or delete an object's dependents; return whether the object must wait for them."""
        namespace, name = tree["metadata"]["namespace"], tree["metadata"]["name"]
        owned = self._owned(tree)
        if propagation == "Orphan":
            for its_kind, each in owned:
                left = [o for o in each["metadata"]["ownerReferences"] if o["uid"] != _uid(tree)]
                patch = {"metadata": {"ownerReferences": left}}
                self.patch(its_kind, namespace, each["metadata"]["name"], patch)
            return False
        if owned:
            self.change(kind, namespace, name, lambda each: _mark(kind, each, FOREGROUND))
        for its_kind, each in owned:
            self.delete_as("Foreground", its_kind, namespace, each["metadata"]["name"])
        return bool(owned)

    def _release(self, removed: Tree) -> None:
        """Remove an owner that was waiting for the deletion of its last dependent."""
        uids = [each["uid"] for each in removed["metadata"].get("ownerReferences", [])]
        for (kind, namespace, name), tree in list(self._objects.items()):
            held = tree["metadata"].get("finalizers", [])
            if _uid(tree) in uids and FOREGROUND in held and not self._owned(tree):
                rest = [each for each in held if each != FOREGROUND]
                self.patch(kind, namespace, name, {"metadata": {"finalizers": rest}})

    def version(self) -> int:
        return self._version

    def expire(self) -> None:
        """Drop the history: a watch from any existing version gets a 410."""
        with self.changed:
            self._expired = self._version
            self.history.clear()
            self.changed.notify_all()

    def since(self, version: int) -> list[tuple[int, str, str, Tree]]:
        with self.changed:
            if version < self._expired:
                raise RefusedError(410, "Expired", f"too old resource version: {version}")
            return [each for each in self.history if each[0] > version]

    def wait(self, until: Callable[[], Any]) -> Any:
        """Call a function after every change until its result is true, and return the result."""
        with self.changed:
            assert self.changed.wait_for(until, timeout=SECONDS), f"not true within {SECONDS} s"
            return until()

    def _record(self, event: str, kind: str, tree: Tree) -> Tree:
        self._version += 1
        tree["metadata"]["resourceVersion"] = str(self._version)
        self.history.append((self._version, event, kind, copy.deepcopy(tree)))
        self.changed.notify_all()
        return copy.deepcopy(tree)


def _uid(tree: Tree) -> str:
    return str(tree["metadata"]["uid"])


def generated(prefix: str) -> str:
    return prefix + "".join(random.choices(_LETTERS, k=5))


def _mark(kind: str, tree: Tree, finalizer: str = "") -> None:
    """Mark an object as deleted while finalizers keep it."""
    meta = tree["metadata"]
    meta.setdefault("deletionTimestamp", now())
    meta["deletionGracePeriodSeconds"] = 0
    if finalizer:
        meta["finalizers"] = [*{*meta.get("finalizers", []), finalizer}]
    # Garbage collection marks a pod as failed if it never ran or its node does not respond.
    elif kind == "pods" and not _has_ended(tree):
        tree["status"]["phase"] = "Failed"


def _runs(pod: Tree) -> bool:
    """Return whether a pod runs on a node, so that its deletion has a grace period."""
    return bool(pod["spec"].get("nodeName")) and not _has_ended(pod)


def _has_ended(pod: Tree) -> bool:
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def selected(tree: Tree, labels: str, fields: str) -> bool:
    """Return whether an object matches selectors such as `a=b,c=d`, or `a` for any value."""
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

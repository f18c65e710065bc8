"""The events that the parts of a cluster write about its objects: one for each message."""

from __future__ import annotations

import hashlib
from contextlib import suppress

from tests.kubernetes.store import RefusedError, Store, Tree, now


def warn(store: Store, involved: Tree, reason: str, message: str) -> None:
    """Write a warning about an object; the same one again is counted, which no test needs."""
    write(store, involved, reason, message, "Warning")


def write(
    store: Store, involved: Tree, reason: str, message: str, kind: str, *, is_new: bool = False
) -> None:
    """Write an event about an object.

    Args:
        store: where it is written.
        involved: the object.
        reason: in one word.
        message: in several.
        kind: Normal or Warning.
        is_new: whether its author uses `events.k8s.io`: it has a time in `eventTime` alone, and
            no count.
    """
    metadata = involved["metadata"]
    digest = hashlib.sha256(f"{metadata['uid']} {reason} {message}".encode()).hexdigest()
    tree: Tree = {
        "metadata": {"name": f"{metadata['name']}.{digest[:16]}"},
        "involvedObject": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
            **({"kind": involved["kind"]} if "kind" in involved else {}),
        },
        "reason": reason,
        "message": message,
        "type": kind,
        "lastTimestamp": None if is_new else now(),
    }
    if is_new:
        tree |= {"eventTime": now().replace("Z", ".000000Z"), "action": "Reconciling"}
    with suppress(RefusedError):
        store.create("events", metadata["namespace"], tree)

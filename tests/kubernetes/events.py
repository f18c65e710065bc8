"""The events that the parts of a cluster write about its objects: one for each message."""

from __future__ import annotations

import hashlib
from contextlib import suppress

from tests.kubernetes.store import RefusedError, Store, Tree, now


def warn(store: Store, involved: Tree, reason: str, message: str) -> None:
    """Write a warning about an object; the same one again is counted, which no test needs."""
    metadata = involved["metadata"]
    digest = hashlib.sha256(f"{metadata['uid']} {reason} {message}".encode()).hexdigest()
    tree = {
        "metadata": {"name": f"{metadata['name']}.{digest[:16]}"},
        "involvedObject": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "reason": reason,
        "message": message,
        "type": "Warning",
        "lastTimestamp": now(),
    }
    with suppress(RefusedError):
        store.create("events", metadata["namespace"], tree)

"""Events that cluster components write about objects; a repeated event is stored only once."""

import hashlib
from contextlib import suppress

from tests.kubernetes.store import RefusedError, Store, Tree, now


def warn(store: Store, involved: Tree, reason: str, message: str) -> None:
    """Write a warning about an object; a repeated warning is stored once, without a count."""
    write(store, involved, reason, message)


def note(store: Store, involved: Tree, reason: str, message: str) -> None:
    write(store, involved, reason, message, type="Normal")


def write(store: Store, involved: Tree, reason: str, message: str, **more: object) -> None:
    """Write an event about an object: a warning, unless `more` sets another type."""
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
        "type": "Warning",
        "lastTimestamp": now(),
        **more,
    }
    with suppress(RefusedError):
        store.create("events", metadata["namespace"], tree)

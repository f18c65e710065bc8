"""Remove what dead writers left below a storage root."""

from __future__ import annotations

from trainer import storage
from trainer.cluster.lease import remove_expired
from trainer.storage.retry import in_parallel


def collect(root: str) -> tuple[str, ...]:
    """Remove expired leases and unpublished files below `root`; return the URIs of what is gone."""
    return (*_expired_leases(root), *storage.collect_garbage(root))


def _expired_leases(root: str) -> list[str]:
    folders = [storage.join(root, run, "checkpoints") for run in storage.names(root)]
    return [uri for found in in_parallel(remove_expired, folders) for uri in found]

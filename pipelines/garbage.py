"""Remove what dead writers left below a storage root."""

from __future__ import annotations

from itertools import chain

from trainer import storage
from trainer.cluster.lease import remove_expired
from trainer.storage.retry import in_parallel


def collect(root: str) -> tuple[str, ...]:
    """Remove expired leases and unpublished files below `root`; return the URIs of what is gone."""
    folders = [storage.join(root, run, "checkpoints") for run in storage.names(root)]
    leases = chain.from_iterable(in_parallel(remove_expired, folders))
    return (*leases, *storage.collect_garbage(root))

"""Remove what dead writers left below a storage root."""

from __future__ import annotations

import logging
from itertools import chain

from trainer import storage
from trainer.cluster.lease import remove_expired
from trainer.errors import UserError
from trainer.storage.retry import in_parallel

log = logging.getLogger(__name__)


def _leases_removed(uri: str) -> list[str]:
    try:
        return remove_expired(uri)
    except storage.Unavailable:
        raise
    except UserError as error:
        # Those of the other runs are not left because of it.
        log.warning("passed over: %s", error)
        return []


def collect(root: str) -> tuple[str, ...]:
    """Remove expired leases and unpublished files below `root`; return the URIs of what is gone."""
    folders = [storage.join(root, run, "checkpoints") for run in storage.names(root)]
    leases = chain.from_iterable(in_parallel(_leases_removed, folders))
    return (*leases, *storage.collect_garbage(root))

"""Remove what dead writers left below a storage root."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from itertools import chain

from trainer import storage
from trainer.cluster.lease import remove_expired
from trainer.errors import UserError
from trainer.storage.retry import in_parallel

log = logging.getLogger(__name__)
# A part takes minutes, so that nobody goes on with a preparation that has added none for so long.
FORSAKEN = timedelta(days=7)


def _leases_removed(uri: str) -> list[str]:
    try:
        return remove_expired(uri)
    except storage.Unavailable:
        raise
    except UserError as error:
        # Those of the other runs are not left because of it.
        log.warning("passed over: %s", error)
        return []


def _parts_removed(root: str) -> list[str]:
    """Delete the finished parts of preparations that have ended without a dataset."""
    since = datetime.now(UTC) - FORSAKEN
    above, removed = storage.join(root, "preparing"), []
    for name in storage.names(above):
        folder = storage.join(above, name)
        newest = storage.newest(folder)
        if newest and datetime.fromisoformat(newest[1].created) < since:
            storage.delete(folder)
            removed.append(folder)
    return removed


def collect(root: str) -> tuple[str, ...]:
    """Remove what dead writers left below `root`; return the URIs of what is gone.

    That is expired leases, finished parts of a dataset to which none was added for a week, and
    unpublished files.
    """
    folders = [storage.join(root, run, "checkpoints") for run in storage.names(root)]
    leases = chain.from_iterable(in_parallel(_leases_removed, folders))
    return (*leases, *_parts_removed(root), *storage.collect_garbage(root))

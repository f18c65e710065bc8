"""What writers left in a bucket that died, or lost: found, and removed.

Garbage is what was uploaded for a published directory (its writer is in its metadata), is named by
no manifest, and will be named by none: its directory is published already, its writer has ended, or
it is older than any publication takes. All else in the bucket is somebody's own.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from trainer.errors import UserError
from trainer.storage.bucket import Bucket, Stored
from trainer.storage.manifest import MANIFEST, Manifest
from trainer.storage.parallel import in_parallel
from trainer.storage.writer import is_gone

# Seconds after which a writer on another machine is taken for dead.
OLD = 24 * 3600.0


def collect(bucket: Bucket, prefix: str) -> list[str]:
    """Remove the garbage below `prefix` and return its keys."""
    before = time.time() - OLD
    aborted = bucket.abort_uploads(prefix, before)
    found = bucket.walk(prefix)
    directories, named = _published(bucket, found)
    unnamed = [each for each in found if each.key not in named and not _is_manifest(each)]

    def is_over(stored: Stored) -> bool:
        writer = stored.writer if stored.writer is not None else bucket.stat(stored.key).writer
        inside = any(stored.key.startswith(directory) for directory in directories)
        return bool(writer) and (inside or stored.created < before or is_gone(writer or ""))

    over = in_parallel(is_over, unnamed)
    # Who has ended meanwhile may have published first.
    _, named = _published(bucket, bucket.walk(prefix))
    dead = [
        each.key for each, so in zip(unnamed, over, strict=True) if so and each.key not in named
    ]
    in_parallel(bucket.remove, dead)
    return sorted([*dead, *aborted])


def _published(bucket: Bucket, found: Iterable[Stored]) -> tuple[list[str], set[str]]:
    """Return the prefixes of the published directories, and the keys that their manifests name."""
    manifests = [each.key for each in found if _is_manifest(each)]
    named: set[str] = set()
    directories = []
    for key, data in zip(manifests, in_parallel(bucket.get, manifests), strict=True):
        directory = key.removesuffix(MANIFEST)
        try:
            files = Manifest.from_json(data, where=key).files
        except UserError:
            # Nobody can say what belongs to it.
            named.update(each.key for each in found if each.key.startswith(directory))
            continue
        directories.append(directory)
        named.update(directory + entry.stored_at for entry in files)
    return directories, named


def _is_manifest(stored: Stored) -> bool:
    return stored.key.rpartition("/")[2] == MANIFEST

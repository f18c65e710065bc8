"""Which store serves which scheme. A client is imported with the first URI that needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from trainer.errors import UserError
from trainer.storage.bucket import Bucket, Retrying
from trainer.storage.local import FileStore
from trainer.storage.object_store import ObjectStore
from trainer.storage.s3_endpoint import endpoint_of
from trainer.storage.store import Store
from trainer.storage.uri import SCHEMES, Location, Protocol, locate, scheme_of


def store_for(uri: str) -> Store:
    """Return the store that serves `uri`, for one operation; raises `UserError`."""
    protocol = SCHEMES[scheme_of(uri)]
    if protocol == "file":
        return FileStore()
    location = locate(uri)
    return ObjectStore(location.home, partial(_BUCKETS[protocol], location))


def _gcs(location: Location, retry: Retrying) -> Bucket:
    from trainer.storage.gcs import GcsBucket

    return GcsBucket(location.bucket, retry)


def _s3(location: Location, retry: Retrying) -> Bucket:
    try:
        from trainer.storage.s3 import S3Bucket
    except ModuleNotFoundError as error:
        raise UserError(
            f"{location.scheme}:// needs {error.name}: pip install 'flotilla[s3]'"
        ) from None
    return S3Bucket(location.bucket, endpoint_of(location), retry)


_BUCKETS: Mapping[Protocol, Callable[[Location, Retrying], Bucket]] = {"gcs": _gcs, "s3": _s3}

"""Which store serves which scheme. A client is imported with the first URI that needs it."""

from __future__ import annotations

from functools import partial

from trainer.errors import UserError
from trainer.storage.bucket import Bucket, Retrying
from trainer.storage.local import FileStore
from trainer.storage.object_store import ObjectStore
from trainer.storage.s3_endpoint import endpoint_of
from trainer.storage.store import Store
from trainer.storage.uri import Location, locate, scheme_of


def store_for(uri: str) -> Store:
    """Return the store that serves `uri`, for one operation; raises `UserError`."""
    if scheme_of(uri) == "file":
        return FileStore()
    location = locate(uri)
    return ObjectStore(location.home, partial(_bucket, location))


def _bucket(location: Location, retry: Retrying) -> Bucket:
    if location.scheme == "gs":
        from trainer.storage.gcs import GcsBucket

        return GcsBucket(location.bucket, retry)
    try:
        from trainer.storage.s3 import S3Bucket
    except ModuleNotFoundError as error:
        raise UserError(
            f"{location.scheme}:// needs {error.name}: pip install 'flotilla[s3]'"
        ) from None
    return S3Bucket(location.bucket, endpoint_of(location), retry)

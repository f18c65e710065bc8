"""Google Cloud Storage, `gs://`, through google-cloud-storage."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import requests
import urllib3
from google.api_core import exceptions as api
from google.auth import exceptions as auth
from google.cloud import storage
from google.cloud.storage import exceptions as media
from requests.adapters import HTTPAdapter

from flotilla.trainer.storage import store
from flotilla.trainer.storage.manifest import Checksum
from flotilla.trainer.storage.store import (
    PART_BYTES,
    SUCCESS,
    THREADS,
    TIMEOUTS,
    WRITER,
    ChangedError,
    Count,
    DamagedInTransitError,
    Retrying,
    Sink,
    Stored,
    Trouble,
    list_pages,
    tls_trouble,
)
from flotilla.trainer.storage.uri import web_address

_TRANSIENT = (
    ConnectionError, TimeoutError, requests.ConnectionError, requests.Timeout,
    requests.exceptions.ChunkedEncodingError, requests.exceptions.ContentDecodingError,
    urllib3.exceptions.HTTPError, media.DataCorruption, DamagedInTransitError,
)  # fmt: skip
_TRANSIENT_CODES = (408, 429, 500, 502, 503, 504)
_TROUBLES = {
    401: Trouble.NO_CREDENTIALS, 403: Trouble.DENIED, 404: Trouble.ABSENT, 412: Trouble.EXISTS,
}  # fmt: skip
_FIELDS = "name,size,crc32c,timeCreated,metadata"


class GcsBucket:
    """One bucket of Google Cloud Storage."""

    remedies: ClassVar[Mapping[Trouble, str]] = {
        Trouble.DENIED: "give this account roles/storage.objectAdmin on the bucket",
        Trouble.NO_CREDENTIALS: (
            "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS, "
            "or use workload identity"
        ),
        Trouble.NO_TLS: "set REQUESTS_CA_BUNDLE to the certificate of the store's CA",
    }

    def __init__(self, name: str, retry: Retrying) -> None:
        """Use the application default credentials, or no credentials with STORAGE_EMULATOR_HOST."""
        self._name = name
        self._retry = retry

    def get(self, key: str) -> bytes:
        """Return the content of an object. The client verifies the store's checksum."""
        return self._retry(
            lambda: bytes(self._blob(key).download_as_bytes(timeout=TIMEOUTS, retry=None))
        )

    def read_into(self, key: str, file: Sink) -> str:
        """Write the content of an object to a file. Resume after dropped connections."""

        def rest() -> None:
            file.flush()
            start = file.tell()
            try:
                self._blob(key).download_to_file(
                    file,
                    start=start or None,
                    raw_download=True,
                    timeout=TIMEOUTS,
                    checksum=None,
                    retry=None,
                )
            except api.RequestRangeNotSatisfiable:
                if not start:
                    raise

        self._retry(rest)
        # Return no checksum, so that the caller computes one from the received bytes and can
        # compare it with the store's checksum in the listing.
        return ""

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object."""
        self._upload(self._blob(key), data, None)

    def create(self, key: str, data: bytes, writer: str) -> None:
        """Create an object if it does not exist."""
        blob = self._blob(key)
        blob.metadata = {WRITER: writer}
        self._upload(blob, data, 0)

    def create_from(
        self, key: str, path: Path, expected: Checksum, writer: str, count: Count
    ) -> None:
        """Upload a file in parts. Each part is retried separately."""
        blob = self._blob(key)
        blob.metadata = {WRITER: writer}
        blob.chunk_size = PART_BYTES
        blob.upload_from_filename(
            str(path),
            content_type="application/octet-stream",
            if_generation_match=0,
            timeout=TIMEOUTS,
            checksum="crc32c",
            # The client accepts any function that wraps a request.
            retry=lambda request: lambda: self._retry(request),
        )
        if _checksum(blob) != expected:
            raise ChangedError
        # Count all bytes at the end, because the client reads the file without reporting progress.
        count(expected.bytes)

    def stat(self, key: str) -> Stored:
        """Return the description of one object."""
        blob = self._blob(key)
        self._retry(lambda: blob.reload(timeout=TIMEOUTS, retry=None))
        return _make_stored(blob)

    def holds(self, stored: Stored, path: Path, expected: Checksum) -> bool:  # noqa: ARG002
        """Return whether the checksum that the store computed is the expected one."""
        return Checksum(stored.bytes, stored.digest) == expected

    def read_checksum(self, key: str) -> Checksum | None:
        """Return the checksum that the store computed, or None if it computed none."""
        stored = self.stat(key)
        return Checksum(stored.bytes, stored.digest) if stored.digest else None

    def walk(self, prefix: str) -> Iterator[Stored]:
        """Yield all objects whose key begins with `prefix`. Each page is retried separately."""
        return map(_make_stored, self._list_objects(prefix, f"nextPageToken,items({_FIELDS})"))

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`."""
        found = self._list_objects(prefix, "nextPageToken,prefixes,items(name)", delimiter="/")
        keys = {each if isinstance(each, str) else each.name for each in found}
        return sorted({key[len(prefix) :].strip("/") for key in keys})

    def _list_objects(self, prefix: str, fields: str, **how: Any) -> Iterator[Any]:
        how |= {"prefix": prefix, "fields": fields, "page_size": store.PAGE}

        def page(token: str | None) -> tuple[list[Any], str | None]:
            found = self._client.list_blobs(
                self._name, page_token=token, timeout=TIMEOUTS, retry=None, **how
            )
            return [*next(found.pages, ()), *found.prefixes], found.next_page_token

        return list_pages(lambda token: self._retry(partial(page, token)))

    def remove(self, key: str) -> None:
        """Remove an object."""
        self._retry(lambda: self._blob(key).delete(timeout=TIMEOUTS, retry=None))

    def abort_upload(self, mark: str) -> None:
        """Do nothing, because the store deletes unfinished uploads and does not bill for them."""

    def judge(self, error: BaseException) -> Trouble:
        """Classify an error."""
        if isinstance(error, auth.GoogleAuthError):
            return Trouble.TRANSIENT if error.retryable else Trouble.NO_CREDENTIALS
        if isinstance(error, requests.exceptions.SSLError):
            return tls_trouble(error)
        # The store reports a checksum mismatch if content was damaged in transit. Try again.
        damaged = isinstance(error, api.BadRequest) and "doesn't match calculated" in str(error)
        if damaged or isinstance(error, _TRANSIENT):
            return Trouble.TRANSIENT
        code = _code(error)
        if code in _TRANSIENT_CODES:
            return Trouble.TRANSIENT
        if code or isinstance(error, requests.RequestException):
            return _TROUBLES.get(code, Trouble.OTHER)
        return Trouble.FOREIGN

    def _blob(self, key: str) -> Any:
        return self._client.bucket(self._name).blob(key)

    def _upload(self, blob: Any, data: bytes, generation: int | None) -> None:
        self._retry(
            lambda: blob.upload_from_string(
                data,
                content_type="application/octet-stream",
                if_generation_match=generation,
                timeout=TIMEOUTS,
                checksum="crc32c",
                retry=None,
            )
        )

    @property
    def _client(self) -> storage.Client:
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        return _client(os.getpid(), emulator and web_address(emulator, "STORAGE_EMULATOR_HOST"))


@cache
def _client(_process: int, _emulator: str) -> storage.Client:
    # A forked child cannot share the client of its parent, but all threads of a process can.
    # Omit the bucket's metadata from traces, because reading it needs an additional permission.
    os.environ.setdefault("DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA", "true")
    client = storage.Client()
    adapter = HTTPAdapter(pool_maxsize=2 * THREADS)
    for scheme in ("http://", "https://"):
        client._http.mount(scheme, adapter)
    client._http.hooks["response"].append(_refuse_foreign_answer)
    return client


def _refuse_foreign_answer(answer: requests.Response, **_: Any) -> None:
    """Raise an error for a successful response that is not from the store, such as an empty one."""
    url, method = urllib3.util.parse_url(answer.url), answer.request.method
    query = url.query or ""
    if answer.status_code not in SUCCESS or method == "DELETE":
        return
    is_whole = False
    if "alt=media" in query:
        is_whole = any(name.lower().startswith("x-goog-") for name in answer.headers)
    elif "uploadType=resumable" in query and method == "POST":
        is_whole = "Location" in answer.headers
    else:
        with suppress(ValueError):
            is_whole = isinstance(answer.json(), dict)
    if not is_whole:
        raise DamagedInTransitError(
            f"the response to {method} {url.path} is not from an object store"
        )


def _make_stored(blob: Any) -> Stored:
    found = _checksum(blob)
    created = blob.time_created.timestamp() if blob.time_created else 0.0
    writer = (blob.metadata or {}).get(WRITER, "")
    return Stored(blob.name, found.bytes, found.crc32c, created, writer)


def _checksum(blob: Any) -> Checksum:
    return Checksum(int(blob.size or 0), base64.b64decode(blob.crc32c or "").hex())


def _code(error: BaseException) -> int:
    if isinstance(error, api.GoogleAPICallError):
        return int(error.code or 0)
    if isinstance(error, media.InvalidResponse):
        return int(error.response.status_code)
    return 0

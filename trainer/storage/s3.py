"""Amazon S3, `s3://`, and S3-compatible stores, `minio://`, through boto3."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import boto3
import google_crc32c
import urllib3
from botocore import exceptions as boto
from botocore.config import Config
from botocore.response import StreamingBody

from flotilla.trainer.storage import store
from flotilla.trainer.storage.manifest import Checksum
from flotilla.trainer.storage.store import (
    PART_BYTES,
    SUCCESS,
    THREADS,
    TIMEOUTS,
    UPLOAD_MARK,
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
from flotilla.trainer.storage.uri import Endpoint, kfp_credentials

Result = TypeVar("Result")
_MAX_PARTS = 10_000
_CHUNK = 1 << 20
# For each operation, a field that every response of a store contains. A response without this
# field comes from a proxy.
_ANSWERED = {
    "GetObject": "ETag",
    "HeadObject": "LastModified",
    "PutObject": "ETag",
    "CreateMultipartUpload": "UploadId",
    "UploadPart": "ETag",
    "CompleteMultipartUpload": "ETag",
    "ListObjectsV2": "IsTruncated",
}
_UNKNOWN_CONDITION = ("NotImplemented", "501")
# These classes have no common base: botocore's connection errors do not derive from Python's.
_TRANSIENT = (
    boto.EndpointConnectionError, boto.ConnectTimeoutError, boto.ProxyConnectionError,
    boto.HTTPClientError, boto.IncompleteReadError, urllib3.exceptions.HTTPError, ConnectionError,
    TimeoutError, DamagedInTransitError,
)  # fmt: skip
_TRANSIENT_ERRORS = {
    "BadDigest", "ConditionalRequestConflict", "InternalError", "OperationAborted",
    "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
    "TooManyRequests",
}  # fmt: skip
_TRANSIENT_CODES = (408, 429, 500, 502, 503, 504)
_TROUBLES = {
    code: trouble
    for trouble, codes in {
        Trouble.NO_BUCKET: ("NoSuchBucket",),
        Trouble.ABSENT: ("NoSuchKey", "404"),
        # No such upload: an earlier request completed it, but its response was lost.
        Trouble.EXISTS: ("NoSuchUpload", "PreconditionFailed", "412"),
        Trouble.NO_CREDENTIALS: ("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"),
        Trouble.EXPIRED: ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"),
        Trouble.DENIED: ("AccessDenied", "403"),
    }.items()
    for code in codes
}


class S3Bucket:
    """One bucket of S3 or of an S3-compatible store."""

    remedies: ClassVar[Mapping[Trouble, str]] = {
        Trouble.DENIED: (
            "allow s3:GetObject, s3:PutObject, s3:DeleteObject, s3:AbortMultipartUpload and "
            "s3:ListBucket on the bucket"
        ),
        Trouble.NO_CREDENTIALS: (
            "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role of the "
            "service account"
        ),
        Trouble.EXPIRED: (
            "renew them (aws sso login, or a new AWS_SESSION_TOKEN), or use a role, which is "
            "renewed automatically"
        ),
        Trouble.NO_TLS: (
            "for a store without TLS, write http:// in the endpoint; otherwise, set "
            "AWS_CA_BUNDLE to the certificate of the store's CA"
        ),
    }

    def __init__(self, name: str, endpoint: Endpoint, retry: Retrying) -> None:
        """Use an endpoint with boto3's credential chain, or with the keys of KFP's secret."""
        self._name = name
        self._endpoint = endpoint
        self._retrying = retry

    def get(self, key: str) -> bytes:
        """Return the content of an object, verified if the store reports its MD5."""

        def whole() -> bytes:
            answer = self._client.get_object(**self._object_key(key))
            data: bytes = answer["Body"].read()
            if _is_md5(answer) and _tag(answer) != hashlib.md5(data).hexdigest():
                raise DamagedInTransitError(f"{key} was damaged during the download")
            return data

        return self._retry(whole)

    def read_into(self, key: str, file: Sink) -> str:
        """Write the content of an object to a file. Resume after dropped connections."""
        tags: set[str] = set()

        def rest() -> None:
            file.flush()
            start = file.tell()
            span = {"Range": f"bytes={start}-"} if start else {}
            try:
                answer = self._client.get_object(**self._object_key(key), **span)
            except boto.ClientError as error:
                if start and _code(error) in ("InvalidRange", "416"):
                    return
                raise
            tags.add(_tag(answer))
            body: StreamingBody = answer["Body"]
            with closing(body):
                for chunk in body.iter_chunks(_CHUNK):
                    file.write(chunk)

        self._retry(rest)
        # Several ETags mean that the object was replaced before the download resumed.
        return " ".join(sorted(tags))

    def put(self, key: str, data: bytes) -> None:
        """Create or replace an object."""
        self._send(key, data)

    def create(self, key: str, data: bytes, writer: str) -> None:
        """Create an object if it does not exist."""
        self._create_absent(partial(self._send, key, data, Metadata={WRITER: writer}))

    def create_from(
        self, key: str, path: Path, expected: Checksum, writer: str, count: Count
    ) -> None:
        """Upload a file in parts. Each part is verified and retried separately."""
        where = self._object_key(key)
        begun = self._retry(
            lambda: self._client.create_multipart_upload(**where, Metadata={WRITER: writer})
        )
        upload = {**where, "UploadId": begun["UploadId"]}
        mark = f"{key}.{uuid.uuid4().hex[:12]}{UPLOAD_MARK}"
        try:
            self._send(mark, begun["UploadId"].encode(), Metadata={WRITER: writer})
            parts = self._parts(upload, path, expected, count)
            self._create_absent(partial(self._complete, upload, parts))
        except BaseException:
            # If this fails, `collect` later finds the upload by its mark.
            with suppress(boto.ClientError, boto.BotoCoreError):
                self._abort(upload)
                self._client.delete_object(**self._object_key(mark))
            raise
        self.remove(mark)

    def stat(self, key: str) -> Stored:
        """Return the description of one object."""
        answer = self._retry(lambda: self._client.head_object(**self._object_key(key)))
        writer = answer.get("Metadata", {}).get(WRITER, "")
        created = answer["LastModified"].timestamp()
        return Stored(key, answer["ContentLength"], _tag(answer), created, writer)

    def holds(self, stored: Stored, path: Path, expected: Checksum) -> bool:
        """Return whether the ETag is the MD5 of the file or of its parts. False with SSE-KMS."""
        if stored.bytes != expected.bytes:
            return False
        if stored.bytes <= PART_BYTES:
            return stored.digest == hashlib.md5(path.read_bytes()).hexdigest()
        digests = [hashlib.md5(part).digest() for part in _read_parts(path, expected.bytes)]
        whole = hashlib.md5(b"".join(digests)).hexdigest()
        return stored.digest == f"{whole}-{len(digests)}"

    def read_checksum(self, key: str) -> Checksum | None:  # noqa: ARG002
        """Return None, because the store returns only the checksum that the writer sent."""
        return None

    def walk(self, prefix: str) -> Iterator[Stored]:
        """Yield all objects whose key begins with `prefix`. Each page is retried separately."""
        for each in self._list_objects(prefix):
            if "Size" in each:
                created = each["LastModified"].timestamp()
                yield Stored(each["Key"], each["Size"], _tag(each), created)

    def names(self, prefix: str) -> list[str]:
        """Return the names directly below `prefix`."""
        found = self._list_objects(prefix, Delimiter="/")
        keys = {each.get("Key") or each["Prefix"] for each in found}
        return sorted({key[len(prefix) :].strip("/") for key in keys})

    def _list_objects(self, prefix: str, **how: Any) -> Iterator[dict[str, Any]]:
        how |= {"Bucket": self._name, "Prefix": prefix, "MaxKeys": store.PAGE}

        def page(token: str | None) -> tuple[list[dict[str, Any]], str | None]:
            after = {"ContinuationToken": token} if token else {}
            found = self._retry(partial(self._client.list_objects_v2, **how, **after))
            both = [*found.get("Contents", []), *found.get("CommonPrefixes", [])]
            return both, found.get("NextContinuationToken") if found["IsTruncated"] else None

        return list_pages(page)

    def remove(self, key: str) -> None:
        """Remove an object."""
        self._retry(lambda: self._client.delete_object(**self._object_key(key)))

    def abort_upload(self, mark: str) -> None:
        """Abort the upload that a mark belongs to. Do nothing if that upload is finished."""
        key = mark.removesuffix(UPLOAD_MARK).rpartition(".")[0]
        upload = {**self._object_key(key), "UploadId": self.get(mark).decode(errors="replace")}
        try:
            self._retry(partial(self._abort, upload))
        except boto.ClientError as error:
            if _code(error) != "NoSuchUpload":
                raise

    def judge(self, error: BaseException) -> Trouble:
        """Classify an error."""
        if isinstance(error, boto.SSLError):
            return tls_trouble(error)
        if isinstance(error, _TRANSIENT):
            return Trouble.TRANSIENT
        # botocore follows a redirect to the same address until it reaches the recursion limit.
        if isinstance(error, boto.BotoCoreError | RecursionError):
            lacks = isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError)
            return Trouble.NO_CREDENTIALS if lacks else Trouble.OTHER
        if not isinstance(error, boto.ClientError):
            return Trouble.FOREIGN
        code = _code(error)
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        if code in _TRANSIENT_ERRORS or status in _TRANSIENT_CODES:
            return Trouble.TRANSIENT
        return _TROUBLES.get(code, Trouble.OTHER)

    def _retry(self, request: Callable[[], Result]) -> Result:
        try:
            return self._retrying(request)
        except boto.ClientError as error:
            if self.judge(error) is not Trouble.EXPIRED:
                raise
        # A new client reads the profile file again, where credentials may have been renewed.
        client.cache_clear()
        return self._retrying(request)

    @property
    def _client(self) -> Any:
        return client(os.getpid(), self._endpoint)

    def _object_key(self, key: str) -> dict[str, str]:
        return {"Bucket": self._name, "Key": key}

    def _create_absent(self, request: Callable[..., None]) -> None:
        """Create an object if it is absent. If the store rejects conditions, allow an overwrite."""
        try:
            request(IfNoneMatch="*")
        except boto.ClientError as error:
            if _code(error) not in _UNKNOWN_CONDITION:
                raise
            request()

    def _complete(self, upload: dict[str, str], parts: list[dict[str, Any]], **how: Any) -> None:
        whole = {**upload, "MultipartUpload": {"Parts": parts}, **how}
        self._retry(lambda: self._client.complete_multipart_upload(**whole))

    def _send(self, key: str, data: bytes, **how: Any) -> None:
        """Store an object. If a new object was damaged in transit, remove it and send it again."""
        digest = _base64(hashlib.md5(data).digest())
        is_new = "Metadata" in how
        damaged = False

        def remove_damaged() -> None:
            nonlocal damaged
            if damaged:
                self._client.delete_object(**self._object_key(key))
                damaged = False

        def send() -> None:
            nonlocal damaged
            remove_damaged()
            answer = self._client.put_object(
                **self._object_key(key), Body=data, ContentMD5=digest, **how
            )
            arrived = self._has_arrived(key, data, answer, is_new)
            # Remove it, because some stores do not check the MD5 of a request, and a damaged
            # manifest must never be read.
            damaged = is_new and not arrived
            remove_damaged()
            if not arrived:
                raise DamagedInTransitError(f"{key} was damaged during the upload")

        self._retry(send)

    def _has_arrived(self, key: str, data: bytes, answer: dict[str, Any], is_new: bool) -> bool:
        if _is_md5(answer):
            return _tag(answer) == hashlib.md5(data).hexdigest()
        if not is_new or len(data) > _CHUNK:
            return True
        stored: bytes = self._client.get_object(**self._object_key(key))["Body"].read()
        return stored == data

    def _parts(
        self, upload: dict[str, str], path: Path, expected: Checksum, count: Count
    ) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        size = crc = 0
        for number, data in enumerate(_read_parts(path, expected.bytes), start=1):
            size, crc = size + len(data), google_crc32c.extend(crc, data)
            tag = self._retry(partial(self._send_part, upload, number, data))
            parts.append({"PartNumber": number, "ETag": tag})
            count(len(data))
        if Checksum(size, f"{crc:08x}") != expected:
            raise ChangedError
        return parts

    def _send_part(self, upload: dict[str, str], number: int, data: bytes) -> str:
        digest = hashlib.md5(data)
        answer = self._client.upload_part(
            **upload, PartNumber=number, Body=data, ContentMD5=_base64(digest.digest())
        )
        if _is_md5(answer) and _tag(answer) != digest.hexdigest():
            raise DamagedInTransitError(f"part {number} was damaged during the upload")
        tag: str = answer["ETag"]
        return tag

    def _abort(self, upload: dict[str, str]) -> None:
        self._client.abort_multipart_upload(**upload)


def _read_parts(path: Path, size: int) -> Iterator[bytes]:
    length = max(PART_BYTES, -(-size // _MAX_PARTS))
    with path.open("rb") as file:
        while data := file.read(length):
            yield data


def _tag(answer: dict[str, Any]) -> str:
    return str(answer.get("ETag", "")).strip('"')


def _is_md5(answer: dict[str, Any]) -> bool:
    encrypted = answer.get("ServerSideEncryption", "AES256") != "AES256"
    own_key = "SSECustomerAlgorithm" in answer
    return not encrypted and not own_key and re.fullmatch("[0-9a-f]{32}", _tag(answer)) is not None


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


@cache
def client(_process: int, endpoint: Endpoint) -> Any:
    """Return the client of this process for an endpoint."""
    # All threads can share the client, but a forked child cannot.
    made = boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint.url or None,
        region_name=endpoint.region or None,
        config=Config(
            connect_timeout=TIMEOUTS[0],
            read_timeout=TIMEOUTS[1],
            # Disable boto's retries, because Flotilla itself retries the requests to all stores.
            retries={"mode": "standard", "total_max_attempts": 1},
            # Uploads send an MD5, because some stores do not support the newer checksums.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=2 * THREADS,
            s3={"addressing_style": "path" if endpoint.path_style else "auto"},
        ),
        **(kfp_credentials() if endpoint.kfp_secret else {}),
    )
    made.meta.events.register("after-call.s3", _refuse_foreign_answer)
    return made


def _refuse_foreign_answer(http_response: Any, parsed: Any, model: Any, **_: Any) -> None:
    """Raise an error for a successful response that is not from the store, such as an empty one."""
    lacks = _ANSWERED.get(model.name, "") not in {"", *parsed}
    if http_response.status_code in SUCCESS and lacks:
        raise DamagedInTransitError(f"the response to {model.name} is not from an object store")


def _code(error: boto.ClientError) -> str:
    return str(error.response.get("Error", {}).get("Code", ""))

"""The client of boto3, and what its errors mean."""

from __future__ import annotations

from functools import cache
from typing import Any

import boto3
import urllib3
from botocore import exceptions as boto
from botocore.config import Config

from trainer.storage.bucket import TIMEOUTS, MangledError, Trouble
from trainer.storage.endpoint import Endpoint, kfp_credentials
from trainer.storage.parallel import THREADS

_PASSING = (
    boto.HTTPClientError,
    boto.IncompleteReadError,
    urllib3.exceptions.HTTPError,
    ConnectionError,
    TimeoutError,
    MangledError,
)
_PASSING_WORDS = {
    "BadDigest", "ConditionalRequestConflict", "InternalError", "OperationAborted",
    "RequestTimeout", "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException",
    "TooManyRequests",
}  # fmt: skip
_PASSING_CODES = (408, 429, 500, 502, 503, 504)
_TROUBLES = {
    "NoSuchBucket": Trouble.NO_BUCKET,
    "NoSuchKey": Trouble.ABSENT,
    # An upload that was completed, where the answer was lost.
    "NoSuchUpload": Trouble.EXISTS,
    "404": Trouble.ABSENT,
    "PreconditionFailed": Trouble.EXISTS,
    "412": Trouble.EXISTS,
    "InvalidAccessKeyId": Trouble.NO_CREDENTIALS,
    "SignatureDoesNotMatch": Trouble.NO_CREDENTIALS,
    "ExpiredToken": Trouble.NO_CREDENTIALS,
    "InvalidToken": Trouble.NO_CREDENTIALS,
    "AccessDenied": Trouble.DENIED,
    "403": Trouble.DENIED,
}


@cache
def client(_process: int, endpoint: Endpoint) -> Any:
    """Return the client of an endpoint, one for each process."""
    # One for all threads, but not for a forked child.
    return boto3.session.Session().client(
        "s3",
        endpoint_url=endpoint.url or None,
        region_name=endpoint.region or None,
        config=Config(
            connect_timeout=TIMEOUTS[0],
            read_timeout=TIMEOUTS[1],
            # Asking again is ours, for all stores alike.
            retries={"mode": "standard", "total_max_attempts": 1},
            # Not every store knows the newer checksums; the MD5 goes with each request.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            max_pool_connections=2 * THREADS,
            s3={"addressing_style": "path" if endpoint.path_style else "auto"},
        ),
        **(kfp_credentials() if endpoint.kfp_secret else {}),
    )


def judge(error: BaseException) -> Trouble:
    """Say what an error means."""
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return Trouble.NO_CREDENTIALS
    if isinstance(error, _PASSING):
        return Trouble.PASSING
    if isinstance(error, boto.BotoCoreError):
        return Trouble.OTHER
    if not isinstance(error, boto.ClientError):
        return Trouble.FOREIGN
    said = word(error)
    status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    if said in _PASSING_WORDS or status in _PASSING_CODES:
        return Trouble.PASSING
    return _TROUBLES.get(said, Trouble.OTHER)


def word(error: boto.ClientError) -> str:
    """Return the code that S3 gives an error."""
    return str(error.response.get("Error", {}).get("Code", ""))

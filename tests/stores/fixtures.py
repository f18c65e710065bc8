"""Fixtures that provide store servers, whose faults are cleared before and after each test."""

import uuid
from collections.abc import Iterator

import pytest

from tests.stores.gcs_server import GcsServer, gcs_server
from tests.stores.s3_server import S3Server, s3_server


@pytest.fixture(scope="session")
def _gcs() -> Iterator[GcsServer]:
    with gcs_server() as server:
        yield server


@pytest.fixture(scope="session")
def _s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def gcs(_gcs: GcsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[GcsServer]:
    """A Google Cloud Storage server that this process and its children use."""
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", _gcs.url)
    yield _gcs
    _gcs.plan.clear()


@pytest.fixture
def s3(_s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """An S3 server that this process and its children use."""
    settings = {
        "AWS_ACCESS_KEY_ID": "tester",
        "AWS_SECRET_ACCESS_KEY": "hush-hush",
        "AWS_ENDPOINT_URL": _s3.url,
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield _s3
    _s3.plan.clear()


def bucket_name() -> str:
    return f"b-{uuid.uuid4().hex[:12]}"

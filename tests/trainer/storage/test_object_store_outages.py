"""Outages at the level of connections: every operation waits until the store is there again."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest
import requests
from botocore import exceptions as boto

from tests.stores.faults import Fault
from tests.stores.link import FAULTS, PARTIAL, Link, link
from trainer import storage
from trainer.errors import ConfigError, UserError
from trainer.storage import gcs, retry, s3
from trainer.storage.bucket import Trouble
from trainer.storage.s3_endpoint import Endpoint

from .conftest import FILES, Make
from .places import BucketPlace, fetched

VARIABLES = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}
# Of which there is enough that an answer is cut in the middle.
LARGE = {**FILES, "large": bytes(range(256)) * 4096}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are short."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(retry, "MAX_PAUSE", 0.05)


@pytest.fixture
def wire(bucket: BucketPlace, hasty: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """The wire to the server of `bucket`, with short timeouts and pauses."""
    assert hasty is None
    for module in (s3, gcs):
        monkeypatch.setattr(module, "TIMEOUTS", (0.15, 0.15))
    with link(int(bucket.server.url.rpartition(":")[2])) as made:
        for name in VARIABLES.values():
            monkeypatch.setenv(name, made.url)
        yield made


class _Mender(logging.Handler):
    """Makes the wire whole at the third line of a retry."""

    def __init__(self, wire: Link) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._wire = wire

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if len(self.lines) == 3:
            self._wire.becomes("whole")


@contextmanager
def outage(wire: Link, fault: str) -> Iterator[None]:
    mender = _Mender(wire)
    logger = logging.getLogger(retry.__name__)
    logger.addHandler(mender)
    wire.becomes(fault)
    try:
        yield
    finally:
        logger.removeHandler(mender)
        wire.becomes("whole")
    # Where only long answers are cut, all of them may be short.
    assert len(mender.lines) >= 3 or fault in PARTIAL


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_operation_outlives_an_outage(
    make: Make, bucket: BucketPlace, wire: Link, tmp_path: Path, fault: str
) -> None:
    uri = storage.join(bucket.root, "a")
    with outage(wire, fault):
        manifest = storage.publish(make(files=LARGE), uri, kind="x")
    with outage(wire, fault):
        assert fetched(uri, tmp_path) == LARGE
    with outage(wire, fault):
        assert storage.published(bucket.root) == [(uri, manifest)]
    with outage(wire, fault):
        storage.delete(uri)
    assert bucket.content(uri) == {}


@pytest.mark.parametrize("fault", sorted(set(FAULTS) - set(PARTIAL)))
def test_an_outage_that_lasts_is_one_line(
    bucket: BucketPlace, wire: Link, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.2")
    wire.becomes(fault)
    with pytest.raises(storage.Unavailable, match=r"has not been available for 0\.2 s") as error:
        storage.names(bucket.root)
    assert "\n" not in str(error.value)


def test_a_name_that_is_not_resolved_is_asked_again(
    bucket: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.2")
    for name in VARIABLES.values():
        monkeypatch.setenv(name, "http://no-such-host.invalid:9000")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(storage.Unavailable):
        storage.names(bucket.root)


@pytest.mark.parametrize(
    ("kind", "reason", "trouble"),
    [
        (ssl.SSLEOFError, "UNEXPECTED_EOF_WHILE_READING", Trouble.TRANSIENT),
        (ssl.SSLError, "WRONG_VERSION_NUMBER", Trouble.NO_TLS),
        (ssl.SSLCertVerificationError, "CERTIFICATE_VERIFY_FAILED", Trouble.NO_TLS),
    ],
)
def test_tls_that_is_cut_is_an_outage_and_no_tls_is_none(
    kind: type[ssl.SSLError], reason: str, trouble: Trouble
) -> None:
    cause = kind(1, f"[SSL: {reason}]")
    cause.reason = reason
    of_s3 = boto.SSLError(endpoint_url="https://store", error=cause)
    of_gcs = requests.exceptions.SSLError(cause)
    of_s3.__cause__ = of_gcs.__cause__ = cause
    retrying = retry.Retry().call
    assert s3.S3Bucket("bucket", Endpoint(), retrying).judge(of_s3) is trouble
    assert gcs.GcsBucket("bucket", retrying).judge(of_gcs) is trouble
    for remedies in (s3.S3Bucket.remedies, gcs.GcsBucket.remedies):
        assert "CA_BUNDLE" in remedies[Trouble.NO_TLS]


@pytest.mark.slow
@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    ("status", "body"),
    [(200, b""), (200, b"[]"), (200, b"<html>log in</html>"), (200, b'{"na'), (204, b"")],
)
def test_an_answer_that_no_store_gives_is_asked_again(
    make: Make, bucket: BucketPlace, tmp_path: Path, body: bytes, status: int
) -> None:
    uri = storage.join(bucket.root, "a")
    large = {**FILES, "large": bytes((8 << 20) + 1)}
    bucket.plan.add(Fault(status, body=body, every=3, times=9))
    manifest = storage.publish(make(files=large), uri, kind="x")
    assert storage.published(bucket.root) == [(uri, manifest)]
    assert fetched(uri, tmp_path) == large
    assert storage.create_bytes(f"{uri}.json", b"1")
    assert storage.collect_garbage(bucket.root) == []
    storage.delete(uri)
    assert bucket.content(uri) == {}
    assert bucket.plan.faults[0].times == 0


@pytest.mark.parametrize("text", ["no scheme:1", "http://a b", "http://host:99999", "ftp://host"])
def test_an_address_that_is_none_is_one_line(
    bucket: BucketPlace, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    for name in VARIABLES.values():
        monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=r"is no address of a store: write it as http://host"):
        storage.names(bucket.root)


def test_a_redirection_without_end_is_one_line(bucket: BucketPlace) -> None:
    bucket.plan.add(Fault(301, times=10**6, body=b""))
    with pytest.raises(UserError, match="cannot list "):
        storage.names(bucket.root)


@pytest.mark.parametrize("size", [5, (8 << 20) + 1])
def test_a_bucket_that_vanishes_while_it_is_written_is_one_line(
    make: Make, bucket: BucketPlace, size: int
) -> None:
    uri = storage.join(bucket.root, "a")
    for method in ("PUT", "POST"):
        bucket.plan.add(Fault(404, method=method, times=100))
    for act in (
        lambda: storage.publish(make(files={"a": bytes(size)}), uri, kind="x"),
        lambda: storage.write_bytes(uri, b"1"),
    ):
        with pytest.raises(UserError, match=r"there is no bucket .*; create it, or name"):
            act()

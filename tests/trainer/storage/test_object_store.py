"""Tests operations on object stores during outages, with concurrent writers and with faults."""

import itertools
import logging
import os
import socket
import ssl
from contextlib import contextmanager

import pytest
import requests
from botocore import exceptions as boto

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.storage import gcs, s3, store
from flotilla.trainer.storage.store import PART_BYTES, Trouble
from flotilla.trainer.storage.uri import Endpoint
from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.stores.link import FAULTS, PARTIAL, link

from .conftest import FILES
from .places import BucketPlace, fetched

VARIABLES = {"gs": "STORAGE_EMULATOR_HOST", "s3": "AWS_ENDPOINT_URL"}


# Only the response with a large file is long enough to be truncated.
LARGE = {**FILES, "large": bytes(range(256)) * 4096}


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(store, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(store, "MAX_PAUSE", 0.05)


@pytest.fixture
def wire(bucket, hasty, monkeypatch):
    """Return a connection to the server of `bucket` that a test can break, with short timeouts."""
    assert hasty is None
    for module in (s3, gcs):
        monkeypatch.setattr(module, "TIMEOUTS", (0.15, 0.15))
    with link(int(bucket.server.url.rpartition(":")[2])) as made:
        for name in VARIABLES.values():
            monkeypatch.setenv(name, made.url)
        yield made


class _Mender(logging.Handler):
    """Repairs the connection at the third log line about a retry."""

    def __init__(self, wire):
        super().__init__()
        self.lines: list[str] = []
        self._wire = wire

    def emit(self, record):
        self.lines.append(record.getMessage())
        if len(self.lines) == 3:
            self._wire.becomes("whole")


@contextmanager
def outage(wire, fault):
    mender = _Mender(wire)
    logger = logging.getLogger(store.__name__)
    logger.addHandler(mender)
    wire.becomes(fault)
    try:
        yield
    finally:
        logger.removeHandler(mender)
        wire.becomes("whole")
    # If only long replies are truncated, there may be no retry.
    assert len(mender.lines) >= 3 or fault in PARTIAL


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_every_operation_outlives_an_outage(make, bucket, wire, tmp_path, fault):
    uri = storage.join(bucket.root, "a")
    with outage(wire, fault):
        manifest = storage.publish(make(files=LARGE), uri, kind="x")
    with outage(wire, fault):
        assert fetched(uri, tmp_path) == LARGE
    with outage(wire, fault):
        assert storage.list_published(bucket.root) == [(uri, manifest)]
    with outage(wire, fault):
        storage.delete(uri)
    assert bucket.content(uri) == {}


@pytest.mark.parametrize(
    ("kind", "reason", "trouble"),
    [
        (ssl.SSLEOFError, "UNEXPECTED_EOF_WHILE_READING", Trouble.TRANSIENT),
        (ssl.SSLError, "WRONG_VERSION_NUMBER", Trouble.NO_TLS),
        (ssl.SSLCertVerificationError, "CERTIFICATE_VERIFY_FAILED", Trouble.NO_TLS),
    ],
)
def test_tls_that_is_cut_is_an_outage_and_no_tls_is_none(kind, reason, trouble):
    cause = kind(1, f"[SSL: {reason}]")
    cause.reason = reason
    of_s3 = boto.SSLError(endpoint_url="https://store", error=cause)
    of_gcs = requests.exceptions.SSLError(cause)
    of_s3.__cause__ = of_gcs.__cause__ = cause
    retrying = store.Retry().call
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
def test_an_answer_that_no_store_gives_is_asked_again(make, bucket, tmp_path, body, status):
    uri = storage.join(bucket.root, "a")
    large = {**FILES, "large": bytes((8 << 20) + 1)}
    bucket.plan.add(Fault(status, body=body, every=3, times=9))
    manifest = storage.publish(make(files=large), uri, kind="x")
    assert storage.list_published(bucket.root) == [(uri, manifest)]
    assert fetched(uri, tmp_path) == large
    assert storage.create_bytes(f"{uri}.json", b"1")
    assert storage.collect_garbage(bucket.root) == []
    storage.delete(uri)
    assert bucket.content(uri) == {}
    assert bucket.plan.faults[0].times == 0


@pytest.mark.parametrize("text", ["no scheme:1", "http://a b", "http://host:99999", "ftp://host"])
def test_an_address_that_is_none_is_one_line(bucket, monkeypatch, text):
    for name in VARIABLES.values():
        monkeypatch.setenv(name, text)
    with pytest.raises(
        ConfigError, match=r"is not the address of a store; write it as http://host"
    ):
        storage.names(bucket.root)


def test_a_redirection_without_end_is_one_line(bucket):
    bucket.plan.add(Fault(301, times=10**6, body=b""))
    with pytest.raises(UserError, match="cannot list "):
        storage.names(bucket.root)


@pytest.mark.parametrize("size", [5, (8 << 20) + 1])
def test_a_bucket_that_vanishes_while_it_is_written_is_one_line(make, bucket, size):
    uri = storage.join(bucket.root, "a")
    for method in ("PUT", "POST"):
        bucket.plan.add(Fault(404, method=method, times=100))
    for act in (
        lambda: storage.publish(make(files={"a": bytes(size)}), uri, kind="x"),
        lambda: storage.write_bytes(uri, b"1"),
    ):
        with pytest.raises(UserError, match=r"there is no bucket .*; create it, or use"):
            act()


@pytest.fixture
def old(s3):
    """Return a bucket of S3 in a store that lacks conditional writes."""
    place = BucketPlace(s3, f"s3://{bucket_name()}")
    place.plan.add(Fault(501, header="If-None-Match", times=-1))
    return place


@pytest.mark.slow
def test_a_publication_does_without(make, old, tmp_path):
    files = {"small": b"1", "large": os.urandom(PART_BYTES + 5)}
    storage.publish(make(files=files), old.root, kind="x")
    assert old.plan.faults[0].seen == len(files) + 1
    assert fetched(old.root, tmp_path) == files


def test_what_is_there_is_not_replaced(make, old, tmp_path):
    storage.publish(make("one", files={"a": b"1"}), old.root, kind="x")
    with pytest.raises(storage.Conflict, match="already published with different content"):
        storage.publish(make("other", files={"a": b"2"}), old.root, kind="x")
    assert fetched(old.root, tmp_path) == {"a": b"1"}


def test_what_a_dead_writer_left_is_not_taken_for_ours(make, old, tmp_path):
    old.put(f"{old.root}/a", b"half of it")
    storage.publish(make(files={"a": b"all of it"}), old.root, kind="x")
    assert fetched(old.root, tmp_path) == {"a": b"all of it"}


def test_what_another_writer_of_a_draft_added_is_not_overwritten(old, tmp_path):
    old.put(f"{old.root}/a", b"of another attempt")
    path = tmp_path / "a"
    path.write_bytes(b"ours")
    with storage.draft(old.root) as draft:
        entry = storage.add_file(draft, path, "a")
        assert old.get(f"{old.root}/a") == b"of another attempt"
        storage.commit(draft, old.root, kind="x", files=[entry], fields={})
    assert fetched(old.root, tmp_path / "there") == {"a": b"ours"}


def test_another_refusal_stays_one(make, old):
    old.plan.clear()
    old.plan.add(Fault(501, method="PUT", times=-1))
    with pytest.raises(UserError, match="501"):
        storage.publish(make(files={"a": b"1"}), old.root, kind="x")
    assert old.content(old.root) == {}


FAULTS = [500, "drop", "lose", "truncate", 503, 429]


@pytest.fixture
def uri(bucket):
    return storage.join(bucket.root, "a b")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_publishing_and_fetching_outlive_a_fault_of_every_request(
    make, bucket, uri, tmp_path, kind
):
    files = {**FILES, "large": os.urandom((1 << 23) + 5)}
    bucket.plan.add(Fault(kind, times=6, every=2))
    manifest = storage.publish(make(files=files), uri, kind="x")
    assert bucket.plan.faults[0].times == 0
    assert storage.verify(uri) == manifest
    assert len(bucket.content(uri)) == len(files) + 1
    bucket.plan.clear()
    bucket.plan.add(Fault(kind, times=4, every=2))
    assert fetched(uri, tmp_path) == files
    assert bucket.plan.faults[0].times == 0


def test_each_kind_of_request_is_asked_again(make, bucket, uri):
    methods = ("GET", "PUT", "POST", "DELETE", "HEAD")
    bucket.plan.add(*(Fault(503, method=each, times=2, every=2) for each in methods))
    storage.write_bytes(uri + ".jsonl", b"1")
    assert storage.read_bytes(uri + ".jsonl") == b"1"
    storage.publish(make(), uri, kind="x")
    assert storage.newest(bucket.root)
    storage.delete(uri)
    assert bucket.content(uri) == {}


@pytest.mark.slow
def test_silence_is_waited_for(make, bucket, uri):
    bucket.plan.add(Fault("silence", seconds=1.0, times=2))
    storage.publish(make(), uri, kind="x")
    storage.verify(uri)


def test_each_retry_is_a_line_of_log(bucket, uri, caplog):
    bucket.plan.add(Fault(503, times=2))
    with caplog.at_level(logging.WARNING, logger="flotilla.trainer.storage"):
        storage.write_bytes(uri, b"1")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(bucket.root.partition("/the ")[0])
        assert "retrying in" in line
        assert "\n" not in line


def test_past_the_deadline_there_is_one_line(make, bucket, uri, monkeypatch, caplog):
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.1")
    source, faults = make(), itertools.cycle([503, "drop"])
    for action in (
        lambda: storage.publish(source, uri, kind="x"),
        lambda: storage.fetch(uri, source / "x"),
        lambda: storage.write_bytes(uri, b""),
        lambda: storage.list_published(uri),
        lambda: storage.delete(uri),
        lambda: storage.is_published(uri),
    ):
        bucket.plan.clear()
        bucket.plan.add(Fault(next(faults), times=1000))
        with pytest.raises(storage.Unavailable) as error:
            action()
        line = str(error.value)
        assert "has not been available for 0.1 s" in line
        assert "try again later" in line
        assert uri in line
        assert "\n" not in line
        # The credentials of the tests contain this word.
        assert "hush" not in line + caplog.text
    bucket.plan.clear()
    assert bucket.content(uri) == {}


@pytest.mark.slow
def test_what_goes_on_is_not_cut_off_by_the_deadline(make, bucket, uri, monkeypatch):
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "1")
    bucket.plan.latency = 0.25
    try:
        storage.publish(make(files={f"{n:03d}": b"" for n in range(80)}), uri, kind="x")
    finally:
        bucket.plan.latency = 0.0
    storage.verify(uri)


def test_a_store_that_cannot_be_reached_is_asked_again(uri, port, monkeypatch):
    def fail(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.1")
    for host in (f"127.0.0.1:{port}", "no-such-host.invalid:9000"):
        for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
            monkeypatch.setenv(name, f"http://{host}")
        with pytest.raises(storage.Unavailable, match=r"has not been available for 0\.1 s"):
            storage.write_bytes(uri, b"")
        monkeypatch.setattr(socket, "getaddrinfo", fail)


def test_a_deadline_that_is_no_number(uri, monkeypatch):
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "soon")
    with pytest.raises(ConfigError, match="FLOTILLA_STORAGE_DEADLINE: 'soon' is not a number"):
        storage.write_bytes(uri, b"")


def test_a_missing_bucket_is_not_a_missing_object(make, uri, tmp_path):
    scheme = uri.partition(":")[0]
    assert not storage.is_published(uri)
    elsewhere = f"{scheme}://no-such-bucket/a"
    source = make()
    for action in (
        lambda: storage.is_published(elsewhere),
        lambda: storage.publish(source, elsewhere, kind="x"),
        lambda: storage.fetch(elsewhere, tmp_path / "x"),
        lambda: storage.list_published(elsewhere),
        lambda: storage.read_bytes(elsewhere),
        lambda: storage.write_bytes(elsewhere, b""),
        lambda: storage.delete(elsewhere),
    ):
        with pytest.raises(UserError) as error:
            action()
        assert str(error.value).endswith(
            f"there is no bucket {scheme}://no-such-bucket; create it, or use another bucket"
        )


@pytest.mark.parametrize(
    ("status", "reason"), [(403, "no permission"), (401, "missing or wrong credentials")]
)
def test_a_refusal_names_the_missing_permission(bucket, uri, status, reason):
    bucket.plan.add(Fault(status, times=10))
    with pytest.raises(UserError) as error:
        storage.write_bytes(uri, b"")
    line = str(error.value)
    assert line.startswith(f"cannot write {uri}: {uri.partition('/the ')[0]}")
    assert "hush" not in line
    if not (status == 401 and uri.startswith("s3")):
        assert reason in line
        assert ";" in line
    assert len(bucket.plan.requests) < 10 or bucket.plan.faults[0].times == 9


def test_a_download_that_is_damaged_on_the_way_is_fetched_again(make, bucket, uri, tmp_path):
    storage.publish(make(), uri, kind="x")
    target = storage.join(uri, "a.bin")

    def heal(request):
        if "a.bin" in request:
            seen.append(request)
        if len(seen) > 1:
            bucket.put(target, FILES["a.bin"])

    seen = []
    bucket.put(target, FILES["a.bin"][:-1] + b"!")
    with bucket.before_requests(heal):
        assert fetched(uri, tmp_path) == FILES
    assert len(seen) == 2

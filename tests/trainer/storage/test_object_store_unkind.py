"""Stores that fail for a while, or for good: asked again, with a line each, up to the deadline."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.stores.faults import Fault
from trainer import storage
from trainer.errors import ConfigError, UserError

from .conftest import FILES, Make
from .places import BucketPlace, fetched

FAULTS = [
    500,
    "drop",
    "lose",
    "truncate",
    *(pytest.param(status, marks=pytest.mark.slow) for status in (503, 429)),
]


@pytest.fixture
def uri(bucket: BucketPlace) -> str:
    """Where to publish."""
    return storage.join(bucket.root, "a b")


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_publication_outlives_a_fault_of_every_request(
    make: Make, bucket: BucketPlace, uri: str, tmp_path: Path, kind: int | str
) -> None:
    files = {**FILES, "large": os.urandom((1 << 23) + 5)}
    bucket.plan.add(Fault(kind, times=6, every=2))
    manifest = storage.publish(make(files=files), uri, kind="x")
    assert bucket.plan.faults[0].times == 0
    assert storage.verify(uri) == manifest
    assert len(bucket.content(uri)) == len(files) + 1
    assert fetched(uri, tmp_path) == files


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fetch_outlives_faults(
    make: Make, bucket: BucketPlace, uri: str, tmp_path: Path, kind: int | str
) -> None:
    files = {**FILES, "large": os.urandom((1 << 23) + 5)}
    storage.publish(make(files=files), uri, kind="x")
    bucket.plan.add(Fault(kind, times=4, every=2))
    assert fetched(uri, tmp_path) == files
    assert bucket.plan.faults[0].times == 0


@pytest.mark.parametrize("method", ["GET", "PUT", "POST", "DELETE", "HEAD"])
def test_each_kind_of_request_is_asked_again(
    make: Make, bucket: BucketPlace, uri: str, method: str
) -> None:
    bucket.plan.add(Fault(503, method=method, times=3, every=2))
    storage.write_bytes(uri + ".jsonl", b"1")
    assert storage.read_bytes(uri + ".jsonl") == b"1"
    storage.publish(make(), uri, kind="x")
    assert storage.newest(bucket.root)
    storage.delete(uri)
    assert bucket.content(uri) == {}


@pytest.mark.slow
def test_silence_is_waited_for(make: Make, bucket: BucketPlace, uri: str) -> None:
    bucket.plan.add(Fault("silence", seconds=1.0, times=2))
    storage.publish(make(), uri, kind="x")
    storage.verify(uri)


def test_each_retry_is_a_line_of_log(
    bucket: BucketPlace, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.plan.add(Fault(503, times=2))
    with caplog.at_level(logging.WARNING, logger="trainer.storage"):
        storage.write_bytes(uri, b"1")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    for line in lines:
        assert line.startswith(bucket.root.partition("/the ")[0])
        assert "retrying in" in line
        assert "\n" not in line


def test_past_the_deadline_there_is_one_line(
    make: Make,
    bucket: BucketPlace,
    uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.3")
    source = make()
    bucket.plan.add(Fault(503, times=1000))
    for action in (
        lambda: storage.publish(source, uri, kind="x"),
        lambda: storage.fetch(uri, tmp_path / "x"),
        lambda: storage.write_bytes(uri, b""),
        lambda: storage.published(uri),
        lambda: storage.delete(uri),
        lambda: storage.is_published(uri),
    ):
        with pytest.raises(storage.Unavailable) as error:
            action()
        line = str(error.value)
        assert "has not been available for 0.3 s" in line
        assert "try again when the store answers" in line
        assert uri in line
        assert "\n" not in line
    bucket.plan.clear()
    assert bucket.content(uri) == {}


def test_a_store_that_takes_no_connection_is_asked_again(
    uri: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.3")
    for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    with pytest.raises(storage.Unavailable, match=r"has not been available for 0\.3 s"):
        storage.write_bytes(uri, b"")


@pytest.mark.slow
def test_what_goes_on_is_not_cut_off_by_the_deadline(
    make: Make, bucket: BucketPlace, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "1")
    bucket.plan.latency = 0.25
    try:
        storage.publish(make(files={f"{n:03d}": b"" for n in range(80)}), uri, kind="x")
    finally:
        bucket.plan.latency = 0.0
    storage.verify(uri)


def test_a_deadline_that_is_no_number(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "soon")
    with pytest.raises(ConfigError, match="FLOTILLA_STORAGE_DEADLINE: 'soon' is not a number"):
        storage.write_bytes(uri, b"")


def test_a_missing_bucket_is_not_a_missing_object(make: Make, uri: str, tmp_path: Path) -> None:
    scheme = uri.partition(":")[0]
    assert not storage.is_published(uri)
    elsewhere = f"{scheme}://no-such-bucket/a"
    source = make()
    for action in (
        lambda: storage.is_published(elsewhere),
        lambda: storage.publish(source, elsewhere, kind="x"),
        lambda: storage.fetch(elsewhere, tmp_path / "x"),
        lambda: storage.published(elsewhere),
        lambda: storage.read_bytes(elsewhere),
        lambda: storage.write_bytes(elsewhere, b""),
        lambda: storage.delete(elsewhere),
    ):
        with pytest.raises(UserError) as error:
            action()
        assert str(error.value).endswith(
            f"there is no bucket {scheme}://no-such-bucket; create it, or name one that exists"
        )


@pytest.mark.parametrize(
    ("status", "reason"), [(403, "no permission"), (401, "no credentials, or wrong ones")]
)
def test_a_refusal_names_the_missing_permission(
    bucket: BucketPlace, uri: str, status: int, reason: str
) -> None:
    bucket.plan.add(Fault(status, times=10))
    with pytest.raises(UserError) as error:
        storage.write_bytes(uri, b"")
    line = str(error.value)
    assert line.startswith(f"cannot write {uri}: {uri.partition('/the ')[0]}")
    if not (status == 401 and uri.startswith("s3")):
        assert reason in line
        assert ";" in line
    assert len(bucket.plan.requests) < 10 or bucket.plan.faults[0].times == 9


def test_a_download_that_is_damaged_on_the_way_is_fetched_again(
    make: Make, bucket: BucketPlace, uri: str, tmp_path: Path
) -> None:
    storage.publish(make(), uri, kind="x")
    target = storage.join(uri, "a.bin")

    def heal(request: str) -> None:
        if "a.bin" in request:
            seen.append(request)
        if len(seen) > 1:
            bucket.put(target, FILES["a.bin"])

    seen: list[str] = []
    bucket.put(target, FILES["a.bin"][:-1] + b"!")
    bucket.plan.before = heal
    try:
        assert fetched(uri, tmp_path) == FILES
    finally:
        bucket.plan.before = None
    assert len(seen) == 2


def test_nothing_secret_is_said(
    make: Make,
    bucket: BucketPlace,
    uri: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.3")
    bucket.plan.add(Fault(503, times=8), Fault(403, times=8))
    with caplog.at_level(logging.INFO):
        for _ in range(4):
            with pytest.raises(UserError) as error:
                storage.publish(make(), uri, kind="x")
            assert "hush" not in str(error.value)
    assert "hush" not in caplog.text

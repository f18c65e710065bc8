"""Stores that ignore the MD5 of what is sent: nothing damaged is published, or stays."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.stores.s3_server import S3Server
from trainer import storage
from trainer.errors import UserError
from trainer.storage import s3
from trainer.storage.manifest import MANIFEST
from trainer.storage.s3_endpoint import endpoint_of
from trainer.storage.uri import locate

from .conftest import FILES, Make
from .places import BucketPlace, fetched


@pytest.fixture
def place(s3: S3Server) -> BucketPlace:
    """A bucket whose store checks nothing."""
    return BucketPlace(s3, f"s3://{bucket_name()}")


def uri_in(place: BucketPlace) -> str:
    return storage.join(place.root, "a")


@pytest.mark.parametrize("path", [MANIFEST, r"a\.bin"])
def test_what_arrives_damaged_is_sent_again(
    make: Make, place: BucketPlace, tmp_path: Path, path: str
) -> None:
    place.plan.add(Fault("mangle", method="PUT", path=path, times=2))
    manifest = storage.publish(make(), uri_in(place), kind="x")
    assert place.plan.faults[0].times == 0
    assert storage.verify(uri_in(place)) == manifest
    assert fetched(uri_in(place), tmp_path) == FILES
    assert len(place.content(uri_in(place))) == len(FILES) + 1


def test_a_manifest_that_always_arrives_damaged_is_not_published(
    make: Make, place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOTILLA_STORAGE_DEADLINE", "0.3")
    place.plan.add(Fault("mangle", method="PUT", path=MANIFEST, times=1000))
    with pytest.raises(storage.Unavailable, match=r"was damaged on its way to the store"):
        storage.publish(make(), uri_in(place), kind="x")
    assert MANIFEST not in place.content(uri_in(place))
    assert not storage.is_published(uri_in(place))


def test_a_damaged_manifest_goes_also_where_its_removal_fails_at_first(
    make: Make, place: BucketPlace
) -> None:
    place.plan.add(Fault("mangle", method="PUT", path=MANIFEST))
    place.plan.add(Fault(503, method="DELETE", path=MANIFEST))
    manifest = storage.publish(make(), uri_in(place), kind="x")
    assert storage.verify(uri_in(place)) == manifest


def test_a_store_without_md5_is_read_again(
    make: Make, place: BucketPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "_is_md5", lambda _: False)
    place.plan.add(Fault("mangle", method="PUT", path=MANIFEST))
    manifest = storage.publish(make(), uri_in(place), kind="x")
    assert storage.verify(uri_in(place)) == manifest


def test_a_file_that_is_replaced_arrives_whole(place: BucketPlace) -> None:
    place.plan.add(Fault("mangle", method="PUT"))
    storage.write_bytes(uri_in(place), b"twelve bytes")
    assert storage.read_bytes(uri_in(place)) == b"twelve bytes"


EXPIRED = (
    b'<?xml version="1.0"?><Error><Code>ExpiredToken</Code>'
    b"<Message>The provided token has expired.</Message></Error>"
)


def test_credentials_that_have_expired_are_one_line(place: BucketPlace) -> None:
    place.plan.add(Fault(400, body=EXPIRED, times=2))
    with pytest.raises(UserError) as error:
        storage.write_bytes(uri_in(place), b"1")
    line = str(error.value)
    assert ": credentials that have expired (" in line
    assert "; renew them (aws sso login, or a new AWS_SESSION_TOKEN), or use a role" in line
    assert "\n" not in line
    assert "hush" not in line


def test_credentials_that_were_renewed_in_their_file_are_used(
    place: BucketPlace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    profile = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    text = "[default]\naws_access_key_id={}\naws_secret_access_key=hush-hush\n"
    profile.write_text(text.format("first"))
    s3.client.cache_clear()
    keys: list[str] = []

    def before(request: str) -> None:
        profile.write_text(text.format("second"))
        keys.append(request)

    place.plan.before = before
    place.plan.add(Fault(400, body=EXPIRED))
    try:
        storage.write_bytes(uri_in(place), b"1")
        endpoint = endpoint_of(locate(uri_in(place)))
    finally:
        place.plan.before = None
    assert len(keys) == 2
    assert s3.client(os.getpid(), endpoint)._get_credentials().access_key == "second"
    s3.client.cache_clear()

"""Tests that endless responses of a store time out, and that uploads of other writers are kept."""

import os
import threading

import pytest
from botocore import exceptions as boto

from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.storage import gcs, object_store, retry, s3
from flotilla.trainer.storage.errors import StoreUnavailable
from flotilla.trainer.storage.store import ChangedError, DamagedInTransitError, list_pages
from flotilla.trainer.storage.uri import Endpoint, find_endpoint, locate
from tests.stores.fixtures import bucket_name

from .places import BucketPlace


def transient(error):
    return isinstance(error, TimeoutError)


def test_a_request_that_goes_on_for_ever_ends_with_the_deadline(monkeypatch):
    monkeypatch.setenv(retry.VARIABLE, "0.1")
    monkeypatch.setattr(retry, "LEAST_SECONDS", 0.05)
    free, asked = threading.Event(), retry.Retry()
    with pytest.raises(StoreUnavailable, match=r"for 0\.1 s \(no complete response arrived\)"):
        asked.call("s3://b", lambda: asked.within_deadline(free.wait), transient)
    free.set()


def test_an_error_of_the_request_is_raised_as_it_is():
    def refuse():
        raise KeyError("x")

    with pytest.raises(KeyError):
        retry.Retry().within_deadline(refuse)


def test_a_byte_now_and_then_is_no_progress(clock):
    asked = retry.Retry()
    for _ in range(10):
        clock.passed += 60
        asked.progress(100)
    assert asked._seconds_left() == pytest.approx(retry.DEADLINE - 600)
    asked.progress(retry.PROGRESS_BYTES)
    assert asked._seconds_left() == pytest.approx(retry.DEADLINE)


@pytest.mark.parametrize("tokens", [["a", "a"], ["a", "b", "a"]])
def test_a_listing_whose_token_comes_again_ends(tokens):
    left = iter(tokens)
    with pytest.raises(DamagedInTransitError, match="does not end"):
        list(list_pages(lambda _: (["entry"], next(left))))


def test_a_listing_of_empty_pages_ends():
    count = iter(range(10**6))
    with pytest.raises(DamagedInTransitError, match="does not end"):
        list(list_pages(lambda _: ([], f"token {next(count)}")))
    assert next(count) < 2000


class Repeating:
    """A client of S3 or Google Cloud Storage whose listing never ends."""

    prefixes: tuple[str, ...] = ()
    next_page_token = "again"

    def __getattr__(self, _operation):
        return lambda **_: {"IsTruncated": True, "NextContinuationToken": "again"}

    def list_blobs(self, *_, **__):
        return self

    @property
    def pages(self):
        return iter(())


@pytest.mark.parametrize("kind", [s3.S3Bucket, gcs.GcsBucket])
def test_neither_store_lists_for_ever(kind, monkeypatch):
    monkeypatch.setattr(kind, "_client", Repeating())
    made = kind("b", *([Endpoint()] if kind is s3.S3Bucket else []), lambda request: request())
    for listed in (made.walk, made.names):
        with pytest.raises(DamagedInTransitError):
            list(listed("a/"))


def test_only_the_uploads_that_our_writer_has_marked_are_aborted(make, request, monkeypatch):
    place = BucketPlace(request.getfixturevalue("s3"), f"s3://{bucket_name()}/team")
    uri, bucket = storage.join(place.root, "model"), locate(place.root).bucket
    client = s3.client(os.getpid(), find_endpoint(locate(uri)))
    foreign = locate(storage.join(place.root, "other-tool", "backup.tar")).key
    client.create_multipart_upload(Bucket=bucket, Key=foreign)

    def killed(*_):
        raise boto.ClientError({}, "abort")

    def changed(*_):
        raise ChangedError

    source = make(files={"large": bytes((8 << 20) + 1)})
    with monkeypatch.context() as patch:
        patch.setattr(s3.S3Bucket, "_abort", killed)
        patch.setattr(s3.S3Bucket, "_parts", changed)
        with pytest.raises(UserError):
            storage.publish(source, uri, kind="x")

    def uploads():
        found = client.list_multipart_uploads(Bucket=bucket).get("Uploads", [])
        return [each["Key"] for each in found]

    assert sorted(uploads()) == [f"{locate(uri).key}/large", foreign]
    # The writer still runs, so its upload is not garbage.
    assert storage.collect_garbage(place.root) == []
    monkeypatch.setattr(object_store, "is_gone", lambda _: True)
    (mark,) = storage.collect_garbage(place.root)
    assert mark.endswith(".flotilla-upload")
    assert uploads() == [foreign]
    assert place.content(place.root) == {}
    storage.publish(source, uri, kind="x")
    # A successful upload leaves no mark.
    assert sorted(place.content(uri)) == ["MANIFEST.json", "large"]

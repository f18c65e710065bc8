"""Stores with the protocol of S3 that refuse conditions on what is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.stores.s3_server import S3Server
from trainer import storage
from trainer.errors import UserError
from trainer.storage.bucket import PART_BYTES

from .conftest import Make
from .places import BucketPlace, fetched


@pytest.fixture
def bucket(s3: S3Server) -> BucketPlace:
    """A bucket of S3; Google Cloud Storage has preconditions of its own."""
    return BucketPlace(s3, f"s3://{bucket_name()}")


@pytest.fixture
def uri(bucket: BucketPlace) -> str:
    """A place in a store that knows of no conditions."""
    bucket.plan.add(Fault(501, header="If-None-Match", times=-1))
    return storage.join(bucket.root, "a b")


@pytest.mark.slow
def test_a_publication_does_without(
    make: Make, bucket: BucketPlace, uri: str, tmp_path: Path
) -> None:
    files = {"small": b"1", "large": os.urandom(PART_BYTES + 5)}
    storage.publish(make(files=files), uri, kind="x")
    assert bucket.plan.faults[0].seen == len(files) + 1
    assert fetched(uri, tmp_path) == files


def test_what_is_there_is_not_replaced(make: Make, uri: str, tmp_path: Path) -> None:
    storage.publish(make("one", files={"a": b"1"}), uri, kind="x")
    with pytest.raises(storage.Conflict, match="published already, with other content"):
        storage.publish(make("other", files={"a": b"2"}), uri, kind="x")
    assert fetched(uri, tmp_path) == {"a": b"1"}


def test_what_a_dead_writer_left_is_not_taken_for_ours(
    make: Make, bucket: BucketPlace, uri: str, tmp_path: Path
) -> None:
    bucket.put(storage.join(uri, "a"), b"half of it")
    storage.publish(make(files={"a": b"all of it"}), uri, kind="x")
    assert fetched(uri, tmp_path) == {"a": b"all of it"}


def test_what_another_writer_of_a_draft_added_is_not_overwritten(
    bucket: BucketPlace, uri: str, tmp_path: Path
) -> None:
    bucket.put(storage.join(uri, "a"), b"of another attempt")
    path = tmp_path / "a"
    path.write_bytes(b"ours")
    with storage.draft(uri) as draft:
        entry = storage.add_file(draft, path, "a")
        assert bucket.get(storage.join(uri, "a")) == b"of another attempt"
        storage.commit(draft, uri, kind="x", files=[entry], fields={})
    assert fetched(uri, tmp_path / "there") == {"a": b"ours"}


def test_another_refusal_stays_one(make: Make, bucket: BucketPlace, uri: str) -> None:
    bucket.plan.clear()
    bucket.plan.add(Fault(501, method="PUT", times=-1))
    with pytest.raises(UserError, match="501"):
        storage.publish(make(files={"a": b"1"}), uri, kind="x")
    assert bucket.content(uri) == {}

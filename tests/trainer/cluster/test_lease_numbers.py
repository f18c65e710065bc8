"""The numbers of locks: each comes once, also where locks are given back and writes come late."""

from __future__ import annotations

import pytest

from tests.stores.fixtures import bucket_name
from tests.trainer.cluster.test_lease import Hands, lost
from trainer import storage
from trainer.cluster.lease import ABANDONED_SECONDS, LEASE_SECONDS, holders, remove_expired


@pytest.fixture(params=["file", "gs", "s3"])
def uri(request, tmp_path):
    """A folder of checkpoints, for every client."""
    if request.param == "file":
        return storage.uri_of(tmp_path / "checkpoints")
    server = request.getfixturevalue("gcs" if request.param == "gs" else "s3")
    bucket = bucket_name()
    server.create_bucket(bucket)
    return f"{request.param}://{bucket}/run/checkpoints"


@pytest.fixture
def hands(uri):
    return Hands(uri)


def kept(uri):
    """The holders by the names of their files."""
    found = holders(uri)
    return {f"{number:06d}.json": holder for number, holder in found.items()}


def test_no_number_comes_twice(uri, hands):
    """A write of the first holder that comes late replaces nothing, and gives it nothing back."""
    first = hands.taken("digits-1")
    at = storage.join(uri, ".lock", "000001.json")
    late = storage.read_bytes(at)
    hands.time += LEASE_SECONDS
    hands.taken("digits-2").release()
    third = hands.taken("digits-3")
    third.release()
    hands.time += LEASE_SECONDS
    fourth = hands.taken("digits-4")
    assert list(kept(uri)) == ["000004.json"]
    storage.write_bytes(at, late)
    lost(first.check)
    fourth.check()
    fourth.renew()
    assert kept(uri)["000004.json"].run == "digits-4"


def test_who_was_overtaken_by_some_who_have_gone_counts_on(uri, hands, monkeypatch):
    """Between its look and its write two others came and went: what it wrote is too low."""
    hands.taken("digits-0").release()
    create = storage.create_bytes

    def late(at, data):
        monkeypatch.setattr(storage, "create_bytes", create)
        for run in ("digits-1", "digits-2"):
            hands.taken(run).release()
        return create(at, data)

    monkeypatch.setattr(storage, "create_bytes", late)
    hands.taken("digits-3").check()
    assert {name: each.run for name, each in kept(uri).items()} == {"000004.json": "digits-3"}


def test_what_was_given_back_stays_for_a_day(uri, hands):
    hands.taken("digits-1").release()
    assert remove_expired(uri) == []
    assert len(kept(uri)) == 1
    old = Hands(storage.join(uri, "other"))
    old.time -= LEASE_SECONDS + ABANDONED_SECONDS
    old.taken("digits-0").release()
    removed = remove_expired(old.uri)
    assert [storage.name_of(each) for each in removed] == ["000001.json"]

"""The numbers of leases: each is used once, also after a release and with writes that come late."""

from __future__ import annotations

import pytest

from tests.stores.fixtures import bucket_name
from tests.trainer.cluster.test_lease import Clock, lost
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
def clock(uri):
    return Clock(uri)


def leases(uri):
    """The holders by the names of their files."""
    found = holders(uri)
    return {f"{number:06d}.json": holder for number, holder in found.items()}


def test_no_number_comes_twice(uri, clock):
    """A write of the first holder that comes late replaces nothing, and gives it nothing back."""
    first = clock.acquire("digits-1")
    at = storage.join(uri, ".lock", "000001.json")
    late = storage.read_bytes(at)
    clock.time += LEASE_SECONDS
    clock.acquire("digits-2").release()
    third = clock.acquire("digits-3")
    third.release()
    clock.time += LEASE_SECONDS
    fourth = clock.acquire("digits-4")
    assert list(leases(uri)) == ["000004.json"]
    storage.write_bytes(at, late)
    lost(first.check)
    fourth.check()
    fourth.renew()
    assert leases(uri)["000004.json"].run == "digits-4"


def test_who_was_overtaken_by_some_who_have_gone_counts_on(uri, clock, monkeypatch):
    """Between its look and its write two others came and went: what it wrote is too low."""
    clock.acquire("digits-0").release()
    create = storage.create_bytes

    def late(at, data):
        monkeypatch.setattr(storage, "create_bytes", create)
        for run in ("digits-1", "digits-2"):
            clock.acquire(run).release()
        return create(at, data)

    monkeypatch.setattr(storage, "create_bytes", late)
    clock.acquire("digits-3").check()
    assert {name: each.run for name, each in leases(uri).items()} == {"000004.json": "digits-3"}


def test_what_was_given_back_stays_for_a_day(uri, clock):
    clock.acquire("digits-1").release()
    assert remove_expired(uri) == []
    assert len(leases(uri)) == 1
    old = Clock(storage.join(uri, "other"))
    old.time -= LEASE_SECONDS + ABANDONED_SECONDS
    old.acquire("digits-0").release()
    removed = remove_expired(old.uri)
    assert [storage.name_of(each) for each in removed] == ["000001.json"]

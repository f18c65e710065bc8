"""The lease of a checkpoint folder: held, refused, shared, expired, lost and released."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest

from tests.stores.faults import Fault
from tests.stores.fixtures import bucket_name
from tests.trainer.storage.places import BucketPlace, FilePlace
from trainer import storage
from trainer.cluster import lease
from trainer.cluster.lease import (
    ABANDONED_SECONDS,
    LEASE_SECONDS,
    Lease,
    LeaseHeldError,
    LeaseLostError,
    remove_expired,
)


@pytest.fixture(params=["file", "gs", "s3", "minio"])
def place(request, tmp_path):
    """A place for checkpoints, for every scheme."""
    scheme = request.param
    if scheme == "file":
        return FilePlace(tmp_path)
    server = request.getfixturevalue("gcs" if scheme == "gs" else "s3")
    if scheme == "minio":
        address = server.url.removeprefix("http://")
        options = f"?endpoint={address}&disableSSL=true&region=here"
        return BucketPlace(server, f"minio://{bucket_name()}/k{options}")
    return BucketPlace(server, f"{scheme}://{bucket_name()}/k")


@pytest.fixture
def uri(place):
    return storage.join(place.root, "run", "checkpoints")


class Clock:
    """A clock, and leases that go by it."""

    def __init__(self, uri):
        self.uri = uri
        self.time = time.time()

    def acquire(self, run, uri=""):
        made = Lease(uri or self.uri, run, lambda: self.time)
        made.acquire()
        return made


@pytest.fixture
def clock(uri):
    return Clock(uri)


def leases(place, uri):
    """The files of the folder of leases, by name."""
    content = place.content(storage.join(uri, ".lock"))
    return {name: json.loads(data) for name, data in content.items()}


def refused(act):
    with pytest.raises(LeaseHeldError) as caught:
        act()
    line = str(caught.value)
    assert caught.value.exit_code == 1
    assert "\n" not in line
    return line


def lost(act):
    with pytest.raises(LeaseLostError) as caught:
        act()
    line = str(caught.value)
    assert caught.value.exit_code == 1
    assert "\n" not in line
    return line


def test_a_lease_names_its_holder(place, uri, clock):
    clock.acquire("digits-1")
    (holder,) = leases(place, uri).values()
    assert (holder["run"], holder["process"]) == ("digits-1", os.getpid())
    assert holder["host"]
    assert holder["started"] == holder["renewed"] == clock.time


def test_a_second_job_reads_who_holds_it_and_until_when(uri, clock):
    clock.time = 1_800_000_000.0
    clock.acquire("digits-1")
    assert refused(lambda: clock.acquire("digits-2")) == (
        f"run digits-1 (process {os.getpid()} on {os.uname().nodename}) writes to {uri} since "
        "2027-01-15 08:00:00 UTC, and holds its lease until 2027-01-15 08:02:00 UTC at least: wait "
        "for its end, or stop it; if it is dead already, try again after that time"
    )


def test_a_refused_job_changes_nothing(place, uri, clock):
    first = clock.acquire("digits-1")
    before = leases(place, uri)
    refused(lambda: clock.acquire("digits-2"))
    first.check()
    assert leases(place, uri) == before


def test_a_released_lease_says_so_and_blocks_nobody(place, uri, clock, caplog):
    first = clock.acquire("digits-1")
    clock.time += 5
    first.release()
    (left,) = leases(place, uri).values()
    assert (left["released"], left["renewed"], left["run"]) == (True, clock.time, "digits-1")
    lost(first.check)
    lost(first.renew)
    lost(first.release)
    # As does one of another machine, whose clock is ahead.
    clock.time -= 60
    clock.acquire("digits-2").check()
    assert list(leases(place, uri)) == ["000002.json"]
    assert "taken over" not in caplog.text


@pytest.mark.slow
def test_of_many_at_once_one_acquires_it(uri):
    start, acquired, refusals = threading.Barrier(8), [], []

    def try_it(number):
        start.wait()
        wanted = Lease(uri, f"digits-{number}")
        try:
            wanted.acquire()
            acquired.append(wanted)
        except LeaseHeldError as error:
            refusals.append(str(error))

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(acquired) == 1
    assert len(refusals) == 7
    acquired[0].check()


def test_an_expired_lease_is_taken_over_with_a_warning(uri, clock, place, caplog):
    first = clock.acquire("digits-1")
    clock.time += LEASE_SECONDS - 1
    refused(lambda: clock.acquire("digits-2"))
    clock.time += 1
    second = clock.acquire("digits-2")
    assert f"the lease of {uri} is taken over from run digits-1" in caplog.text
    assert "which was last renewed at" in caplog.text
    second.check()
    assert [each["run"] for each in leases(place, uri).values()] == ["digits-2"]
    assert lost(first.check) == (
        f"{uri} was taken over by run digits-2 (process {os.getpid()} on {os.uname().nodename}); "
        "run digits-1 stops writing: decide which of the two should go on, and stop the other"
    )
    lost(first.renew)
    lost(first.require)
    lost(first.release)
    second.check()


def test_a_renewed_lease_does_not_expire(uri, clock, place):
    first = clock.acquire("digits-1")
    for _ in range(3):
        clock.time += LEASE_SECONDS - 1
        first.renew()
    refused(lambda: clock.acquire("digits-2"))
    (holder,) = leases(place, uri).values()
    assert holder["renewed"] == clock.time
    assert holder["started"] == clock.time - 3 * (LEASE_SECONDS - 1)


def test_a_later_attempt_of_the_same_job_acquires_it_at_once(clock, monkeypatch, caplog):
    monkeypatch.setenv(lease.VARIABLE, "TFJob models/digits-1")
    first = clock.acquire("digits-1")
    second = clock.acquire("digits-1")
    lost(first.check)
    second.check()
    assert "taken over" not in caplog.text
    monkeypatch.setenv(lease.VARIABLE, "TFJob models/digits-2")
    refused(lambda: clock.acquire("digits-2"))


def test_a_holder_with_another_number_gives_way(uri, clock, place, monkeypatch):
    """One saw the lease expired; before it acquired it, it was released, and a third one came."""
    stale = clock.acquire("digits-1")
    clock.time += LEASE_SECONDS
    create, third = storage.create_bytes, []

    def late(at, data):
        monkeypatch.setattr(storage, "create_bytes", create)
        stale.release()
        third.append(clock.acquire("digits-3"))
        return create(at, data)

    monkeypatch.setattr(storage, "create_bytes", late)
    assert "run digits-3" in refused(lambda: clock.acquire("digits-2"))
    third[0].check()
    assert [each["run"] for each in leases(place, uri).values()] == ["digits-3"]


def test_a_store_without_conditional_writes_shows_who_won(clock, place, monkeypatch):
    """A store without conditional writes: the second writer replaced the first."""
    create = storage.create_bytes

    def replaced(at, data):
        assert create(at, data)
        other = {**json.loads(data), "run": "digits-2", "token": "another"}
        place.put(at, json.dumps(other).encode())
        return True

    monkeypatch.setattr(storage, "create_bytes", replaced)
    assert "run digits-2" in refused(lambda: clock.acquire("digits-1"))
    monkeypatch.undo()


def test_a_replaced_holder_finds_out_and_does_not_replace_in_turn(uri, clock, place):
    first = clock.acquire("digits-1")
    (name,) = leases(place, uri)
    other = {**leases(place, uri)[name], "run": "digits-2", "token": "another"}
    place.put(storage.join(uri, ".lock", name), json.dumps(other).encode())
    assert "was taken over by run digits-2" in lost(first.renew)
    assert leases(place, uri)[name]["run"] == "digits-2"


def test_a_removed_lease_is_lost(uri, clock, place):
    first = clock.acquire("digits-1")
    (name,) = leases(place, uri)
    place.remove(storage.join(uri, ".lock", name))
    assert lost(first.check).startswith(f"the lease of {uri} is gone; run digits-1 stops writing")


@pytest.mark.parametrize("damage", [b"", b"not JSON", b"[]", b'{"token": 1}'])
def test_an_unreadable_lease_blocks_nobody(uri, clock, place, damage, caplog):
    place.put(storage.join(uri, ".lock", "000004.json"), damage)
    clock.acquire("digits-2").check()
    assert list(leases(place, uri)) == ["000005.json"]
    assert f"the lease of {uri} cannot be read; it is taken over" in caplog.text


def test_a_damaged_own_lease_is_written_again(uri, clock, place):
    first = clock.acquire("digits-1")
    (name,) = leases(place, uri)
    place.put(storage.join(uri, ".lock", name), b"{")
    first.renew()
    assert leases(place, uri)[name]["run"] == "digits-1"


def test_other_files_of_the_folder_stay(uri, clock, place):
    note = storage.join(uri, ".lock", "note.txt")
    place.put(note, b"mine")
    clock.acquire("digits-1").release()
    clock.acquire("digits-2").release()
    assert place.get(note) == b"mine"


def test_a_lease_is_no_checkpoint(uri, clock):
    clock.acquire("digits-1")
    assert storage.published(uri) == []
    assert storage.names(uri) == []


@pytest.mark.parametrize("place", ["gs", "s3"], indirect=True)
@pytest.mark.parametrize("kind", [503, "drop", "lose"])
def test_a_lost_answer_is_no_other_holder(uri, clock, place, kind):
    place.plan.add(Fault(kind, times=4, every=2))
    held = clock.acquire("digits-1")
    held.renew()
    held.check()
    assert len(leases(place, uri)) == 1


def test_abandoned_leases_are_removed_and_no_others(uri, clock, place):
    clock.acquire("digits-1")
    assert remove_expired(uri) == []
    assert len(leases(place, uri)) == 1
    old = Clock(uri)
    old.time -= 2 * LEASE_SECONDS
    late = storage.join(place.root, "late", "checkpoints")
    old.acquire("digits-2", late)
    # It expired, but its holder may still train and only be cut off from the store.
    assert remove_expired(late) == []
    old.time -= ABANDONED_SECONDS
    elsewhere = storage.join(place.root, "other", "checkpoints")
    old.acquire("digits-0", elsewhere)
    place.put(storage.join(elsewhere, ".lock", "000000.json"), b"{")
    removed = remove_expired(elsewhere)
    assert [storage.name_of(each) for each in removed] == ["000000.json", "000001.json"]
    assert leases(place, elsewhere) == {}

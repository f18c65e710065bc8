"""The lock of a checkpoint folder: held, refused, shared, expired, lost, and given back."""

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


class Hands:
    """A clock, and locks that go by it."""

    def __init__(self, uri):
        self.uri = uri
        self.time = time.time()

    def taken(self, run, uri=""):
        made = Lease(uri or self.uri, run, lambda: self.time)
        made.acquire()
        return made


@pytest.fixture
def hands(uri):
    return Hands(uri)


def kept(place, uri):
    """What stands in the lock's folder, by name."""
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


def test_a_lock_says_who_holds_it(place, uri, hands):
    hands.taken("digits-1")
    (holder,) = kept(place, uri).values()
    assert (holder["run"], holder["process"]) == ("digits-1", os.getpid())
    assert holder["host"]
    assert holder["started"] == holder["renewed"] == hands.time


def test_a_second_one_is_told_who_holds_it_and_until_when(uri, hands):
    hands.time = 1_800_000_000.0
    hands.taken("digits-1")
    assert refused(lambda: hands.taken("digits-2")) == (
        f"run digits-1 (process {os.getpid()} on {os.uname().nodename}) writes to {uri} since "
        "2027-01-15 08:00:00 UTC, and holds its lease until 2027-01-15 08:02:00 UTC at least: wait "
        "for its end, or stop it; if it is dead already, try again after that time"
    )


def test_the_first_one_is_not_disturbed_by_the_second(place, uri, hands):
    first = hands.taken("digits-1")
    before = kept(place, uri)
    refused(lambda: hands.taken("digits-2"))
    first.check()
    assert kept(place, uri) == before


def test_one_that_was_given_back_says_so_and_holds_nobody_up(place, uri, hands, caplog):
    first = hands.taken("digits-1")
    hands.time += 5
    first.release()
    (left,) = kept(place, uri).values()
    assert (left["released"], left["renewed"], left["run"]) == (True, hands.time, "digits-1")
    lost(first.check)
    lost(first.renew)
    lost(first.release)
    # As does one of another machine, whose clock is ahead.
    hands.time -= 60
    hands.taken("digits-2").check()
    assert list(kept(place, uri)) == ["000002.json"]
    assert "taken over" not in caplog.text


def test_of_many_at_once_one_gets_it(uri):
    start, got, told = threading.Barrier(8), [], []

    def try_it(number):
        start.wait()
        wanted = Lease(uri, f"digits-{number}")
        try:
            wanted.acquire()
            got.append(wanted)
        except LeaseHeldError as error:
            told.append(str(error))

    threads = [threading.Thread(target=try_it, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert len(told) == 7
    got[0].check()


def test_one_that_was_not_renewed_is_taken_over_with_a_word(uri, hands, place, caplog):
    first = hands.taken("digits-1")
    hands.time += LEASE_SECONDS - 1
    refused(lambda: hands.taken("digits-2"))
    hands.time += 1
    second = hands.taken("digits-2")
    assert f"the lock of {uri} is taken over from run digits-1" in caplog.text
    assert "which was silent since" in caplog.text
    second.check()
    assert [each["run"] for each in kept(place, uri).values()] == ["digits-2"]
    assert lost(first.check) == (
        f"{uri} was taken over by run digits-2 (process {os.getpid()} on {os.uname().nodename}); "
        "run digits-1 stops writing: look which of the two should go on, and stop the other"
    )
    lost(first.renew)
    lost(first.require)
    lost(first.release)
    second.check()


def test_one_that_is_renewed_does_not_expire(uri, hands, place):
    first = hands.taken("digits-1")
    for _ in range(3):
        hands.time += LEASE_SECONDS - 1
        first.renew()
    refused(lambda: hands.taken("digits-2"))
    (holder,) = kept(place, uri).values()
    assert holder["renewed"] == hands.time
    assert holder["started"] == hands.time - 3 * (LEASE_SECONDS - 1)


def test_a_later_life_of_the_same_job_takes_it_at_once(hands, monkeypatch, caplog):
    monkeypatch.setenv(lease.VARIABLE, "TFJob models/digits-1")
    first = hands.taken("digits-1")
    second = hands.taken("digits-1")
    lost(first.check)
    second.check()
    assert "taken over" not in caplog.text
    monkeypatch.setenv(lease.VARIABLE, "TFJob models/digits-2")
    refused(lambda: hands.taken("digits-2"))


def test_who_counts_from_another_number_gives_way(uri, hands, place, monkeypatch):
    """One saw the lock expired; before it took it, it was given back, and a third one came."""
    stale = hands.taken("digits-1")
    hands.time += LEASE_SECONDS
    create, third = storage.create_bytes, []

    def late(at, data):
        monkeypatch.setattr(storage, "create_bytes", create)
        stale.release()
        third.append(hands.taken("digits-3"))
        return create(at, data)

    monkeypatch.setattr(storage, "create_bytes", late)
    assert "run digits-3" in refused(lambda: hands.taken("digits-2"))
    third[0].check()
    assert [each["run"] for each in kept(place, uri).values()] == ["digits-3"]


def test_where_a_store_lets_two_write_it_says_itself_who_it_was(hands, place, monkeypatch):
    """A store that does not know of conditions: the second one replaced the first."""
    create = storage.create_bytes

    def replaced(at, data):
        assert create(at, data)
        other = {**json.loads(data), "run": "digits-2", "token": "another"}
        place.put(at, json.dumps(other).encode())
        return True

    monkeypatch.setattr(storage, "create_bytes", replaced)
    assert "run digits-2" in refused(lambda: hands.taken("digits-1"))
    monkeypatch.undo()


def test_who_is_replaced_later_finds_out_and_does_not_replace_in_turn(uri, hands, place):
    first = hands.taken("digits-1")
    (name,) = kept(place, uri)
    other = {**kept(place, uri)[name], "run": "digits-2", "token": "another"}
    place.put(storage.join(uri, ".lock", name), json.dumps(other).encode())
    assert "was taken over by run digits-2" in lost(first.renew)
    assert kept(place, uri)[name]["run"] == "digits-2"


def test_one_that_was_removed_is_lost(uri, hands, place):
    first = hands.taken("digits-1")
    (name,) = kept(place, uri)
    place.remove(storage.join(uri, ".lock", name))
    assert lost(first.check).startswith(f"the lock of {uri} is gone; run digits-1 stops writing")


@pytest.mark.parametrize("damage", [b"", b"not JSON", b"[]", b'{"token": 1}'])
def test_one_that_cannot_be_read_holds_nobody_up(uri, hands, place, damage, caplog):
    place.put(storage.join(uri, ".lock", "000004.json"), damage)
    hands.taken("digits-2").check()
    assert list(kept(place, uri)) == ["000005.json"]
    assert f"the lock of {uri} cannot be read; it is taken over" in caplog.text


def test_an_own_one_that_was_damaged_is_written_anew(uri, hands, place):
    first = hands.taken("digits-1")
    (name,) = kept(place, uri)
    place.put(storage.join(uri, ".lock", name), b"{")
    first.renew()
    assert kept(place, uri)[name]["run"] == "digits-1"


def test_what_else_stands_there_is_left_alone(uri, hands, place):
    note = storage.join(uri, ".lock", "note.txt")
    place.put(note, b"mine")
    hands.taken("digits-1").release()
    hands.taken("digits-2").release()
    assert place.get(note) == b"mine"


def test_the_lock_is_no_checkpoint(uri, hands):
    hands.taken("digits-1")
    assert storage.published(uri) == []
    assert storage.names(uri) == []


@pytest.mark.parametrize("place", ["gs", "s3"], indirect=True)
@pytest.mark.parametrize("kind", [503, "drop", "lose"])
def test_a_lost_answer_is_no_other_holder(uri, hands, place, kind):
    place.plan.add(Fault(kind, times=4, every=2))
    held = hands.taken("digits-1")
    held.renew()
    held.check()
    assert len(kept(place, uri)) == 1


def test_what_expired_is_removed_and_nothing_else(uri, hands, place):
    hands.taken("digits-1")
    assert remove_expired(uri) == []
    assert len(kept(place, uri)) == 1
    old = Hands(uri)
    old.time -= 2 * LEASE_SECONDS
    late = storage.join(place.root, "late", "checkpoints")
    old.taken("digits-2", late)
    # It expired; whether its holder still trains, and is only cut off, is not known yet.
    assert remove_expired(late) == []
    old.time -= ABANDONED_SECONDS
    elsewhere = storage.join(place.root, "other", "checkpoints")
    old.taken("digits-0", elsewhere)
    place.put(storage.join(elsewhere, ".lock", "000000.json"), b"{")
    removed = remove_expired(elsewhere)
    assert [storage.name_of(each) for each in removed] == ["000000.json", "000001.json"]
    assert kept(place, elsewhere) == {}

"""Tests when a job acquires, keeps, loses or releases the lease of a checkpoint folder."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from flotilla.trainer import events, storage
from flotilla.trainer.cluster import lease
from flotilla.trainer.cluster.lease import (
    ABANDONED_SECONDS,
    LEASE_SECONDS,
    Lease,
    LeaseHeldError,
    LeaseLostError,
    holders,
    lease_uri,
    remove_expired,
)
from flotilla.trainer.runtime.errors import ClusterLostError, UserError
from flotilla.trainer.storage import local
from tests.stores.faults import Fault
from tests.trainer.storage.places import place_of

# Leave out `minio`, which uses the same client as `s3`.
EVERY = pytest.mark.parametrize("place", ["file", "gs", "s3"], indirect=True)


@pytest.fixture(params=["file", "gs"])
def place(request, tmp_path):
    """Return a place for checkpoints in a store; `EVERY` adds a kind of store."""
    return place_of(request, tmp_path)


@pytest.fixture
def uri(place):
    return storage.join(place.root, "run", "checkpoints")


class Clock:
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
    content = place.content(storage.join(uri, ".lock"))
    return {name: json.loads(data) for name, data in content.items()}


def line_of(kind, act):
    with pytest.raises(kind) as caught:
        act()
    line = str(caught.value)
    assert caught.value.exit_code == 1
    assert "\n" not in line
    return line


refused, lost = partial(line_of, LeaseHeldError), partial(line_of, LeaseLostError)


@pytest.mark.parametrize("place", ["file", "gs", "s3", "minio"], indirect=True)
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
        f"run digits-1 (process {os.getpid()} on {os.uname().nodename}) has been writing to {uri} "
        "since 2027-01-15 08:00:00 UTC and holds the lease at least until 2027-01-15 08:02:00 UTC"
        ": wait until that run ends, or stop it; if it is already dead, try again after that time"
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
    # A lease of another machine whose clock is ahead does not block a job either.
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

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(try_it, range(8)))
    assert len(acquired) == 1
    assert len(refusals) == 7
    acquired[0].check()


@EVERY
def test_an_expired_lease_is_taken_over_with_a_warning(uri, clock, place, caplog):
    first = clock.acquire("digits-1")
    clock.time += LEASE_SECONDS + ABANDONED_SECONDS - 1
    refused(lambda: clock.acquire("digits-2"))
    clock.time += 1
    second = clock.acquire("digits-2")
    assert f"taking over the lease of {uri} from run digits-1" in caplog.text
    assert "which last renewed it at" in caplog.text
    second.check()
    assert [each["run"] for each in leases(place, uri).values()] == ["digits-2"]
    assert lost(first.check) == (
        f"run digits-2 (process {os.getpid()} on {os.uname().nodename}) took over {uri}; run "
        "digits-1 stops writing: decide which of the two runs should continue, and stop the other"
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
    monkeypatch.setenv(events.JOB, "TFJob models/digits-1")
    first = clock.acquire("digits-1")
    second = clock.acquire("digits-1")
    lost(first.check)
    second.check()
    assert "taken over" not in caplog.text
    monkeypatch.setenv(events.JOB, "TFJob models/digits-2")
    refused(lambda: clock.acquire("digits-2"))


@EVERY
def test_a_holder_with_another_number_gives_way(uri, clock, place, monkeypatch):
    """Another job acquires an expired lease after this job has seen it, but before it can act."""
    stale = clock.acquire("digits-1")
    clock.time += LEASE_SECONDS + ABANDONED_SECONDS
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
    """If the store has no conditional writes, the second writer replaces the first one's file."""
    create = storage.create_bytes

    def replaced(at, data):
        assert create(at, data)
        other = {**json.loads(data), "run": "digits-2", "token": "another"}
        place.put(at, json.dumps(other).encode())
        return True

    monkeypatch.setattr(storage, "create_bytes", replaced)
    assert "run digits-2" in refused(lambda: clock.acquire("digits-1"))
    monkeypatch.undo()


@EVERY
def test_a_replaced_holder_finds_out_and_does_not_replace_in_turn(uri, clock, place):
    first = clock.acquire("digits-1")
    (name,) = leases(place, uri)
    other = {**leases(place, uri)[name], "run": "digits-2", "token": "another"}
    place.put(storage.join(uri, ".lock", name), json.dumps(other).encode())
    assert lost(first.renew).startswith("run digits-2 (process ")
    assert leases(place, uri)[name]["run"] == "digits-2"


def test_a_removed_lease_is_lost(uri, clock, place):
    first = clock.acquire("digits-1")
    (name,) = leases(place, uri)
    place.remove(storage.join(uri, ".lock", name))
    assert lost(first.check).startswith(
        f"the lease of {uri} was deleted or replaced; run digits-1 stops"
    )


@pytest.mark.parametrize("damage", [b"not JSON", b'{"token": 1}'])
def test_an_unreadable_lease_blocks_nobody(uri, clock, place, damage, caplog):
    place.put(storage.join(uri, ".lock", "000004.json"), damage)
    clock.acquire("digits-2").check()
    assert list(leases(place, uri)) == ["000005.json"]
    assert f"taking over the lease of {uri}, because it cannot be read" in caplog.text


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
    assert storage.list_published(uri) == []
    assert storage.names(uri) == []


@pytest.mark.parametrize("place", ["gs", "s3"], indirect=True)
@pytest.mark.parametrize("kind", [503, "lose"])
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
    # The lease has expired, but its holder may still train without a connection to the store.
    assert remove_expired(late) == []
    old.time -= ABANDONED_SECONDS
    elsewhere = storage.join(place.root, "other", "checkpoints")
    old.acquire("digits-0", elsewhere)
    place.put(storage.join(elsewhere, ".lock", "000000.json"), b"{")
    removed = remove_expired(elsewhere)
    # A file that is not a lease is kept, because it may belong to another program.
    assert [storage.name_of(each) for each in removed] == ["000001.json"]
    assert holders(elsewhere) == {0: None}


@EVERY
def test_no_number_comes_twice(uri, clock):
    """If the first holder writes late, it does not replace another holder's file."""
    first = clock.acquire("digits-1")
    at = storage.join(uri, ".lock", "000001.json")
    late = storage.read_bytes(at)
    clock.time += LEASE_SECONDS + ABANDONED_SECONDS
    clock.acquire("digits-2").release()
    third = clock.acquire("digits-3")
    third.release()
    clock.time += LEASE_SECONDS + ABANDONED_SECONDS
    fourth = clock.acquire("digits-4")
    assert list(holders(uri)) == [4]
    storage.write_bytes(at, late)
    lost(first.check)
    fourth.check()
    fourth.renew()
    assert holders(uri)[4].run == "digits-4"


def test_who_was_overtaken_by_some_who_have_gone_counts_on(uri, clock, monkeypatch):
    """Between this job's read and write, two other jobs acquire and release the lease."""
    clock.acquire("digits-0").release()
    create = storage.create_bytes

    def late(at, data):
        monkeypatch.setattr(storage, "create_bytes", create)
        for run in ("digits-1", "digits-2"):
            clock.acquire(run).release()
        return create(at, data)

    monkeypatch.setattr(storage, "create_bytes", late)
    clock.acquire("digits-3").check()
    assert {number: each.run for number, each in holders(uri).items()} == {4: "digits-3"}


def test_what_was_given_back_stays_for_a_day(uri, clock):
    clock.acquire("digits-1").release()
    assert remove_expired(uri) == []
    assert len(holders(uri)) == 1
    old = Clock(storage.join(uri, "other"))
    old.time -= LEASE_SECONDS + ABANDONED_SECONDS
    old.acquire("digits-0").release()
    removed = remove_expired(old.uri)
    assert [storage.name_of(each) for each in removed] == ["000001.json"]


HOLD = """
import sys
from flotilla.trainer.cluster import lease
with lease.hold_lease(sys.argv[1], "digits-1"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def here(tmp_path):
    """Return the URI of a folder on this machine, which needs no requests to a store."""
    return storage.uri_of(tmp_path / "checkpoints")


def require_released(uri):
    (left,) = holders(uri).values()
    assert left.released
    Lease(uri, "digits-next").acquire()


def holding(uri, **variables):
    """Start a process that holds a lease until its input ends."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, uri],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_holder_that_was_killed_is_known_to_be_dead(here, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    with holding(here) as other:
        assert other.stdout.readline() == "held\n"
        line = refused(Lease(here, "digits-1").acquire)
        assert f"run digits-1 (process {other.pid} on " in line
        other.send_signal(signal.SIGKILL)
        other.wait()
        mine = Lease(here, "digits-1")
        mine.acquire()
    mine.check()
    assert "which has ended" in caplog.text
    (event,) = events.read(tmp_path / "events.jsonl")
    assert isinstance(event, events.LeaseTakenOver)
    assert event.reason == "has ended"


@pytest.mark.parametrize("where", ["another machine", "a system without process start times"])
def test_a_process_that_may_live_elsewhere_is_waited_for(here, monkeypatch, where):
    if where == "another machine":
        monkeypatch.setattr(lease, "writer", lambda: "another-boot.4026531836/1/77")
    else:
        monkeypatch.setattr(local, "_machine", lambda: "")
        assert local.writer() == ""
    Lease(here, "digits-1").acquire()
    refused(Lease(here, "digits-2").acquire)


def test_a_block_that_ends_releases_it_and_the_lease_stays_for_a_while(here):
    with holding(here) as other:
        assert other.stdout.readline() == "held\n"
        other.communicate("")
    assert remove_expired(here) == []
    require_released(here)


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt(), ZeroDivisionError()])
def test_a_block_that_fails_releases_it(here, error):
    with pytest.raises(type(error)), lease.hold_lease(here, "digits-1"):
        raise error
    require_released(here)


def test_an_attempt_that_begins_again_leaves_it_to_the_next_one(here, monkeypatch):
    monkeypatch.setenv(events.JOB, "job")
    with pytest.raises(ClusterLostError), lease.hold_lease(here, "digits-1"):
        raise ClusterLostError("a server is gone")
    assert len(holders(here)) == 1
    monkeypatch.setenv(events.JOB, "another")
    refused(Lease(here, "digits-2").acquire)
    monkeypatch.setenv(events.JOB, "job")
    with lease.hold_lease(here, "digits-1") as mine:
        mine.check()


def test_it_is_renewed_while_it_is_held(here, monkeypatch):
    written = threading.Event()
    write = storage.write_bytes

    def recorded(uri, data):
        write(uri, data)
        written.set()

    monkeypatch.setattr(storage, "write_bytes", recorded)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    with lease.hold_lease(here, "digits-1"):
        (began,) = holders(here).values()
        assert written.wait(60)
        (now,) = holders(here).values()
        assert now.renewed > began.renewed
        assert (now.token, now.started) == (began.token, began.started)


def test_an_unavailable_store_loses_no_lease(here, monkeypatch, caplog):
    tried = threading.Event()

    def away(uri, _data):
        if caplog.records:
            tried.set()
        raise storage.Unavailable(f"cannot write {uri}: away")

    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    with lease.hold_lease(here, "digits-1") as mine:
        monkeypatch.setattr(storage, "write_bytes", away)
        assert tried.wait(60)
        mine.require()
    assert "cannot renew the lease: cannot write" in caplog.text


def test_a_holder_that_lost_it_knows_after_a_renewal(here, monkeypatch):
    looked = threading.Event()
    monkeypatch.setattr(lease.log, "warning", lambda *_: looked.set())
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    with lease.hold_lease(here, "digits-1") as mine:
        # Delete the file between two renewals: a renewal in progress would write it again.
        with mine._mutex:
            for number in holders(here):
                storage.delete(lease_uri(here, number))
        assert looked.wait(60)
        assert "was deleted or replaced; run digits-1 stops writing" in lost(mine.require)


def test_leases_of_dead_processes_are_removed(here):
    with holding(here) as other:
        assert other.stdout.readline() == "held\n"
        assert remove_expired(here) == []
        other.kill()
        other.wait()
        assert len(remove_expired(here)) == 1
    assert holders(here) == {}


def test_all_tasks_that_a_process_starts_are_of_one_job():
    assert lease.lease_environment() == lease.lease_environment()
    assert list(lease.lease_environment()) == [events.JOB]
    assert lease.lease_environment()[events.JOB].startswith("launch ")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match="there is a file where a folder is expected"):
        Lease(storage.uri_of(tmp_path / "checkpoints"), "digits-1").acquire()

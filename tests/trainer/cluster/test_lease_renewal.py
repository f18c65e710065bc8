"""The lease of a checkpoint folder held by processes: renewed, released, left by dead ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.trainer.cluster.test_lease import lost, refused
from trainer import events, storage
from trainer.cluster import lease
from trainer.cluster.lease import Lease, holders, lease_uri, remove_expired
from trainer.errors import ClusterLostError, UserError
from trainer.storage import local

HOLD = """
import sys
from trainer.cluster import lease
with lease.held(sys.argv[1], "digits-1"):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def here(tmp_path):
    """A folder on this machine, where no store is asked for."""
    return storage.uri_of(tmp_path / "checkpoints")


def require_released(uri):
    """Require that the one lease of a folder is released, and can be acquired again."""
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


def test_a_dead_process_of_another_machine_is_waited_for(here, monkeypatch):
    monkeypatch.setattr(lease, "writer", lambda: "another-boot.4026531836/1/77")
    Lease(here, "digits-1").acquire()
    refused(Lease(here, "digits-2").acquire)


def test_a_system_without_process_start_times_waits_too(here, monkeypatch):
    monkeypatch.setattr(local, "_machine", lambda: "")
    assert local.writer() == ""
    Lease(here, "digits-1").acquire()
    refused(Lease(here, "digits-2").acquire)


def test_a_block_that_ends_releases_it(here):
    with holding(here) as other:
        assert other.stdout.readline() == "held\n"
        other.communicate("")
    require_released(here)


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt(), ZeroDivisionError()])
def test_a_block_that_fails_releases_it(here, error):
    with pytest.raises(type(error)), lease.held(here, "digits-1"):
        raise error
    require_released(here)


def test_an_attempt_that_begins_again_leaves_it_to_the_next_one(here, monkeypatch):
    monkeypatch.setenv(lease.VARIABLE, "job")
    with pytest.raises(ClusterLostError), lease.held(here, "digits-1"):
        raise ClusterLostError("a server is gone")
    assert len(holders(here)) == 1
    monkeypatch.setenv(lease.VARIABLE, "another")
    refused(Lease(here, "digits-2").acquire)
    monkeypatch.setenv(lease.VARIABLE, "job")
    with lease.held(here, "digits-1") as mine:
        mine.check()


def test_it_is_renewed_while_it_is_held(here, monkeypatch):
    written = threading.Event()
    write = storage.write_bytes

    def recorded(uri, data):
        write(uri, data)
        written.set()

    monkeypatch.setattr(storage, "write_bytes", recorded)
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    with lease.held(here, "digits-1"):
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
    with lease.held(here, "digits-1") as mine:
        monkeypatch.setattr(storage, "write_bytes", away)
        assert tried.wait(60)
        mine.require()
    assert "the lease is not renewed: cannot write" in caplog.text


def test_a_holder_that_lost_it_knows_after_a_renewal(here, monkeypatch):
    looked = threading.Event()
    monkeypatch.setattr(lease.log, "warning", lambda *_: looked.set())
    monkeypatch.setattr(lease, "RENEW_SECONDS", 0.01)
    with lease.held(here, "digits-1") as mine:
        # Between two renewals: one that has looked already would write it again.
        with mine._mutex:
            for number in holders(here):
                storage.delete(lease_uri(here, number))
        assert looked.wait(60)
        assert "is gone; run digits-1 stops writing" in lost(mine.require)


def test_leases_of_dead_processes_are_removed(here):
    with holding(here) as other:
        assert other.stdout.readline() == "held\n"
        assert remove_expired(here) == []
        other.kill()
        other.wait()
        assert len(remove_expired(here)) == 1
    assert holders(here) == {}


def test_leases_that_dead_processes_released_stay_for_a_while(here):
    with holding(here) as other:
        assert other.stdout.readline() == "held\n"
        other.communicate("")
    assert remove_expired(here) == []
    assert len(holders(here)) == 1


def test_all_tasks_that_a_process_starts_are_of_one_job():
    assert lease.lease_environment() == lease.lease_environment()
    assert list(lease.lease_environment()) == [lease.VARIABLE]
    assert lease.lease_environment()[lease.VARIABLE].startswith("launch ")


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(UserError, match="there is a file where a folder is needed"):
        Lease(storage.uri_of(tmp_path / "checkpoints"), "digits-1").acquire()

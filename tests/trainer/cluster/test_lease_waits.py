"""Tests a job that waits for a lease: until it expires, is released, or is renewed."""

import json
import signal
import subprocess
import sys
import time

import pytest

from flotilla.trainer import events, storage
from flotilla.trainer.cluster import lease
from flotilla.trainer.cluster.lease import (
    ABANDONED_SECONDS,
    LEASE_SECONDS,
    POLL_SECONDS,
    RENEW_SECONDS,
    WATCH_SECONDS,
    Lease,
    acquire_waiting,
    holders,
)
from tests.trainer.cluster.test_lease import lost, refused

ELSEWHERE = "another-boot.4026531836/1/77"
WAIT = """
import sys
from flotilla.trainer.cluster import lease
from flotilla.trainer.runtime.errors import RunInterruptedError
try:
    with lease.hold_lease(sys.argv[1], "digits-2"):
        print("held", flush=True)
except RunInterruptedError as error:
    print(error)
    sys.exit(error.exit_code)
"""


class Time:
    """A clock that advances only during waits; `then` maps seconds to actions."""

    def __init__(self, uri):
        self.uri = uri
        self.began = self.now = 1_800_000_000.0
        self.then = {}

    @property
    def waited(self):
        return self.now - self.began

    def lease(self, run, ahead=0.0):
        return Lease(self.uri, run, lambda: self.now + ahead)

    def pause(self, seconds):
        self.now += seconds
        for due in [each for each in self.then if each <= self.waited]:
            self.then.pop(due)()

    def acquired(self, run):
        wanted = self.lease(run)
        acquire_waiting(wanted.acquire, self.pause)
        return wanted


@pytest.fixture
def time_(tmp_path):
    return Time(storage.uri_of(tmp_path / "checkpoints"))


@pytest.fixture
def elsewhere(time_, monkeypatch):
    """Return a function that acquires the lease as a process of another machine."""

    def take(run, ahead=0.0):
        with monkeypatch.context() as patch:
            patch.setattr(lease, "writer", lambda: ELSEWHERE)
            held = time_.lease(run, ahead)
        held.acquire()
        return held

    return take


@pytest.fixture
def events_file(monkeypatch, tmp_path):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return tmp_path / "events.jsonl"


def test_a_holder_killed_elsewhere_is_waited_for_until_it_expires(
    time_, elsewhere, caplog, events_file
):
    dead = elsewhere("digits-1")
    again = time_.acquired("digits-1")
    assert LEASE_SECONDS < time_.waited <= LEASE_SECONDS + POLL_SECONDS
    again.check()
    (holder,) = holders(time_.uri).values()
    assert holder.started == holder.renewed == time_.now
    refused(time_.lease("digits-3").acquire)
    assert lost(dead.check).startswith("run digits-1 (process ")
    until = "2027-01-15 08:02:00 UTC"
    assert f"may be dead, but holds it until {until}" in caplog.text
    awaited, taken = events.read(events_file)
    assert isinstance(awaited, events.LeaseAwaited)
    assert awaited.until == until
    assert awaited.uri == time_.uri
    assert isinstance(taken, events.LeaseTakenOver)


def test_a_living_holder_of_this_machine_is_not_waited_for(time_):
    living = time_.lease("digits-1")
    living.acquire()
    refused(lambda: time_.acquired("digits-2"))
    assert time_.waited == 0
    living.check()


def test_a_lease_that_is_released_meanwhile_is_acquired_at_once(time_, elsewhere):
    time_.then[10] = elsewhere("digits-1").release
    time_.acquired("digits-2").check()
    assert [each.run for each in holders(time_.uri).values()] == ["digits-2"]
    assert 10 <= time_.waited <= 10 + POLL_SECONDS


def test_of_several_that_wait_one_acquires_it_and_the_others_fail(time_, elsewhere):
    elsewhere("digits-1")
    first = []
    days = 2 * ABANDONED_SECONDS
    time_.then[LEASE_SECONDS] = lambda: first.append(elsewhere("digits-2", ahead=days))
    assert "run digits-2" in refused(lambda: time_.acquired("digits-3"))
    first[0].check()


def test_a_holder_with_a_wrong_clock_is_not_waited_for_for_ever(time_, elsewhere):
    dead = elsewhere("digits-1", ahead=365 * 86400.0)
    time_.acquired("digits-2").check()
    assert LEASE_SECONDS < time_.waited <= LEASE_SECONDS + 2 * POLL_SECONDS
    assert lost(dead.check).startswith("run digits-2 (process ")


@pytest.mark.parametrize("hours", [0, 1, -1, 365 * 24])
def test_a_holder_that_renews_it_is_left_alone_whatever_its_clock(time_, elsewhere, hours):
    living = elsewhere("digits-1", ahead=hours * 3600.0)
    time_.then[RENEW_SECONDS] = living.renew
    assert "run digits-1" in refused(lambda: time_.acquired("digits-2"))
    assert RENEW_SECONDS <= time_.waited <= RENEW_SECONDS + POLL_SECONDS
    living.check()


def test_a_lease_that_has_expired_is_watched_for_two_renewals(time_, elsewhere, caplog):
    dead = elsewhere("digits-1", ahead=-3600.0)
    time_.acquired("digits-2").check()
    assert WATCH_SECONDS < time_.waited <= WATCH_SECONDS + POLL_SECONDS
    assert "may be dead" in caplog.text
    lost(dead.check)


def test_an_error_of_the_store_ends_the_wait(time_, elsewhere, monkeypatch):
    elsewhere("digits-1")

    def away(_uri):
        raise storage.Unavailable("away")

    time_.then[10] = lambda: monkeypatch.setattr(storage, "names", away)
    with pytest.raises(storage.Unavailable, match="away"):
        time_.acquired("digits-2")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_wait_can_be_interrupted(elsewhere, time_, number):
    time_.now = time.time()
    elsewhere("digits-1")
    before = [json.dumps(vars(each)) for each in holders(time_.uri).values()]
    with subprocess.Popen(
        [sys.executable, "-c", WAIT, time_.uri],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as waiting:
        assert "may be dead" in waiting.stderr.readline()
        waiting.send_signal(number)
        out, err = waiting.communicate(timeout=300)
    assert [json.dumps(vars(each)) for each in holders(time_.uri).values()] == before
    assert (waiting.returncode, err) == (130, "")
    assert out.startswith("interrupted; run digits-1 (process ")
    assert out.endswith(f" may still hold the lease of {time_.uri}\n")

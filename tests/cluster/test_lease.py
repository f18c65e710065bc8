"""Tests that a checkpoint folder has only one writer, even with several real launchers."""

import json
import signal
import time

import psutil
import pytest

from flotilla.trainer import storage
from flotilla.trainer.cluster import lease
from flotilla.trainer.cluster.lease import lease_uri
from flotilla.trainer.events import AttemptBegin, LeaseAwaited, LeaseTakenOver, Restart
from tests.cluster.launched import SECONDS, launched, run_to_end, sections

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

EVERY = 200
STEPS = 2000
SETTINGS = sections(STEPS, EVERY, workers=1, max_restarts=3)
ENDLESS = {"training": {**SETTINGS["training"], "strategy": "single", "steps": 10**7}}


def kill_all(run):
    """Kill a launcher, and wait until its tasks, which could still write, have also ended."""
    tasks = run.tasks()
    run.process.kill()
    run.process.wait()
    assert not psutil.wait_procs(tasks, timeout=SECONDS)[1]


def holders(run):
    return list(lease.holders(run.checkpoints).values())


def content(run):
    folder = storage.local_path(run.checkpoints)
    return {path: path.stat().st_mtime_ns for path in folder.rglob("step-*/*")}


@pytest.mark.long
def test_a_second_launcher_is_refused_and_the_first_one_goes_on(dataset, tmp_path):
    with launched(ENDLESS, dataset, tmp_path / "first") as run:
        run.wait_for_step(50)
        (holder,) = holders(run)
        assert holder.process == run.task("chief-0").pid
        with launched(SETTINGS, dataset, tmp_path / "second", run.checkpoints) as second:
            code, said = second.end()
        assert code == 1
        words, _, where = said.rstrip("\n").rpartition(" (chief-0, log ")
        assert where.startswith(str(tmp_path / "second"))
        assert words.startswith(
            f"run first (process {holder.process} on {holder.host}) has been writing"
        )
        assert words.endswith("try again after that time")
        assert not second.seen[1:]
        run.process.send_signal(signal.SIGINT)
        code, said = run.end()
    assert code == 130, said
    assert len(run.events(AttemptBegin)) == 1
    assert [each.released for each in holders(run)] == [True]
    run_to_end(SETTINGS, dataset, tmp_path / "third", run.checkpoints)


def left_elsewhere(run):
    """Make a dead holder's lease look like one from another machine; return its URI."""
    (number,) = lease.holders(run.checkpoints)
    place = lease_uri(run.checkpoints, number)
    left = json.loads(storage.read_bytes(place))
    # Even on a busy machine, the lease must not expire during the test.
    other = {"writer": "another-boot.1/1/77", "renewed": time.time() + 600}
    storage.write_bytes(place, json.dumps({**left, **other}).encode())
    return place


@pytest.mark.parametrize(
    "is_elsewhere", [False, pytest.param(True, marks=pytest.mark.long)], ids=["here", "elsewhere"]
)
def test_after_a_kill_the_next_launcher_waits_only_for_a_lease_of_another_machine(
    dataset, tmp_path, is_elsewhere
):
    with launched(ENDLESS, dataset, tmp_path / "run") as run:
        run.wait_for_step(EVERY + 50)
        kill_all(run)
    assert len(holders(run)) == 1
    reached = run.newest()
    place = left_elsewhere(run) if is_elsewhere else ""
    steps = {"training": {**ENDLESS["training"], "steps": reached + 100}}
    with launched(steps, dataset, tmp_path / "run") as again:
        if is_elsewhere:
            again.wait_for(lambda event: isinstance(event, LeaseAwaited))
            storage.delete(place)
        attempt = again.wait_for(lambda event: isinstance(event, AttemptBegin))
        code, said = again.end()
    assert code == 0, said
    assert attempt.global_step == reached
    assert again.events(Restart) == []
    taken = [each.reason for each in again.events(LeaseTakenOver)]
    assert taken == ([] if is_elsewhere else ["has ended"])
    assert [each.released for each in holders(again)] == [True]


def test_a_job_that_loses_the_lease_stops_writing_with_one_line(dataset, tmp_path):
    with launched(ENDLESS, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 50)
        (holder,) = holders(run)
        (number,) = lease.holders(run.checkpoints)
        place = lease_uri(run.checkpoints, number)
        later = json.loads(storage.read_bytes(place)) | {"run": "later", "token": "1", "job": ""}
        storage.write_bytes(lease_uri(run.checkpoints, number + 1), json.dumps(later).encode())
        before = content(run)
        code, said = run.end()
    assert code == 1
    assert f"run later (process {holder.process}" in said
    assert f"; run {tmp_path.name} stops writing: " in said
    assert run.events(Restart) == []
    # Only the checkpoint that the job was writing when it lost the lease may be new.
    assert len({path.parent for path in content(run)} - {path.parent for path in before}) <= 1
    assert [each.run for each in holders(run) if each.token == "1"] == ["later"]

"""Tests that workers without a chief begin each attempt together, from the same checkpoint."""

import pytest

from flotilla.trainer.config.topology import Task
from flotilla.trainer.program.link import Attempts
from flotilla.trainer.runtime.errors import ClusterLostError
from tests.trainer.program.runs import COUNT, make_job

LEADER, OTHER = Task(role="worker", index=0), Task(role="worker", index=1)


class Waited(Exception):  # noqa: N818
    """Raised when the task would wait."""


def wait(_seconds):
    raise Waited


@pytest.fixture
def job(tmp_path):
    return make_job(tmp_path, COUNT, roles={"worker": 2})


def enter(job):
    """Return a worker that has written its ticket and waits."""
    worker = Attempts(job, OTHER, [])
    with pytest.raises(Waited):
        worker.join(wait)
    return worker


def rejoin(worker):
    """Let the waiting worker read the current attempt, and return it."""
    worker.current = worker._read()
    return worker.current


def test_an_attempt_begins_when_all_wait_for_it(job):
    leader = Attempts(job, LEADER, [OTHER])
    with pytest.raises(Waited):
        leader.lead("uri", wait)
    worker = enter(job)
    begun = leader.lead("uri", wait)
    assert (begun.checkpoint, list(begun.tickets)) == ("uri", ["worker-1"])
    assert rejoin(worker) == begun
    leader.check()
    worker.check()


def test_a_worker_that_starts_again_ends_the_attempt(job):
    leader = Attempts(job, LEADER, [OTHER])
    worker = enter(job)
    first = leader.lead("a", wait)
    rejoin(worker)
    late = enter(job)
    with pytest.raises(ClusterLostError, match="worker-1 was restarted"):
        leader.check()
    second = Attempts(job, LEADER, [OTHER]).lead("b", wait)
    assert second.number == first.number + 1
    assert rejoin(late).checkpoint == "b"
    with pytest.raises(ClusterLostError, match="a new attempt has begun"):
        worker.check()


def test_a_leader_that_starts_again_waits_for_new_tickets(job):
    worker = enter(job)
    Attempts(job, LEADER, [OTHER]).lead("a", wait)
    rejoin(worker)
    leader = Attempts(job, LEADER, [OTHER])
    with pytest.raises(Waited):
        leader.lead("a", wait)
    with pytest.raises(ClusterLostError):
        worker.check()


def test_a_leader_alone_counts_its_attempts(job):
    assert [Attempts(job, LEADER, []).lead("", wait).number for _ in range(2)] == [1, 2]

"""Tests the socket between agent and guard, and that workers begin each attempt together."""

from pathlib import Path

import pytest

from flotilla.trainer.config.topology import Task
from flotilla.trainer.program import guard
from flotilla.trainer.program.link import GUARD_FILE, MOST_LINES, Attempts, Link
from flotilla.trainer.runtime.errors import ClusterLostError
from tests.trainer.program.runs import COUNT, make_job


def test_a_guard_connects_says_what_happens_and_ends(tmp_path):
    folder = tmp_path / ("a" * 100)
    link = Link(folder)
    assert (folder / GUARD_FILE).read_bytes() == Path(guard.__file__).read_bytes()
    child = link.start_guard({"PATH": "/usr/bin:/bin"}, str(tmp_path))
    try:
        assert link.receive(30)["is"] == "ready"
        link.send(do="start", attempt=1, command=["echo", "hello"], cwd="", env={})
        found = [link.receive(30)]
        while found[-1]["is"] != "ended":
            found.append(link.receive(30))
        assert found[-1]["last"] == ["hello"]
        link.wake()
        assert link.receive(30) == {"is": "wake"}
        link.send(do="exit", code=4, message="")
        assert link.receive(30) == {"is": "gone"}
        assert child.wait(30) == 4
    finally:
        link.close()
        child.wait(30)
    assert link.receive(0.01) is None
    assert not (folder / guard.SOCKET).exists()


def test_of_many_lines_the_newest_are_kept_and_the_end_too(tmp_path):
    link = Link(tmp_path)
    lines = [{"is": "line", "text": str(n), "time": 0} for n in range(MOST_LINES + 3)]
    end = {"is": "ended", "attempt": 1, "code": 0, "last": []}
    for each in (*lines, end):
        link.put(each)
    assert [link.receive(0) for _ in range(MOST_LINES + 1)] == [*lines[3:], end]
    assert link.receive(0) is None
    link.close()


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

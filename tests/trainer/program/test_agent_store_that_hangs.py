"""Tests that an object store that hangs delays neither a program's progress nor its end."""

import json
import queue
import subprocess
import sys
import threading

import pytest

from flotilla.trainer import events, storage
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.program import guard
from flotilla.trainer.program.agent import Agent
from flotilla.trainer.program.link import GUARD_FILE
from flotilla.trainer.runtime.errors import INTERRUPTED
from tests.trainer.program.runs import COUNTS, make_job

# A program that reports a step for every character in a file, until it receives SIGTERM.
FOLLOWS = (
    COUNTS
    + """
save(1)
while True:
    for step in range(step + 1, 1 + len(open(sys.argv[1]).read())):
        print(json.dumps({"step": step}))
    time.sleep(0.05)
"""
)
CHIEF = Task(role="chief", index=0)


@pytest.fixture
def job(tmp_path):
    (tmp_path / "steps").write_text("a")
    return make_job(tmp_path, FOLLOWS, str(tmp_path / "steps"))


@pytest.fixture
def store(monkeypatch):
    """Make publishing hang until the test ends; return an event that is set when it begins."""
    publish, begun, answers = storage.publish, threading.Event(), threading.Event()

    def hang(*args, **more):
        begun.set()
        answers.wait(60)
        return publish(*args, **more)

    monkeypatch.setattr(storage, "publish", hang)
    yield begun
    answers.set()


def test_progress_and_a_stop_do_not_wait_for_it(tmp_path, job, store):
    # pytest creates `job` before `store`, so that the dataset of the job can be published.
    agent = Agent(job, Cluster(addresses={"chief": ("a:1",)}), CHIEF, grace=1)
    seen = queue.SimpleQueue()
    exchange, end = job.workdir / "exchange", tmp_path / "end.txt"
    with events.listen(seen.put):
        thread = threading.Thread(target=lambda: seen.put(agent.run()))
        thread.start()
        ready = threading.Event()
        while not (exchange / guard.SOCKET).exists():
            ready.wait(0.01)
        words = ["--socket", exchange / guard.SOCKET, "--termination", end]
        child = subprocess.Popen([sys.executable, "-IS", exchange / GUARD_FILE, *words])
        assert store.wait(30)
        (tmp_path / "steps").write_text("abc")
        while not (
            isinstance(found := seen.get(timeout=30), events.Progress) and found.global_step == 3
        ):
            pass
        agent.stop("asked")
        while (code := seen.get(timeout=30)) != INTERRUPTED:
            assert not isinstance(code, int)
    assert child.wait(30) == INTERRUPTED
    thread.join(30)
    said = end.read_text()
    assert "asked; interrupted; the last checkpoint was not published and exists only in " in said
    assert "the object store does not respond" in said
    assert json.dumps(said).count("\\n") == 1

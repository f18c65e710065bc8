"""Which kills the local cluster survives, and what is left where it does not."""

from __future__ import annotations

import signal

import psutil
import pytest

from tests.cluster.launched import SECONDS, Launched, launched
from trainer.events import AttemptBegin, Progress, Restart, TaskFailed
from trainer.training.journal import MAX_ROWS

pytestmark = pytest.mark.cluster

EVERY = 200
# No more: of a longer run the history has no row for every step it may be interrupted at.
STEPS = MAX_ROWS
SETTINGS = {
    "training": {"steps": STEPS, "checkpoint_every": EVERY, "validate_every": 0},
    "cluster": {"parameter_servers": 1, "workers": 2, "max_restarts": 3},
}


def applied(run: Launched) -> int:
    """Return the updates that were applied over all attempts, repeated ones counted each time."""
    total, reached = 0, 0
    for event in run.seen:
        if isinstance(event, AttemptBegin):
            reached = event.global_step
        if isinstance(event, Progress):
            total += event.global_step - reached
            reached = event.global_step
    return total


# More than any machine does before it is interrupted.
ENDLESS = {**SETTINGS, "training": {**SETTINGS["training"], "steps": 10**7}}


@pytest.fixture
def running(dataset, tmp_path):
    with launched(SETTINGS, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 50)
        yield run


@pytest.fixture
def endless(dataset, tmp_path):
    with launched(ENDLESS, dataset, tmp_path) as run:
        run.wait_for_step(EVERY + 50)
        yield run


@pytest.mark.slow
def test_a_killed_worker_is_started_again_and_training_goes_on(running):
    running.kill("worker-1")
    code, said = running.end()
    assert code == 0, said
    assert [e.task for e in running.events(Restart)] == ["worker-1"]
    assert running.events(Restart)[0].cause == "signal SIGKILL"
    assert len(running.events(AttemptBegin)) == 1
    # One that was under way on the server when its worker died may count as well.
    assert STEPS <= running.newest() <= STEPS + 1


@pytest.mark.slow
def test_a_killed_parameter_server_costs_at_most_the_steps_since_a_checkpoint(running):
    running.kill("ps-0")
    code, said = running.end()
    assert code == 0, said
    assert running.events(AttemptBegin)[-1].global_step % EVERY == 0
    assert running.newest() == STEPS
    assert applied(running) - STEPS <= EVERY


@pytest.mark.slow
def test_a_killed_chief_begins_a_new_attempt_on_the_same_servers(running):
    servers = {name: running.task(name).pid for name in ("ps-0", "worker-0", "worker-1")}
    running.kill("chief-0")
    running.wait_for(lambda event: isinstance(event, AttemptBegin))
    assert servers == {name: running.task(name).pid for name in servers}
    code, said = running.end()
    assert code == 0, said
    assert [e.task for e in running.events(Restart)] == ["chief-0"]
    assert running.newest() == STEPS
    assert applied(running) - STEPS <= EVERY


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_an_interrupt_publishes_a_last_checkpoint(running, number):
    tasks = running.tasks()
    running.process.send_signal(number)
    code, said = running.end()
    assert code == 130
    newest = running.newest()
    assert said == (
        f"interrupted at global step {newest}; checkpoint {running.checkpoints}/step-{newest:08d}\n"
    )
    assert newest == running.history()[-1]["global_step"]
    _, alive = psutil.wait_procs(tasks, timeout=SECONDS)
    assert not alive


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once(endless):
    tasks = endless.tasks()
    endless.task("chief-0").send_signal(signal.SIGSTOP)
    endless.process.send_signal(signal.SIGINT)
    endless.process.send_signal(signal.SIGTERM)
    code, said = endless.end()
    assert code == 130
    assert "interrupted" in said
    _, alive = psutil.wait_procs(tasks, timeout=SECONDS)
    assert not alive


@pytest.mark.slow
def test_no_task_outlives_a_launcher_that_is_killed(endless):
    tasks = endless.tasks()
    assert len(tasks) == 4
    endless.task("worker-0").send_signal(signal.SIGSTOP)
    endless.process.kill()
    endless.process.wait()
    _, alive = psutil.wait_procs(tasks, timeout=SECONDS)
    assert not alive
    assert endless.newest() % EVERY == 0


@pytest.mark.slow
def test_past_the_limit_of_restarts_the_task_and_its_end_are_named(dataset, tmp_path):
    cluster = {**SETTINGS["cluster"], "max_restarts": 0}
    with launched({**SETTINGS, "cluster": cluster}, dataset, tmp_path) as run:
        run.wait_for_step(50)
        tasks = run.tasks()
        run.kill("worker-0")
        code, said = run.end()
    assert code == 1
    assert said.startswith("worker-0 ended with signal SIGKILL and cluster.max_restarts (0)")
    log = str(tmp_path / "cluster" / "worker-0" / "log.txt")
    assert log in said
    (failed,) = run.events(TaskFailed)
    assert (failed.task, failed.cause) == ("worker-0", "signal SIGKILL")
    assert failed.log == log
    assert failed.last_lines[-1] in said
    _, alive = psutil.wait_procs(tasks, timeout=SECONDS)
    assert not alive

"""Tests which exits of tasks the supervisor accepts. The tasks are shell scripts."""

from unittest.mock import create_autospec

import pytest

from flotilla.trainer import events
from flotilla.trainer.cluster import local
from flotilla.trainer.cluster.launcher import record_end
from flotilla.trainer.cluster.local import EvaluatorSupervision, ServerMemory, Supervisor
from flotilla.trainer.cluster.process import TaskProcess
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.cluster.test_launcher import job_of, publish

CLUSTER = Cluster(addresses=dict.fromkeys(("chief", "ps", "worker"), ("localhost:1",)))
CHIEF, PS, WORKER = (Task(role=role, index=0) for role in ("chief", "ps", "worker"))
FOR_EVER = "sleep 600"


class Scripted(TaskProcess):
    """A task that runs a shell script."""

    def __init__(self, job, task, script):
        super().__init__(job, CLUSTER, task)
        self._script = script

    def _command(self):
        return ["sh", "-c", self._script]


@pytest.fixture
def job(tmp_path):
    made = job_of(tmp_path)
    publish(made, 10)
    return made


def supervise(job, leader, **others):
    processes = [Scripted(job, Task(role=role, index=0), script) for role, script in others.items()]
    evaluator = EvaluatorSupervision(None)
    Supervisor(job, Scripted(job, CHIEF, leader), processes, evaluator).run()


@pytest.mark.parametrize(
    ("leader", "others", "named"),
    [
        ("exit 0", {}, CHIEF),
        ("exit 0", {"ps": FOR_EVER, "worker": FOR_EVER}, CHIEF),
        (FOR_EVER, {"ps": FOR_EVER, "worker": "exit 0"}, WORKER),
        (FOR_EVER, {"ps": "exit 0", "worker": FOR_EVER}, PS),
    ],
)
def test_exit_code_0_before_the_end_fails_the_run(job, leader, others, named):
    with pytest.raises(UserError) as caught:
        supervise(job, leader, **others)
    log = job.workdir / str(named) / "log.txt"
    assert str(caught.value).startswith(
        f"{named} (log {log}) ended with exit code 0 before training was complete: "
    )


def test_a_permanent_failure_is_reported_and_not_begun_again(job, monkeypatch):
    seen = []
    monkeypatch.setattr(events, "emit", seen.append)
    message = "model x: SystemExit: 0 (x.py:1)"
    script = f"echo 'flotilla: {message}'; echo '{message}' > termination.txt; exit 2"
    with pytest.raises(ConfigError) as caught:
        supervise(job, script, ps=FOR_EVER)
    log = job.workdir / "chief-0" / "log.txt"
    assert str(caught.value) == f"{message} (chief-0, log {log})"
    assert seen == [
        events.TaskFailed(
            task="chief-0", cause="exit code 2", log=str(log), last_lines=(f"flotilla: {message}",)
        )
    ]


def test_a_leader_with_the_record_is_done(job):
    record_end(job, publish(job, 20))
    supervise(job, "exit 0", ps=FOR_EVER)


def test_a_leader_that_dies_after_another_has_left_at_the_end_is_done(job, tmp_path, monkeypatch):
    record_end(job, publish(job, 20))
    require, left = local.require_end, tmp_path / "left"

    def noted(*given):
        require(*given)
        left.touch()

    monkeypatch.setattr(local, "require_end", noted)
    leader = f"while ! test -e {left}; do sleep 0.01; done; kill -9 $$"
    supervise(job, leader, worker="exit 0")


@pytest.mark.parametrize(("sizes", "waits"), [([7, 7], 1), ([7, 8, 9, 9], 3)])
def test_an_evaluator_that_logs_evaluations_is_awaited(job, monkeypatch, sizes, waits):
    monkeypatch.setattr(local, "EVALUATION_SECONDS", 0)
    record_end(job, publish(job, 20))
    evaluator = create_autospec(EvaluatorSupervision, instance=True, running=True)
    evaluator.begin.return_value = None
    evaluator.log_bytes.side_effect = sizes
    Supervisor(job, Scripted(job, CHIEF, "exit 0"), [], evaluator).run()
    assert evaluator.log_bytes.call_count == waits + 1
    evaluator.give_up.assert_called_once_with("no checkpoint was evaluated for 0 s")


def test_an_evaluator_that_cannot_start_is_left_behind(job, monkeypatch):
    seen = []
    monkeypatch.setattr(events, "emit", seen.append)
    record_end(job, publish(job, 20))
    (job.workdir / "evaluator-0").write_text("a file where its folder should be")
    evaluator = EvaluatorSupervision(Scripted(job, local.EVALUATOR, FOR_EVER))
    Supervisor(job, Scripted(job, CHIEF, "exit 0"), [], evaluator).run()
    reason = f"cannot write to {job.workdir / 'evaluator-0'}: File exists"
    assert seen == [events.EvaluatorLeft(reason=reason)]


MB = 1 << 20


def process(role, started_at):
    made = create_autospec(TaskProcess, instance=True)
    made.task = Task(role=role, index=0)
    made.started_at = started_at
    return made


def restarted_after(sizes, *, started_at=1.0):
    """Return the attempts after which a server with these memory sizes, in MB, is restarted."""
    memory = ServerMemory()
    chief, server = process("chief", 2.0), process("worker", started_at)
    restarted = []
    for attempt, size in enumerate(sizes, start=1):
        server.resident_bytes.return_value = size * MB
        server.kill_grown.reset_mock()
        memory.restart_grown(chief, [server])
        if server.kill_grown.called:
            assert server.kill_grown.call_args.args == (sizes[0] * MB, size * MB)
            restarted.append(attempt)
    return restarted


@pytest.mark.parametrize(
    ("sizes", "restarted"),
    [
        ([400], []),
        ([400, 400, 401, 399], []),
        # If the next attempt grew as much as the second one did, it would exceed twice the initial
        # size.
        ([400, 610], [2]),
        ([400, 900], [2]),
        ([400, 500, 600, 710], [4]),
        ([400, 700, 410, 700], [2, 4]),
        ([0, 0], []),
    ],
)
def test_a_server_that_another_attempt_would_make_too_large_is_restarted(sizes, restarted):
    assert restarted_after(sizes) == restarted


def test_a_server_without_a_whole_attempt_is_not_judged():
    assert restarted_after([100, 400, 900], started_at=3.0) == []

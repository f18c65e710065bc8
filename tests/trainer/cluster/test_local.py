"""Tests the local launcher: relayed logs, ports, and which exits of tasks it accepts."""

import errno
import json
import logging
import socket
import threading
from contextlib import ExitStack
from unittest.mock import create_autospec

import pytest

from flotilla.trainer import events
from flotilla.trainer.cluster import local
from flotilla.trainer.cluster.launcher import Job, record_end
from flotilla.trainer.cluster.lease import lease_environment
from flotilla.trainer.cluster.local import (
    HOST,
    EvaluatorSupervision,
    ServerMemory,
    Supervisor,
    TaskLogs,
    relay_logs,
    reserve_cluster,
)
from flotilla.trainer.cluster.process import TaskProcess
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Cluster, Task, check_port
from flotilla.trainer.events import CheckpointPublished, UserCodeFailed
from flotilla.trainer.runtime.errors import ConfigError, UserError
from tests.trainer.cluster.test_launcher import job_of, publish
from tests.trainer.events.test_progress_lines import progress


def write(workdir, task, text):
    folder = workdir / task
    folder.mkdir(exist_ok=True)
    with (folder / "log.txt").open("a", encoding="utf-8") as log:
        log.write(text)


class Lines(list[str]):
    def put(self, task, line):
        self.append(f"{task} {line}")

    def taken(self):
        found = list(self)
        self.clear()
        return found


@pytest.fixture
def lines():
    return Lines()


@pytest.fixture
def event_line():
    own = lease_environment()[events.JOB]

    def line(event, job=own):
        text = json.dumps({**events.to_tree(event), "job": job})
        return f"2026-01-01 00:00:00,000 INFO {text}\n"

    return line


def test_lines_have_the_name_of_their_task_and_events_are_words(
    tmp_path, lines, caplog, event_line
):
    caplog.set_level(logging.INFO)
    logs = TaskLogs(tmp_path, lines.put)
    write(tmp_path, "chief-0", "loading\n" + event_line(progress(20, 1.0)))
    write(tmp_path, "worker-0", event_line(CheckpointPublished(uri="u", global_step=5)))
    logs.take()
    assert lines.taken() == ["chief-0 loading"]
    assert caplog.messages == [
        "global step 20/300  loss 0.25  100 steps/s",
        "checkpoint of global step 5: u",
    ]


def test_what_a_text_of_the_data_says_that_is_printed_is_no_event(
    tmp_path, lines, caplog, event_line
):
    caplog.set_level(logging.INFO)
    logs = TaskLogs(tmp_path, lines.put)
    for job in ("", "launch 0123456789abcdef"):
        write(tmp_path, "chief-0", event_line(progress(20, 1.0), job))
    logs.take()
    assert not caplog.messages
    assert len(lines) == 2


def test_a_line_is_taken_once_and_when_it_is_complete(tmp_path, lines):
    logs = TaskLogs(tmp_path, lines.put)
    write(tmp_path, "ps-0", "one\ntw")
    logs.take()
    assert lines.taken() == ["ps-0 one"]
    write(tmp_path, "ps-0", "o\n")
    logs.take()
    logs.take()
    assert lines.taken() == ["ps-0 two"]


def test_what_an_earlier_attempt_has_left_is_not_repeated(tmp_path, lines):
    write(tmp_path, "ps-0", "before\n")
    logs = TaskLogs(tmp_path, lines.put)
    write(tmp_path, "ps-0", "now\n")
    logs.take()
    assert lines.taken() == ["ps-0 now"]


def test_lines_come_while_the_block_runs_and_the_rest_at_its_end(tmp_path, monkeypatch, lines):
    seen = threading.Event()
    take = TaskLogs.take

    def taken(self):
        take(self)
        if lines:
            seen.set()

    monkeypatch.setattr(TaskLogs, "take", taken)
    with relay_logs(tmp_path, lines.put):
        write(tmp_path, "chief-0", "running\n")
        assert seen.wait(60)
        assert lines.taken() == ["chief-0 running"]
        write(tmp_path, "chief-0", "ended\n")
    assert lines.taken() == ["chief-0 ended"]


def test_the_traceback_of_the_users_code_reaches_the_error_of_the_step(tmp_path, lines, event_line):
    def fail():
        with relay_logs(tmp_path, lines.put):
            failed = UserCodeFailed(error="bad", traceback="Traceback: blocks.py")
            write(tmp_path, "chief-0", event_line(failed))
            raise UserError("bad")

    with pytest.raises(UserError, match="bad") as caught:
        fail()
    assert caught.value.traceback == "Traceback: blocks.py"


# A role may have no tasks.
TASKS = {"chief": 1, "ps": 2, "worker": 3, "evaluator": 0}


def ports(cluster):
    return [int(each.rpartition(":")[2]) for hosts in cluster.spec().values() for each in hosts]


def bound(port, *, reuse):
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse))
    try:
        held.bind((HOST, port))
    except OSError:
        held.close()
        raise
    return held


def test_a_task_may_serve_on_its_port_and_again_after_it_died():
    with reserve_cluster({"ps": 1}) as cluster:
        (port,) = ports(cluster)
        # Nobody listens on a port before its task does.
        with socket.socket() as client:
            assert client.connect_ex((HOST, port)) == errno.ECONNREFUSED
        for _ in range(2):
            check_port(cluster, Task(role="ps", index=0))
            with bound(port, reuse=True) as server:
                server.listen()
                with socket.create_connection((HOST, port)) as client:
                    accepted, _ = server.accept()
                    accepted.close()
                    assert client.recv(1) == b""


def test_every_task_of_each_cluster_has_a_port_of_its_own_on_loopback():
    with ExitStack() as stack:
        clusters = [stack.enter_context(reserve_cluster(TASKS)) for _ in range(20)]
        assert {role: clusters[0].count(role) for role in TASKS} == TASKS
        hosts = [each for cluster in clusters for held in cluster.spec().values() for each in held]
        assert all(each.startswith(HOST) for each in hosts)
        assert len(set(hosts)) == len(hosts) == 120


def test_who_asks_for_any_port_gets_another_one():
    with reserve_cluster(TASKS) as cluster, ExitStack() as stack:
        given = {stack.enter_context(bound(0, reuse=False)).getsockname()[1] for _ in range(200)}
        assert not given & set(ports(cluster))


def test_a_held_port_is_refused_to_who_does_not_share_and_free_afterwards():
    with reserve_cluster({"ps": 1}) as cluster:
        (port,) = ports(cluster)
        with pytest.raises(OSError, match="Address already in use"):
            bound(port, reuse=False)
    bound(port, reuse=False).close()


def test_the_ports_are_free_after_an_error():
    def fail():
        with reserve_cluster({"ps": 1}) as cluster:
            found.extend(ports(cluster))
            raise ValueError("the cluster did not start")

    found = []
    with pytest.raises(ValueError, match="did not start"):
        fail()
    bound(found[0], reuse=False).close()


def test_only_a_chief_joins_running_servers(tmp_path, monkeypatch):
    config = parse_config({"cluster": {"existing_servers": True}})
    job = Job(config=config, dataset="", checkpoints="file:///run/checkpoints", workdir=tmp_path)
    with reserve_cluster({"chief": 1, "ps": 1, "worker": 2}) as cluster:
        monkeypatch.setenv("TF_CONFIG", cluster.tf_config(Task(role="ps", index=0)))
        with pytest.raises(ConfigError) as caught:
            local.launch(job)
    assert str(caught.value) == (
        "cluster.existing_servers: TF_CONFIG describes the task ps-0, but only a chief can join "
        "running servers; set task in TF_CONFIG to the chief"
    )
    assert not list(tmp_path.iterdir())


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

"""Tests that each log line of a task is relayed once, and that each task has its own port."""

import errno
import json
import logging
import socket
import threading
from contextlib import ExitStack

import pytest

from flotilla.trainer import events
from flotilla.trainer.cluster import local
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.cluster.lease import lease_environment
from flotilla.trainer.cluster.local import HOST, TaskLogs, relay_logs, reserve_cluster
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.topology import Task, check_port
from flotilla.trainer.events import CheckpointPublished, UserCodeFailed
from flotilla.trainer.runtime.errors import ConfigError, UserError
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

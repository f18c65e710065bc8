"""Tests that each log line is read exactly once, even if timestamps repeat or a stream breaks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flotilla.components.kubernetes import logs
from flotilla.components.kubernetes.client import Api, connect
from flotilla.components.kubernetes.logs import EventRelay, LogPosition, Logs
from flotilla.components.kubernetes.pods.template import Place
from flotilla.components.kubernetes.tfjob import TFJobs
from flotilla.trainer import events
from flotilla.trainer.config.topology import Task
from tests.components.kubernetes.attempts import job_of, settings
from tests.kubernetes import pods
from tests.kubernetes.cluster import NAMESPACE
from tests.kubernetes.logs import stamp

BEGIN = 1_760_000_000 * 10**9


@given(
    steps=st.lists(st.sampled_from([0, 1, 999_999_999, 10**9]), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=5).map(sorted),
)
def test_a_position_takes_each_line_once(steps, cuts):
    at, lines = BEGIN, []
    for number, step in enumerate(steps):
        at += step
        lines.append((at, f"{number}"))
    position, taken = LogPosition(), []
    for cut in [*cuts, len(lines)]:
        since = position.begin_request()[:19]
        repeated = [each for each in lines[:cut] if stamp(each[0])[:19] >= since]
        for time, text in repeated:
            new = position.take(f"{stamp(time)} {text}")
            taken += [] if new is None else [new]
    assert taken == [text for _, text in lines]


def test_a_clock_that_is_set_back_loses_no_line():
    position = LogPosition()
    position.begin_request()
    times = ["2026-01-01T00:00:05.5Z", "2026-01-01T00:00:04.25Z", "2026-01-01T00:00:04.3Z"]
    assert [position.take(f"{time} x") for time in times] == ["x", "x", "x"]


def test_times_without_trailing_zeros_are_compared_as_times():
    position = LogPosition()
    position.begin_request()
    assert position.take("2026-01-01T00:00:05.1Z one") == "one"
    position.begin_request()
    assert position.take("2026-01-01T00:00:05.1Z one") is None
    assert position.take("2026-01-01T00:00:05.12Z two") == "two"


@pytest.fixture
def read(kube, monkeypatch):
    """Create a job with running pods; yield its log followers and the lines that they read."""
    monkeypatch.setattr(logs, "_RETRY_SECONDS", 0.05)
    tree = TFJobs().manifest(job_of(settings()), Place(namespace=NAMESPACE))
    kube.store.create("tfjobs", NAMESPACE, tree)
    kube.run_all()
    lines = []

    def sink(task, text):
        with kube.store.changed:
            lines.append(f"{task} {text}")
            kube.store.changed.notify_all()

    followed = Logs(Api(connect(), NAMESPACE), sink)
    yield followed, lines
    followed.stop()


def test_each_line_comes_once_across_broken_connections(kube, read):
    followed, lines = read
    followed.follow(kube.pod("chief-0"))
    for number in range(20):
        with kube.store.changed:
            kube.write_log("chief-0", f"line {number}")
            kube.server.drop_streams()
        kube.store.wait(lambda number=number: len(lines) > number)
    kube.finish("chief-0", 0)
    followed.drain(10)
    assert lines == [f"chief-0 line {number}" for number in range(20)]


def test_the_last_lines_before_a_restart_in_place_are_not_lost(kube, read):
    followed, lines = read
    pod = kube.pod("worker-0")
    uid = pod["metadata"]["uid"]
    kube.faults.add("GET .*/log", 503, times=2)
    followed.follow(pod)
    kube.server.logs.write(uid, 0, "dying")
    kube.server.logs.end(uid, 0)
    again = pods.restarted(kube.store, pod, 137)
    kube.server.logs.write(uid, 1, "again")
    followed.follow(again)
    kube.store.wait(lambda: len(lines) == 2)
    assert sorted(lines) == ["worker-0 again", "worker-0 dying"]


def test_a_lost_log_is_said_and_is_no_line_of_the_task(kube, read, caplog):
    followed, lines = read
    pod = kube.finish("chief-0", 0)
    kube.server.logs.lose(pod["metadata"]["uid"], 0)
    followed.follow(pod)
    followed.drain(10)
    assert (lines, followed.tail(Task(role="chief", index=0))) == ([], [])
    [message] = caplog.messages
    name = pod["metadata"]["name"]
    words = "cannot be read: unable to retrieve container logs for containerd://"
    assert message.startswith(f"the log of chief-0 (pod {name}) {words}")


def test_a_follower_ends_when_its_pod_is_deleted(kube, read):
    followed, lines = read
    followed.follow(kube.pod("ps-0"))
    kube.write_log("ps-0", "hello")
    kube.store.wait(lambda: lines)
    kube.store.remove("pods", NAMESPACE, kube.pod("ps-0")["metadata"]["name"])
    kube.server.drop_streams()
    followed.drain(10)
    assert lines == ["ps-0 hello"]
    assert followed.tail(Task(role="ps", index=0)) == ["hello"]


def test_what_holds_up_training_is_a_line_of_the_step(caplog):
    relay = EventRelay(lambda: None, lambda _step: None)
    with caplog.at_level("INFO"):
        relay.take(events.Stalled(tasks=("worker-0",), seconds=120.0))
        relay.take(events.LauncherUnwatched(reason="leases is forbidden"))
    assert "no progress for 2 min 00 s: no response from worker-0" in caplog.text
    assert "the job continues if its launcher dies" in caplog.text

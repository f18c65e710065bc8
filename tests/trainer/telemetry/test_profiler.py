"""Tests which steps are profiled, and that an error of the profiler does not end training."""

import pytest
import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from flotilla.trainer import events
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.runtime.errors import ConfigError
from flotilla.trainer.telemetry.profiler import MOST_TASKS, Profiler, list_servers
from flotilla.trainer.training.loop import Pace
from tests.trainer.counting import Counting, Run


class Recorded:
    def __init__(self, monkeypatch):
        self.calls, self.asked = [], []
        own = tf.profiler.experimental
        monkeypatch.setattr(own, "start", lambda folder: self.calls.append(("start", folder)))
        monkeypatch.setattr(own, "stop", lambda: self.calls.append(("stop",)))
        monkeypatch.setattr(own.client, "trace", self._trace)

    def _trace(self, servers, folder, milliseconds, **_settings):
        self.asked.append((servers, folder, milliseconds))


@pytest.fixture
def recorded(monkeypatch):
    return Recorded(monkeypatch)


@pytest.mark.parametrize(
    ("profile", "what"),
    [
        ("[100]", "not a first step and a later last step"),
        ("[100,100]", "not a first step and a later last step"),
        ("[110,100]", "not a first step and a later last step"),
        ("[0,5]", "not a first step and a later last step"),
        ("[1,2,3]", "not a first step and a later last step"),
        (
            "[1490,1501]",
            r"step 1501 is after the end of training; use steps up to training.steps \(1500",
        ),
    ],
)
def test_steps_that_cannot_be_profiled_are_refused(profile, what):
    values = [int(each) for each in profile[1:-1].split(",")]
    with pytest.raises(ConfigError, match=what):
        parse_config({"training": {"profile": values}})


@pytest.mark.parametrize("profile", [[], [1, 2], [100, 110], [1499, 1500]])
def test_steps_that_can_be_profiled_are_taken(profile):
    assert parse_config({"training": {"profile": profile}}).training.profile == tuple(profile)


def test_no_inner_loop_crosses_an_edge_of_the_profile():
    pace = Pace(training=TrainingConfig(steps=1500, profile=(100, 110)), steps_per_second=1e6)
    assert pace.next_steps(0) == 99
    assert pace.next_steps(99) == 11
    assert pace.next_steps(110) == 390


def edges(run, **settings):
    """Return the global steps at which the trace started and stopped."""
    found = []
    own, strategy = tf.profiler.experimental, Counting()
    for name in ("start", "stop"):
        act = getattr(own, name)

        def seen(*words, act=act):
            found.append(strategy.global_step())
            act(*words)

        setattr(own, name, seen)
    run.train(strategy, **settings)
    return found


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return Run(tmp_path / "digits-1")


@pytest.mark.parametrize(
    ("profile", "found"), [([1, 2], [0, 2]), ([14, 17], [13, 17]), ([39, 40], [38, 40]), ([], [])]
)
def test_exactly_the_steps_asked_for_are_traced(run, recorded, profile, found):
    assert edges(run, steps=40, profile=profile) == found
    folder = str(run.folder / "checkpoints/logs/digits-1/train")
    assert recorded.calls == [("start", folder), ("stop",)] * bool(profile)


def test_an_attempt_that_begins_within_traces_the_rest(recorded, tmp_path):
    profiler = Profiler((100, 110), tmp_path, [])
    profiler.update(104)
    profiler.update(110)
    profiler.update(120)
    assert [name for name, *_ in recorded.calls] == ["start", "stop"]


def test_an_attempt_that_begins_after_traces_nothing(recorded, tmp_path):
    profiler = Profiler((100, 110), tmp_path, [])
    profiler.update(110)
    profiler.end()
    assert recorded.calls == []


def test_training_that_fails_ends_its_trace(run, recorded):
    def diverges(strategy):
        return float("nan") if strategy.global_step() > 13 else 1.0

    with pytest.raises(Exception, match="diverged"):
        run.train(Counting(diverges), steps=40, profile=[13, 17])
    assert [name for name, *_ in recorded.calls] == ["start", "stop"]


def test_the_other_tasks_are_asked_for_as_long_as_the_steps_take(recorded, tmp_path):
    for speed, milliseconds in [(20.0, 550), (1e6, 100), (0.01, 10_000), (0.0, 1000)]:
        profiler = Profiler((100, 110), tmp_path, ["grpc://a:1", "grpc://b:2"])
        profiler.update(99, speed)
        profiler.update(110)
        expected = ("grpc://a:1,grpc://b:2", str(tmp_path / "train"), milliseconds)
        assert recorded.asked.pop() == expected


def test_workers_are_asked_before_servers_and_not_the_task_itself():
    workers = tuple(f"w:{n}" for n in range(MOST_TASKS - 1))
    cluster = Cluster(addresses={"ps": ("p:1", "p:2"), "worker": workers, "chief": ("c:1",)})
    found = list_servers(cluster, Task(role="worker", index=0))
    assert found == [
        *(f"grpc://w:{n}" for n in range(1, MOST_TASKS - 1)),
        "grpc://p:1",
        "grpc://p:2",
    ]


@pytest.mark.parametrize(
    ("name", "what"), [("start", "start the profiler"), ("stop", "write the profile")]
)
@pytest.mark.usefixtures("recorded")
def test_a_profiler_that_fails_is_one_warning(run, monkeypatch, caplog, name, what):
    def fail(*_):
        raise tf.errors.UnavailableError(None, None, "another profiler is running\nmore")

    monkeypatch.setattr(tf.profiler.experimental, name, fail)
    assert run.train(steps=40, profile=[13, 17]) == 40
    assert caplog.text.count("another profiler is running") == 1
    assert f"cannot {what}: another profiler is running" in caplog.text


@pytest.mark.slow
def test_the_trace_has_the_operations_of_the_steps(tmp_path):
    profiler = Profiler((2, 3), tmp_path, [])
    weight = tf.Variable(tf.ones([64, 64]))
    for step in range(4):
        profiler.update(step)
        weight.assign(tf.linalg.matmul(weight, weight) / 64)
    [path] = (tmp_path / "train/plugins/profile").glob("*/*.xplane.pb")
    space = xplane_pb2.XSpace.FromString(path.read_bytes())
    names = {each.name for plane in space.planes for each in plane.event_metadata.values()}
    assert any("MatMul" in name for name in names)

"""Tests the TensorBoard files of a run: metrics at their steps, configuration and profile."""

import resource

import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from flotilla.trainer import events
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import TrainingConfig
from flotilla.trainer.config.topology import Cluster, Task
from flotilla.trainer.telemetry.tensorboard import (
    MOST_TASKS,
    Profiler,
    TensorBoardLog,
    list_servers,
)
from flotilla.trainer.training.loop import Pace
from tests.trainer.counting import Counting, Run


def loaded(logs):
    """Return a folder's data as `tensorboard --logdir` reads it."""
    found = EventMultiplexer().AddRunsFromDirectory(str(logs))
    found.Reload()
    return found


def scalars(logs):
    """Return every value with its run, step and tag."""
    view = loaded(logs)
    return sorted(
        (run, event.step, tag, float(tf.make_ndarray(event.tensor_proto)))
        for run, tags in view.Runs().items()
        for tag in tags["tensors"]
        if not tag.startswith("_hparams_")
        for event in view.Tensors(run, tag)
    )


def hyperparameters(logs, run):
    summary = loaded(logs).SummaryMetadata(run, metadata.SESSION_START_INFO_TAG)
    info = metadata.parse_session_start_info_plugin_data(summary.plugin_data.content)
    values = {name: getattr(each, each.WhichOneof("kind")) for name, each in info.hparams.items()}
    return info.group_name, values


ROWS = [
    {"global_step": 10, "loss": 2.5, "workers": {"worker-0": {"examples": 640}}},
    {"global_step": 20, "loss": 1.25, "validation_loss": 1.5, "validation_accuracy": 0.75},
]
FOUND = [
    ("digits-1/train", 10, "loss", 2.5),
    ("digits-1/train", 10, "workers/worker-0/examples", 640.0),
    ("digits-1/train", 20, "loss", 1.25),
    ("digits-1/validation", 20, "accuracy", 0.75),
    ("digits-1/validation", 20, "loss", 1.5),
]


def test_every_metric_is_there_as_soon_as_its_row_without_operations_of_tensorflow(tmp_path):
    board = TensorBoardLog(tmp_path / "check points", "digits-1")
    for count, row in enumerate(ROWS, start=1):
        with tf.Graph().as_default() as graph:
            board.add_configuration(parse_config({}))
            board.add(row)
        assert graph.get_operations() == []
        steps = {each["global_step"] for each in ROWS[:count]}
        expected = [each for each in FOUND if each[1] in steps]
        assert scalars(tmp_path / "check points") == expected


def test_a_new_attempt_adds_to_the_same_runs(tmp_path):
    for row in ROWS:
        TensorBoardLog(tmp_path, "digits-1").add(row)
    assert scalars(tmp_path) == FOUND


def test_an_attempt_goes_on_next_to_the_files_of_an_older_version(tmp_path):
    with tf.summary.create_file_writer(str(tmp_path)).as_default(step=5):
        tf.summary.scalar("loss", 4.0)
    TensorBoardLog(tmp_path, "digits-1").add(ROWS[1])
    assert scalars(tmp_path) == [(".", 5, "loss", 4.0), *FOUND[2:]]


def test_runs_in_one_folder_have_names_of_their_own(tmp_path):
    for run in ("digits-1", "digits-2"):
        TensorBoardLog(tmp_path, run).add(ROWS[1])
    runs = {f"{run}/{part}" for run in ("digits-1", "digits-2") for part in ("train", "validation")}
    assert set(loaded(tmp_path).Runs()) == runs


def test_a_validation_of_another_task_is_in_the_same_run(tmp_path):
    TensorBoardLog(tmp_path, "digits-1").add_validation(20, {"loss": 1.5, "accuracy": 0.75})
    assert scalars(tmp_path) == FOUND[-2:]


def test_the_keys_of_the_configuration_are_hyperparameters(tmp_path):
    config = parse_config(
        {
            "training": {"optimizer": {"learning_rate": 0.5}, "freeze": ["hidden_0/*"]},
            "model": {"args": {"hidden_units": [7]}},
        }
    )
    TensorBoardLog(tmp_path, "digits-1").add_configuration(config)
    group, values = hyperparameters(tmp_path, "digits-1")
    assert group == "digits-1"
    assert values["training.optimizer.learning_rate"] == 0.5
    assert values["training.optimizer.name"] == "adam"
    assert values["training.freeze"] == '["hidden_0/*"]'
    assert values["model.args"] == '{"hidden_units": [7]}'
    assert values["cluster.evaluator"] is False
    assert not any(name.startswith("cluster.kubernetes") for name in values)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    board = TensorBoardLog(None, "digits-1")
    board.add(ROWS[1])
    board.add_configuration(parse_config({}))
    assert board.folder is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("trouble", ["a file in the way", "a full disk"])
def test_what_cannot_be_written_is_one_warning_and_does_not_end_the_run(tmp_path, caplog, trouble):
    board = TensorBoardLog(tmp_path / "logs", "digits-1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trouble == "a file in the way":
        (tmp_path / "logs").write_text("")
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        board.add_configuration(parse_config({}))
        for row in ROWS:
            board.add(row)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("no longer writing metrics for TensorBoard: ") == 1


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


def test_an_attempt_that_begins_within_traces_the_rest_and_one_after_it_nothing(recorded, tmp_path):
    profiler = Profiler((100, 110), tmp_path, [])
    profiler.update(104)
    profiler.update(110)
    profiler.update(120)
    assert [name for name, *_ in recorded.calls] == ["start", "stop"]
    late = Profiler((100, 110), tmp_path, [])
    late.update(110)
    late.end()
    assert len(recorded.calls) == 2


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

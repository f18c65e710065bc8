"""Tests the TensorBoard files in `logs/`: every metric at its step, and the configuration."""

import resource
from pathlib import Path

import tensorflow as tf
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams import metadata

from flotilla.trainer.config.load import parse_config
from flotilla.trainer.telemetry.scalars import TensorBoardLog


def loaded(logs: Path) -> EventMultiplexer:
    """Return a folder's data as `tensorboard --logdir` reads it."""
    found = EventMultiplexer().AddRunsFromDirectory(str(logs))
    found.Reload()
    return found


def scalars(logs: Path) -> list[tuple[str, int, str, float]]:
    """Return every value with its run, step and tag."""
    view = loaded(logs)
    return sorted(
        (run, event.step, tag, float(tf.make_ndarray(event.tensor_proto)))
        for run, tags in view.Runs().items()
        for tag in tags["tensors"]
        if not tag.startswith("_hparams_")
        for event in view.Tensors(run, tag)
    )


def hyperparameters(logs: Path, run: str) -> tuple[str, dict[str, object]]:
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


def test_every_metric_is_there_as_soon_as_its_row(tmp_path):
    board = TensorBoardLog(tmp_path / "check points", "digits-1")
    for count, row in enumerate(ROWS, start=1):
        board.add(row)
        steps = {each["global_step"] for each in ROWS[:count]}
        expected = [each for each in FOUND if each[1] in steps]
        assert scalars(tmp_path / "check points") == expected


def test_a_new_attempt_adds_to_the_same_runs(tmp_path):
    for row in ROWS:
        TensorBoardLog(tmp_path, "digits-1").add(row)
    assert scalars(tmp_path) == FOUND


def test_metrics_are_written_without_operations_of_tensorflow(tmp_path):
    board = TensorBoardLog(tmp_path, "digits-1")
    with tf.Graph().as_default() as graph:
        board.add_configuration(parse_config({}))
        for row in ROWS:
            board.add(row)
    assert graph.get_operations() == []
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


def test_a_disk_that_takes_no_more_ends_the_pictures_and_not_the_run(tmp_path, caplog):
    board = TensorBoardLog(tmp_path / "logs", "digits-1")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        board.add_configuration(parse_config({}))
        for step in (1, 2):
            board.add({"global_step": step, "loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("no longer writing metrics for TensorBoard: ") == 1


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path, caplog):
    (tmp_path / "logs").write_text("in the way")
    board = TensorBoardLog(tmp_path / "logs", "digits-1")
    board.add(ROWS[0])
    board.add(ROWS[1])
    assert caplog.text.count("no longer writing metrics for TensorBoard: ") == 1

"""What TensorBoard finds in `logs/`: every figure of the history at its global step."""

from __future__ import annotations

import resource

import tensorflow as tf
from tensorflow.core.util import event_pb2

from trainer.training.journal import TensorBoardLog

ROWS = [
    {"global_step": 10, "loss": 2.5, "learning_rate": 0.5, "seconds": 1.0},
    {"global_step": 20, "loss": 1.25, "validation_loss": 1.5, "validation_accuracy": 0.75},
]


def scalars(folder):
    found = []
    for path in sorted((folder / "logs").glob("events.out.tfevents.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = event_pb2.Event.FromString(record.numpy())
            for value in event.summary.value:
                metric = float(tf.make_ndarray(value.tensor))
                found.append((event.step, value.tag, metric))
    return sorted(found)


def expected(rows):
    metrics = [(row["global_step"], name, row[name]) for row in rows for name in row]
    return sorted(metric for metric in metrics if metric[1] != "global_step")


def test_every_metric_is_there_as_soon_as_its_row(tmp_path):
    board = TensorBoardLog(tmp_path / "check points" / "logs")
    for count, row in enumerate(ROWS, start=1):
        board.add(row)
        assert scalars(tmp_path / "check points") == expected(ROWS[:count])


def test_a_new_attempt_adds_to_the_same_folder(tmp_path):
    for row in ROWS:
        TensorBoardLog(tmp_path / "logs").add(row)
    assert scalars(tmp_path) == expected(ROWS)


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    TensorBoardLog(None).add(ROWS[0])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_takes_no_more_ends_the_pictures_and_not_the_run(tmp_path, caplog):
    board = TensorBoardLog(tmp_path / "logs")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        for step in (1, 2):
            board.add({"global_step": step, "loss": 0.5})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caplog.text.count("no more metrics for TensorBoard: ") == 1

"""Tests how steps and metrics are read from the lines that a program prints."""

import json

import pytest

from flotilla.trainer import events
from flotilla.trainer.checkpoints.history import History, read_history
from flotilla.trainer.program.metrics import Metrics, MetricsFile
from flotilla.trainer.storage import uri_of


@pytest.fixture
def heard():
    found = []
    with events.listen(found.append):
        yield found


@pytest.fixture
def metrics(tmp_path):
    (tmp_path / "run").mkdir()
    return Metrics(History(uri_of(tmp_path / "run"), start=0), 0, 0)


def take(metrics, when=0.0, **line):
    metrics.take(json.dumps(line), when)


def test_a_line_becomes_progress_a_validation_and_a_row(metrics, heard, tmp_path):
    take(metrics, step=10, loss=0.5, accuracy=0.9, lr=0.1, steps=40, note="text")
    take(metrics, step=20, loss=0.25, val_loss=0.3, val_accuracy=0.8)
    metrics.flush()
    first, validation, second = heard
    assert (first.global_step, first.steps, first.loss) == (10, 40, 0.5)
    assert (first.learning_rate, first.metrics) == (0.1, {"accuracy": 0.9})
    assert validation.metrics == {"loss": 0.3, "accuracy": 0.8}
    assert (second.global_step, second.metrics) == (20, {})
    rows = read_history(uri_of(tmp_path / "run"))
    assert [row["global_step"] for row in rows] == [10, 20]
    assert rows[1]["validation_loss"] == 0.3
    assert metrics.newest["accuracy"] == 0.9


@pytest.mark.parametrize(
    "line",
    ["", "{", "[1]", '{"step": "a"}', '{"step": -1}', '{"step": 1.5}', '{"step": null}', "{" * 99],
)
def test_other_lines_are_passed_over(metrics, heard, line):
    metrics.take(line, 0.0)
    assert not heard
    assert not metrics.said_steps


def test_values_that_are_no_finite_numbers_are_left_out(metrics, heard):
    metrics.take('{"step": 1, "loss": NaN, "a": Infinity, "b": true, "c": [1], "d": 2}', 0.0)
    metrics.take('{"step": 1, "loss": 1e999, "d": 2}', 0.0)
    metrics.flush()
    metrics.take('{"step": 9007199254740993}', 0.0)
    metrics.take('{"step": 1, "deep": [[{"step": 7}]], "steps": 1e300}', 0.0)
    assert (metrics.step, metrics.steps) == (1, 0)
    assert heard
    assert heard[0].loss == 0.0
    assert set(heard[0].metrics) <= {"d"}


def test_of_names_without_end_the_first_are_kept(metrics):
    for number in range(1000):
        take(metrics, step=number, **{f"name {number}": 1, "a\x1b[31m": 2, "b" * 101: 3})
    assert len(metrics.newest) == 200
    assert "name 0" in metrics.newest


def test_a_program_that_begins_below_its_checkpoint_is_asked_why(tmp_path, caplog):
    (tmp_path / "run").mkdir()
    again = Metrics(History(uri_of(tmp_path / "run"), start=0), 0, 7)
    for step in (3, 4):
        take(again, step=step)
    assert caplog.text.count("starts at step 3, although its checkpoint is from step 7") == 1


def test_the_step_of_a_checkpoint(metrics, tmp_path):
    for step in (10, 20, 30):
        take(metrics, when=float(step), step=step)
    assert metrics.step_at(25.0, -1) == 20
    assert metrics.step_at(5.0, -1) == -1
    # Step 30 is reported soon after the file was written, so the number in its name is right.
    assert metrics.step_at(25.0, 30) == 30
    assert metrics.step_at(25.0, 2) == 20
    metrics.save(tmp_path)
    again = Metrics(History(uri_of(tmp_path / "run"), start=0), 0, 0)
    again.restore(tmp_path)
    assert again.step_at(25.0, -1) == 20


def test_a_long_training_keeps_a_limited_history(metrics, tmp_path):
    for step in range(1, 5001):
        take(metrics, step=step, steps=5000)
        metrics.flush()
    assert 1000 < len(read_history(uri_of(tmp_path / "run"))) <= 2001


def test_a_file_is_read_by_whole_lines_and_from_its_new_beginning(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n")
    file = MetricsFile(path)
    assert file.read() == []
    with path.open("a") as out:
        out.write("a\nhalf")
    assert [line for line, _ in file.read()] == ["a"]
    with path.open("a") as out:
        out.write(" b\n")
    assert [line for line, _ in file.read()] == ["half b"]
    path.write_text("new\n")
    assert [line for line, _ in file.read()] == ["new"]
    path.unlink()
    assert file.read() == []

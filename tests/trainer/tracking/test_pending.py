"""What the events of a run become: points, tags, and the end."""

from __future__ import annotations

from collections import deque

import pytest

from trainer.errors import ClusterLostError, RunInterruptedError, UserError
from trainer.events import AttemptBegin, Progress, Restart, RunBegin, StepEnd, Validation
from trainer.tracking.pending import (
    MOST_POINTS,
    MOST_WAITING,
    Pending,
    Point,
    Reader,
    ended,
    status_of,
)


def progress(step, *, steps=100, **fields):
    return Progress(
        global_step=step, steps=steps, loss=0.5, steps_per_second=10, seconds_left=1, **fields
    )


def points(reader, *seen):
    return [
        (point.name, point.value, point.step) for each in seen for point in reader.read(each).points
    ]


def test_progress_and_validation_become_curves():
    found = points(
        Reader(),
        progress(20, learning_rate=0.01, metrics={"staleness": 2, "workers": {"worker-0": 3}}),
        Validation(global_step=20, metrics={"loss": 0.4, "accuracy": 0.9}),
    )
    assert found == [
        ("loss", 0.5, 20),
        ("learning_rate", 0.01, 20),
        ("steps_per_second", 10.0, 20),
        ("staleness", 2.0, 20),
        ("workers/worker-0", 3.0, 20),
        ("validation_loss", 0.4, 20),
        ("validation_accuracy", 0.9, 20),
    ]


def test_a_point_has_the_time_of_its_event_so_that_a_second_writing_is_the_same():
    (first, *_) = Reader().read(progress(20, time=12.3456)).points
    assert first.when == 12345


def test_a_long_run_has_as_many_points_as_a_history_has_rows_and_the_last_one():
    reader, steps = Reader(), 10 * MOST_POINTS
    found = points(reader, *(progress(step, steps=steps) for step in range(1, steps + 1)))
    losses = [step for name, _, step in found if name == "loss"]
    assert len(losses) == MOST_POINTS
    assert losses[-1] == steps


def test_what_is_no_number_is_no_point():
    metrics = {"loss": float("nan"), "name": "x", "is_on": True, "far": float("inf")}
    assert points(Reader(), Validation(global_step=1, metrics=metrics)) == []


def test_the_metrics_of_the_test_split_stand_at_the_step_of_the_model():
    reader = Reader()
    train = StepEnd(step="train_model", status="done", metrics={"handed_on_step": 40})
    test = StepEnd(
        step="evaluate_model", status="done", metrics={"accuracy": 0.9}, uri="s3://e",
        output="evaluation",
    )  # fmt: skip
    assert points(reader, train, test) == [("test_accuracy", 0.9, 40)]
    assert reader.read(test).tags == {"flotilla.evaluate_model.uri": "s3://e"}


def test_a_decision_a_failure_and_restarts_are_tags():
    reader = Reader()
    gate = {"decision": "refused", "reasons": ["accuracy 0.1 is below 0.9", "loss"]}
    assert reader.read(StepEnd(step="check_gate", status="done", metrics=gate)).tags == {
        "flotilla.check_gate.decision": "refused",
        "flotilla.check_gate.reasons": "accuracy 0.1 is below 0.9; loss",
    }
    failed = StepEnd(step="train_model", status="failed", error="at s3://k:secret@b/x")
    assert reader.read(failed).tags == {"flotilla.error": "train_model: at s3://***@b/x"}
    restart = Restart(task="worker-0", cause="signal SIGKILL", restarts=1)
    reader.read(restart)
    assert reader.read(restart).tags == {"flotilla.restarts": "2"}
    assert reader.read(AttemptBegin(global_step=50, steps=99, resumed=True)).tags == {
        "flotilla.attempt_from": "50"
    }
    assert not reader.read(RunBegin(run_id="r", number=1))


def test_what_waits_is_bounded_and_in_order():
    reader = Reader()
    first, second = reader.read(progress(20)), reader.read(progress(40))
    assert [each.step for each in second.after(first).points] == [20] * 3 + [40] * 3
    assert ended("FAILED").after(Pending(status="")).status == "FAILED"
    last = Point("last", 1.0, 99, 0, repeats=True)
    waiting = Pending(points=deque([*first.points] * MOST_WAITING))
    bounded = Pending(points=deque([last])).after(waiting)
    assert (len(bounded.points), bounded.points[-1]) == (MOST_WAITING, last)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "FINISHED"),
        (UserError("x"), "FAILED"),
        (ClusterLostError("x"), "FAILED"),
        (RunInterruptedError("x"), "KILLED"),
        (KeyboardInterrupt(), "KILLED"),
    ],
)
def test_how_training_ended_in_the_words_of_mlflow(error, status):
    assert status_of(error) == status

"""Tests what a tracker receives, and that a missing, slow or failing tracker delays no run."""

import logging
import threading
from collections import deque

import pytest

from flotilla.trainer import events
from flotilla.trainer.cluster.launcher import Job
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.events import AttemptBegin, Progress, Restart, RunBegin, StepEnd, Validation
from flotilla.trainer.runtime.errors import ClusterLostError, RunInterruptedError, UserError
from flotilla.trainer.tracking import addresses, tracker
from flotilla.trainer.tracking.mlflow_run import MOST_WAITING, Pending, Point
from flotilla.trainer.tracking.tracker import (
    MISSING,
    MOST_POINTS,
    Reader,
    Tracker,
    describe_end,
    mlflow_status,
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
        ("loss", 0.5, 20), ("learning_rate", 0.01, 20), ("steps_per_second", 10.0, 20),
        ("staleness", 2.0, 20), ("workers/worker-0", 3.0, 20),
        ("validation_loss", 0.4, 20), ("validation_accuracy", 0.9, 20),
    ]  # fmt: skip


def test_what_is_a_point_and_when():
    silent = Progress(
        global_step=20, steps=100, loss=0.0, steps_per_second=0.0, seconds_left=-1,
        metrics={"reward": 7.0},
    )  # fmt: skip
    assert points(Reader(), silent) == [("reward", 7.0, 20)]
    (first, *_) = Reader().read(progress(20, time=12.3456)).points
    assert first.when == 12345
    metrics = {"loss": float("nan"), "name": "x", "is_on": True, "far": float("inf")}
    assert points(Reader(), Validation(global_step=1, metrics=metrics)) == []


def test_a_long_run_has_as_many_points_as_a_history_has_rows_and_the_last_one():
    reader, steps = Reader(), 10 * MOST_POINTS
    found = points(reader, *(progress(step, steps=steps) for step in range(1, steps + 1)))
    losses = [step for name, _, step in found if name == "loss"]
    assert len(losses) == MOST_POINTS
    assert losses[-1] == steps


def test_the_metrics_of_the_test_split_and_the_tags():
    reader = Reader()
    train = StepEnd(step="train_model", status="done", metrics={"handed_on_step": 40})
    test = StepEnd(
        step="evaluate_model", status="done", metrics={"accuracy": 0.9}, uri="s3://e",
        output="evaluation",
    )  # fmt: skip
    assert points(reader, train, test) == [("test_accuracy", 0.9, 40)]
    assert reader.read(test).tags == {"flotilla.evaluate_model.uri": "s3://e"}
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
    assert [each.step for each in second.merge(first).points] == [20] * 2 + [40] * 2
    assert describe_end("FAILED").merge(Pending(status="")).status == "FAILED"
    last = Point("last", 1.0, 99, 0, repeats=True)
    waiting = Pending(points=deque([*first.points] * MOST_WAITING))
    bounded = Pending(points=deque([last])).merge(waiting)
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
    assert mlflow_status(error) == status


class Target:
    """A tracker that accepts data after the given failures, and hangs while `gate` is cleared."""

    url = "http://mlflow"

    def __init__(self, *faults):
        self.faults = list(faults)
        self.gate = threading.Event()
        self.gate.set()
        self.asked, self.taken = threading.Semaphore(0), threading.Semaphore(0)
        self.written = Pending()

    def write(self, pending):
        self.asked.release()
        self.gate.wait(120)
        if self.faults:
            raise self.faults.pop(0)
        self.written = pending.merge(self.written)
        self.taken.release()

    @property
    def steps(self):
        return [each.step for each in self.written.points if each.name == "loss"]


@pytest.fixture
def warnings(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


def test_all_is_written_in_order_and_what_was_not_taken_again(warnings):
    target = Target()
    follower = Tracker(target)
    for step in (20, 40, 60):
        follower.hear(progress(step))
    assert follower.close(describe_end("FINISHED", "", "blessed"))
    assert (target.steps, target.written.status) == ([20, 40, 60], "FINISHED")
    assert target.written.tags == {"flotilla.verdict": "blessed"}
    assert warnings() == []
    target = Target(ConnectionError("refused"), TimeoutError("late"), ValueError("<html>"))
    follower = Tracker(target, first_pause=0.001)
    follower.hear(progress(20))
    assert target.taken.acquire(timeout=120)
    follower.hear(progress(40))
    assert follower.close(describe_end("FINISHED"))
    assert (target.steps, target.written.status) == ([20, 40], "FINISHED")
    (line,) = warnings()
    assert "cannot send the data of this run to MLflow at http://mlflow" in line
    assert "ConnectionError: refused" in line


def test_a_silent_tracker_makes_nobody_wait(warnings):
    target = Target()
    target.gate.clear()
    follower = Tracker(target)
    follower.hear(progress(20))
    assert target.asked.acquire(timeout=120)
    # The tracker's thread hangs from here on.
    for step in range(21, 40):
        follower.hear(progress(step))
    assert not follower.close(describe_end("FINISHED"), seconds=0.01)
    (line,) = warnings()
    assert "no response within 0.01 s" in line
    follower.hear(progress(60))
    target.gate.set()


def test_at_the_end_a_tracker_that_is_away_is_asked_once_more():
    faults = [ConnectionError()] * 9
    target = Target(*faults)
    follower = Tracker(target, first_pause=3600)
    follower.hear(progress(20))
    assert target.asked.acquire(timeout=120)
    assert not follower.close(describe_end("FINISHED"))
    assert len(target.faults) in (7, 8)


def test_without_the_package_the_warning_names_the_extra(warnings):
    target = Target(ModuleNotFoundError("No module named 'mlflow'"))
    follower = Tracker(target)
    follower.hear(progress(20))
    assert not follower.close(describe_end("FINISHED"))
    assert warnings() == [MISSING]
    assert "mlflow" in MISSING


def test_an_event_that_cannot_be_read_is_no_failure(warnings):
    follower = Tracker(Target())
    follower.hear(progress(20, metrics={"far": 1, 3: {"x": 1}}))
    follower.hear(progress("twenty"))
    follower.close()
    assert len(warnings()) == 1


def test_nothing_begins_where_nothing_is_said():
    before = set(threading.enumerate())
    follower = Tracker(Target())
    follower.hear(events.RunBegin(run_id="r", number=1))
    # A thread of an earlier test may end during this test, but no thread may start.
    assert before.issuperset(threading.enumerate())
    assert follower.close()


@pytest.fixture
def target(monkeypatch):
    made = Target()
    made.names = []

    def make(name):
        made.names.append(name)
        return made

    monkeypatch.setattr(tracker, "MlflowRun", make)
    monkeypatch.setenv(addresses.URI, "http://mlflow")
    monkeypatch.delenv(addresses.RUN, raising=False)
    monkeypatch.delenv(events.VARIABLE, raising=False)
    return made


@pytest.fixture
def job(tmp_path):
    config = parse_config({"name": "digits"})
    at = "s3://b/root/run-7/checkpoints"
    return Job(config=config, dataset="s3://b/d", checkpoints=at, workdir=tmp_path)


def emit(error=None):
    events.emit(progress(20))
    if error:
        raise error


@pytest.mark.parametrize(("leads", "status"), [(True, "FINISHED"), (False, "")])
def test_the_chief_of_a_job_ends_its_run_and_the_evaluator_does_not(target, job, leads, status):
    with tracker.following_training(job, leads=leads):
        emit()
    (name,) = target.names
    assert (name.run_id, name.experiment, name.ends) == ("run-7", "digits", leads)
    assert name.parameters["training.steps"] == str(job.config.training.steps)
    assert (target.steps, target.written.status) == ([20], status)


@pytest.mark.parametrize(
    ("error", "status"), [(UserError("the loss is nan"), "FAILED"), (ClusterLostError("x"), "")]
)
def test_a_chief_that_begins_again_has_not_ended_the_run(target, job, error, status):
    with pytest.raises(type(error)), tracker.following_training(job, leads=True):
        emit(error)
    assert (target.steps, target.written.status) == ([20], status)


def test_a_run_that_kfp_has_made_is_ended_by_kfp(target, job, monkeypatch):
    monkeypatch.setenv(addresses.RUN, "0123")
    with tracker.following_training(job, leads=True):
        emit()
    assert [each.ends for each in target.names] == [False]
    with tracker.following_step():
        events.emit(events.StepEnd(step="check_gate", status="done", uri="s3://d"))
    assert [each.ends for each in target.names] == [False, False]
    assert target.written.status == ""
    assert target.written.tags["flotilla.check_gate.uri"] == "s3://d"


def test_nothing_is_tracked_without_an_address_or_by_a_second_process(
    target, job, monkeypatch, tmp_path
):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    monkeypatch.setenv(addresses.RUN, "0123")
    with tracker.following_training(job, leads=True), tracker.following_step():
        emit()
    assert target.names == []
    monkeypatch.delenv(addresses.URI)
    with tracker.following_training(job, leads=True), tracker.following_step():
        emit()
    tracker.LocalRun(job.config, "r", tmp_path / "none").end("blessed", "")
    assert target.names == []


def test_data_and_pages_of_a_run_are_sent_or_left_for_the_next(target, job, tmp_path, monkeypatch):
    run = tracker.LocalRun(job.config, "r", tmp_path / "events.jsonl")
    for step, uri, output in (
        ("prepare_data", "s3://d", "dataset"),
        ("validate_data", "s3://v", "validation"),
        ("finish", "s3://r/report.html", "report"),
    ):
        run.hear(StepEnd(step=step, status="done", uri=uri, output=output))
    assert (tmp_path / tracker.UNSENT).exists()
    assert run.end("blessed", "")
    assert target.written.datasets == ["s3://d"]
    assert target.written.files == {
        "data_page.html": "s3://v/page.html", "report.html": "s3://r/report.html",
    }  # fmt: skip
    assert not (tmp_path / tracker.UNSENT).exists()
    monkeypatch.setenv(addresses.URI, "http://user:secret@mlflow")
    target.faults = [ConnectionError()] * 9
    run = tracker.LocalRun(job.config, "r", tmp_path / "events.jsonl", parent="sweep-1")
    run.hear(progress(20))
    assert not run.end("blessed", "")
    left = tracker.Unsent.read(tmp_path)
    assert (left.experiment, left.parent, left.sendings) == ("digits", "sweep-1", 0)
    assert "secret" not in (tmp_path / tracker.UNSENT).read_text()
    monkeypatch.setenv(addresses.URI, "http://other")
    assert tracker.Unsent.read(tmp_path) is None


def test_a_resumed_run_offers_what_the_tracker_may_have_missed(target, job, tmp_path):
    history = tmp_path / "events.jsonl"
    for each in (events.RunBegin(run_id="r", number=1), progress(20), progress(40)):
        events.append(history, each)
    heard = []
    run = tracker.LocalRun(job.config, "r", history, heard.append)
    run.hear(progress(60))
    run.end("refused", "accuracy 0.1")
    assert target.steps == [20, 40, 60]
    assert heard == [progress(60)]
    assert target.written.status == "FINISHED"
    assert target.written.tags["flotilla.verdict"] == "refused"


def test_training_goes_on_while_the_tracker_hangs(target, job):
    target.gate.clear()
    with tracker.following_training(job, leads=True):
        for step in range(1, 2001):
            events.emit(progress(step, steps=2000))
        target.gate.set()
    assert target.steps == list(range(1, 2001))

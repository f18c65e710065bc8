"""Tests that later runs send the data that a tracker missed, with a limited number of attempts."""

import fcntl
import json

import pytest

from flotilla.pipelines.runs import unsent
from flotilla.pipelines.runs.unsent import send_unsent, sending_unsent
from flotilla.trainer import events
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.events import RunBegin, RunEnd, StepBegin, StepEnd
from flotilla.trainer.promotion import registration
from flotilla.trainer.tracking import addresses, mlflow_run, tracker
from flotilla.trainer.tracking.tracker import MOST_SENDINGS, UNSENT, LocalRun
from tests.trainer.tracking.test_tracker import Target, progress


@pytest.fixture
def targets(monkeypatch):
    """Replace the MLflow writers by fake targets, by run ID."""
    made = {}

    def make(name):
        made[name.run_id] = target = Target(*made.get("faults", ()))
        target.name = name
        return target

    monkeypatch.setattr(tracker, "MlflowRun", make)
    monkeypatch.setattr(mlflow_run, "health", lambda: "well")
    monkeypatch.setattr(tracker, "FIRST_PAUSE_SECONDS", 0.001)
    for name in addresses.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(addresses.URI, "http://mlflow")
    return made


@pytest.fixture
def left(tmp_path, targets):
    """Return a function that writes a run as a killed command leaves it."""

    def leave(run_id, *more, parent=""):
        folder = tmp_path / run_id
        folder.mkdir()
        config = parse_config({"name": "digits", "storage": {"root": f"file://{tmp_path}"}})
        (folder / "config.json").write_text(config.model_dump_json())
        for event in (RunBegin(run_id=run_id, number=1), progress(20), *more):
            events.append(folder / "events.jsonl", event)
        LocalRun(config, run_id, folder / "none.jsonl", parent=parent)
        targets.clear()
        return folder

    return leave


def done(step, **fields):
    return StepEnd(step=step, status="done", **fields)


def test_a_killed_run_gets_its_points_and_its_end(tmp_path, left, targets):
    trained = done("train_model", uri="s3://c", output="checkpoint")
    folder = left("r-1", trained, StepBegin(step="evaluate_model"), parent="sweep-1")
    send_unsent(tmp_path)
    target = targets["r-1"]
    assert target.steps == [20]
    assert target.written.status == "KILLED"
    assert target.written.tags["flotilla.train_model.uri"] == "s3://c"
    assert target.written.ended > 0
    assert target.name.parent == "sweep-1"
    assert target.name.began > 0
    assert target.name.parameters["training.steps"]
    assert not (folder / UNSENT).exists()
    targets.clear()
    send_unsent(tmp_path)
    assert targets == {}


def test_a_run_that_is_running_or_of_another_tracker_is_left(tmp_path, left, targets, monkeypatch):
    folder = left("r-1")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        send_unsent(tmp_path)
    assert targets == {}
    monkeypatch.setenv(addresses.URI, "http://other")
    send_unsent(tmp_path)
    assert targets == {}
    assert (folder / UNSENT).exists()


def test_a_tracker_that_stays_away_is_asked_by_a_few_commands(tmp_path, left, targets):
    folder = left("r-1")
    left("r-2")
    (tmp_path / "r-2" / UNSENT).unlink()
    targets["faults"] = [ConnectionError("refused")] * 9
    for number in range(1, MOST_SENDINGS + 1):
        send_unsent(tmp_path)
        assert json.loads((folder / UNSENT).read_text())["sendings"] == number
    send_unsent(tmp_path)
    assert not (folder / UNSENT).exists()


def test_a_killed_sweep_ends(tmp_path, targets):
    folder = tmp_path / "sweep-1"
    folder.mkdir()
    LocalRun(parse_config({"name": "digits"}), "sweep-1", folder / "events.jsonl")
    send_unsent(tmp_path)
    target = targets["sweep-1"]
    assert (target.written.status, target.name.experiment) == ("KILLED", "digits")
    assert target.name.parameters == {}
    assert not (folder / UNSENT).exists()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"tracker": 1}', b"\xff"])
def test_a_damaged_file_is_left(tmp_path, left, targets, content):
    (left("r-1") / UNSENT).write_bytes(content)
    send_unsent(tmp_path)
    assert targets == {}


@pytest.mark.parametrize(
    ("last", "word"),
    [
        (StepEnd(step="train_model", status="failed", error="no disk"), "FAILED"),
        (StepEnd(step="train_model", status="interrupted", error="stopped"), "KILLED"),
        (RunEnd(), "FINISHED"),
    ],
)
def test_a_run_that_ended_while_the_tracker_was_away_has_its_own_end(
    tmp_path, left, targets, last, word
):
    left("r-1", last)
    # A damaged configuration does not hide another run.
    (left("r-2") / "config.json").write_text("{")
    send_unsent(tmp_path)
    assert targets["r-1"].written.status == word


@pytest.mark.parametrize("is_tracked", [True, False])
def test_a_run_meanwhile_sends_the_rest_and_the_champion(
    tmp_path, left, targets, monkeypatch, is_tracked
):
    left("r-1")
    if not is_tracked:
        monkeypatch.delenv(addresses.URI)
    announced = []
    monkeypatch.setattr(registration, "announce_again", lambda *which: announced.append(which))
    with sending_unsent(tmp_path, "file:///root", "digits"):
        pass
    assert [each.written.status for each in targets.values()] == ["KILLED"] * is_tracked
    assert announced == [("file:///root", "digits")] * is_tracked


@pytest.mark.usefixtures("targets")
def test_what_fails_never_fails_the_run(tmp_path, monkeypatch):
    def fail(_workdir):
        raise OSError("no such folder")

    monkeypatch.setattr(unsent, "send_unsent", fail)
    with sending_unsent(tmp_path, "", ""):
        pass

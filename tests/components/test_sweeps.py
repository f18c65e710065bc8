"""Tests the steps of a sweep: separate runs as trials, the choice of the best, and the report."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from flotilla.components import launchers, sweeps, train_model
from flotilla.components.records import run_store
from flotilla.components.records.step_record import PublishedRecord
from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import StepResult
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import tree_of
from tests.components.called_steps import artifact_in, ended
from tests.trainer.sweeps.test_sweep import a_sweep, reached

RUN = "digits-1"
SWEEP = a_sweep()
TRIALS = [
    replace(reached(SWEEP, trial, 0, value), checkpoint=f"file:///c{trial.number}")
    for trial, value in zip(SWEEP.trials, (0.5, 0.25), strict=True)
]
SETTINGS = {"cluster": {"launcher": "jobset"}}


@pytest.fixture
def trained(monkeypatch):
    """Replace training; return its calls, and a dict of exit codes and errors by run id."""
    calls, ends = [], {}

    def train(step):
        root, run_id = step.root, step.run_id
        calls.append((Config.model_validate_json(step.config), run_id))
        record = PublishedRecord("train_model", storage.join(root, run_id))
        record.begin()
        code, error = ends.get(run_id, (0, ""))
        metrics = {} if error else {"validation_loss": 0.5}
        status = "failed" if error else "done"
        record.end(StepResult(step="train_model", status=status, error=error, metrics=metrics))
        if error:
            raise SystemExit(code)
        return "file:///checkpoint"

    monkeypatch.setattr(train_model, "work", train)
    monkeypatch.setattr(sweeps, "run", lambda work, call: work(SimpleNamespace(**call)))
    return calls, ends


def step(root, place="1", rung=0):
    text = json.dumps(tree_of(SWEEP))
    config = Config().model_dump_json()
    training = ("file:///d", "image", "secret", None, None)
    return sweeps.run_trial.python_func(config, root, RUN, text, place, rung, *training)


def test_it_trains_its_own_settings_to_the_steps_of_the_rung(trained, root):
    calls, _ = trained
    found = json.loads(step(root))
    ((config, run_id),) = calls
    assert run_id == "digits-1-t02"
    assert config.training.steps == 30
    assert config.training.optimizer.learning_rate == 0.003
    assert found["status"] == "done"
    assert found["checkpoint"] == "file:///checkpoint"
    by = {"metric": "validation_loss", "better": "lower"}
    assert found["results"] == [{"rung": 0, "steps": 30, "value": 0.5, "by": by}]


def test_the_next_rung_continues_the_same_run_and_keeps_what_was_reached(trained, root):
    calls, _ = trained
    step(root)
    sweeps.publish_survivors(root, RUN, 1, [2])
    found = json.loads(step(root, place="0", rung=1))
    assert {run_id for _, run_id in calls} == {"digits-1-t02"}
    assert [each["steps"] for each in found["results"]] == [30, 90]


def test_a_failure_is_a_result_with_its_cause(trained, root):
    _, ends = trained
    ends["digits-1-t02"] = (1, "training diverged")
    found = json.loads(step(root))
    assert (found["status"], found["error"]) == ("failed", "training diverged")
    assert sweeps.read_trial(root, RUN, SWEEP.trials[1]).error == "training diverged"


def test_a_place_that_no_trial_takes_ends_at_once(trained, root):
    calls, _ = trained
    sweeps.publish_survivors(root, RUN, 1, [2])
    assert step(root, place="1", rung=1) == sweeps.EMPTY
    assert calls == []


def test_an_interrupt_is_none(trained, root):
    _, ends = trained
    ends["digits-1-t02"] = (130, "interrupted")
    with pytest.raises(SystemExit) as ended:
        step(root)
    assert ended.value.code == 130


def test_a_parameter_that_is_no_sweep_is_refused():
    for text in ("", "{", "{}"):
        with pytest.raises(ConfigError, match="flotilla sweep --compile"):
            sweeps.parse_sweep(text)


def going(root, rung):
    found = (sweeps._find_trial(SWEEP, root, RUN, place, rung) for place in range(2))
    return [each.number for each in found if each]


def chosen(root, *trials, rung=0):
    texts = [json.dumps(tree_of(each)) for each in trials]
    text = json.dumps(tree_of(SWEEP))
    config = Config().model_dump_json()
    return sweeps.choose_trial.python_func(config, root, RUN, text, texts, rung)


def test_the_best_goes_on_with_its_own_configuration(root):
    found = chosen(root, *TRIALS)
    assert run_store.read_given(storage.join(root, RUN), "choose_trial").arguments["rung"] == 0
    assert going(root, 1) == [2]
    assert found.checkpoint == "file:///c2"
    config = Config.model_validate_json(found.config)
    assert config.training.optimizer.learning_rate == 0.003
    assert config.training.steps == 30


def test_one_that_failed_is_not_chosen(root):
    failed = replace(TRIALS[1], status="failed", error="lost")
    assert chosen(root, TRIALS[0], failed).checkpoint == "file:///c1"
    assert going(root, 1) == [1]


def test_where_a_whole_rung_failed_the_best_of_the_one_before_is_chosen(root):
    known = storage.join(root, RUN, "trials", "0001.json")
    storage.write_bytes(known, json.dumps(tree_of(TRIALS[0])).encode())
    lost = replace(TRIALS[1], rung=1, status="failed", error="lost")
    found = chosen(root, lost, rung=1)
    assert found.checkpoint == "file:///c1"
    assert Config.model_validate_json(found.config).training.steps == 30
    assert going(root, 2) == []


def test_where_all_failed_the_sweep_fails_with_the_first_cause(root, capsys):
    failed = [replace(each, status="failed", error="no data") for each in TRIALS]
    with pytest.raises(SystemExit):
        chosen(root, *failed)
    assert "all 2 trials failed; the first error: no data" in capsys.readouterr().err


def finished(root, folder, text):
    pages = [artifact_in(folder) for _ in range(3)]
    (folder / "kfp").mkdir()
    sweeps.finish_sweep.python_func(ended("FAILED", "x"), root, SETTINGS, "run-1", text, *pages)
    return pages


def test_the_jobs_of_all_trials_end_and_their_table_is_published(root, tmp_path, monkeypatch):
    asked = []

    def end(settings, run_id):
        asked.append((settings, run_id))
        if run_id.endswith("t01"):
            raise UserError("the API does not answer")

    monkeypatch.setattr(launchers, "end", end)
    report, _, table = finished(root, tmp_path, json.dumps(tree_of(SWEEP)))
    assert asked == [(SETTINGS, f"run-1{of}") for of in ("-t01", "-t02", "")]
    text = storage.read_bytes(storage.join(root, "run-1", "sweep.md"))
    assert b"run-1" in text
    assert b"<html" in storage.read_bytes(storage.join(root, "run-1", "sweep.html"))
    assert Path(table.path).read_bytes() == text
    assert b"<html" in Path(report.path).read_bytes()


def test_a_parameter_that_is_no_sweep_keeps_no_report_from_being_written(
    root, tmp_path, monkeypatch
):
    monkeypatch.setattr(launchers, "end", lambda *_: None)
    report, *_ = finished(root, tmp_path, "{")
    assert b"<html" in Path(report.path).read_bytes()

"""Tests the steps of a sweep: separate runs as trials, the choice of the best, and the report."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flotilla.components import launchers, train_model
from flotilla.components.records.step_record import PublishedRecord
from flotilla.components.sweeps import choose_trial, finish_sweep, run_trial
from flotilla.trainer import storage
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import StepResult
from flotilla.trainer.runtime.errors import ConfigError, UserError
from flotilla.trainer.runtime.json_records import tree_of
from tests.components.called_steps import artifact_in, ended
from tests.trainer.sweeps.test_sweep import a_sweep, reached

RUN = "digits-1"


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
    monkeypatch.setattr(run_trial, "run", lambda work, call: work(SimpleNamespace(**call)))
    return calls, ends


def step(root, place="1", rung=0):
    text = json.dumps(tree_of(a_sweep()))
    config = Config().model_dump_json()
    training = ("file:///d", "image", "secret", None, None)
    return run_trial.run_trial.python_func(config, root, RUN, text, place, rung, *training)


def run(root, **named):
    return json.loads(step(root, **named))


def test_it_trains_its_own_settings_to_the_steps_of_the_rung(trained, root):
    calls, _ = trained
    found = run(root)
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
    run(root)
    run_trial.publish_survivors(root, RUN, 1, [2])
    found = run(root, place="0", rung=1)
    assert {run_id for _, run_id in calls} == {"digits-1-t02"}
    assert [each["steps"] for each in found["results"]] == [30, 90]


def test_a_failure_is_a_result_with_its_cause(trained, root):
    _, ends = trained
    ends["digits-1-t02"] = (1, "training diverged")
    found = run(root)
    assert (found["status"], found["error"]) == ("failed", "training diverged")
    assert run_trial.read_trial(root, RUN, a_sweep().trials[1]).error == "training diverged"


def test_a_place_that_no_trial_takes_ends_at_once(trained, root):
    calls, _ = trained
    run_trial.publish_survivors(root, RUN, 1, [2])
    assert step(root, place="1", rung=1) == run_trial.EMPTY
    assert calls == []


def test_an_interrupt_is_none(trained, root):
    _, ends = trained
    ends["digits-1-t02"] = (130, "interrupted")
    with pytest.raises(SystemExit) as ended:
        run(root)
    assert ended.value.code == 130


def test_a_parameter_that_is_no_sweep_is_refused():
    for text in ("", "{", "{}"):
        with pytest.raises(ConfigError, match="flotilla sweep --compile"):
            run_trial.parse_sweep(text)


SWEEP = a_sweep()
TRIALS = [
    replace(reached(SWEEP, trial, 0, value), checkpoint=f"file:///c{trial.number}")
    for trial, value in zip(SWEEP.trials, (0.5, 0.25), strict=True)
]


def going(root, rung):
    found = (run_trial._find_trial(SWEEP, root, "digits-1", place, rung) for place in range(2))
    return [each.number for each in found if each]


def chosen(root, *trials, rung=0):
    texts = [json.dumps(tree_of(each)) for each in trials]
    text = json.dumps(tree_of(SWEEP))
    config = Config().model_dump_json()
    return choose_trial.choose_trial.python_func(config, root, "digits-1", text, texts, rung)


def test_the_best_goes_on_with_its_own_configuration(root):
    found = chosen(root, *TRIALS)
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
    known = storage.join(root, "digits-1", "trials", "0001.json")
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


SETTINGS = {"cluster": {"launcher": "jobset"}}


def finished(root, folder, text):
    pages = [artifact_in(folder) for _ in range(3)]
    (folder / "kfp").mkdir()
    finish_sweep.finish_sweep.python_func(
        ended("FAILED", "x"), root, SETTINGS, "run-1", text, *pages
    )
    return pages


def test_the_jobs_of_all_trials_end_and_their_table_is_published(root, tmp_path, monkeypatch):
    asked = []

    def end(settings, run_id):
        asked.append((settings, run_id))
        if run_id.endswith("t01"):
            raise UserError("the API does not answer")

    monkeypatch.setattr(launchers, "end", end)
    report, _, table = finished(root, tmp_path, json.dumps(tree_of(a_sweep())))
    assert asked == [(SETTINGS, f"run-1{of}") for of in ("-t01", "-t02", "")]
    text = storage.read_bytes(storage.join(root, "run-1", "sweep.md"))
    assert b"run-1" in text
    assert b"<html" in storage.read_bytes(storage.join(root, "run-1", "sweep.html"))
    with open(table.path, "rb") as file:
        assert file.read() == text
    with open(report.path, encoding="utf-8") as file:
        assert "<html" in file.read()


def test_a_parameter_that_is_no_sweep_keeps_no_report_from_being_written(
    root, tmp_path, monkeypatch
):
    monkeypatch.setattr(launchers, "end", lambda *_: None)
    report, *_ = finished(root, tmp_path, "{")
    with open(report.path, encoding="utf-8") as file:
        assert "<html" in file.read()

"""The exit step of a sweep writes jobs, table and report after any outcome."""

import json

from flotilla.components import launchers
from flotilla.components.sweeps import finish_sweep
from flotilla.trainer import storage
from flotilla.trainer.runtime.errors import UserError
from flotilla.trainer.runtime.json_records import tree_of
from tests.components.called_steps import artifact_in, ended
from tests.trainer.sweeps.test_sweep import a_sweep

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

"""The exit step of a run whose training cluster was a TFJob."""

from __future__ import annotations

from pathlib import Path

import pytest
from kfp import dsl

from components import locations, steps
from tests.components.called_steps import ended as final
from tests.trainer.page import Page
from trainer import events, storage

RUN = "digits-1"


@pytest.fixture(autouse=True)
def happened(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))
    monkeypatch.setenv(locations.RUN_FOLDER, str(tmp_path))
    return lambda: list(events.read(path))


def finish(tmp_path, kubernetes):
    root = storage.uri_of(tmp_path / "root")
    artifact = dsl.HTML(uri=str(tmp_path / "artifact"))
    summary = dsl.Markdown(uri=str(tmp_path / "summary"))
    steps.finish(final("FAILED"), root, "tfjob", kubernetes, RUN, artifact, summary)


def report(tmp_path):
    return Page((tmp_path / "root" / RUN / "report.html").read_text(encoding="utf-8")).words


def test_a_job_that_cannot_be_ended_fails_the_step_and_the_report_stands(
    tmp_path, monkeypatch, happened
):
    monkeypatch.setenv("KUBECONFIG", str(Path("/nowhere")))
    with pytest.raises(SystemExit) as ended:
        finish(tmp_path, "{}")
    assert ended.value.code == 1
    assert happened()[-1]["error"].startswith("no Kubernetes API to launch on")
    assert report(tmp_path)


def test_settings_that_were_refused_have_launched_nothing(tmp_path, happened):
    finish(tmp_path, "{nothing: known}")
    assert happened()[-1]["status"] == "done"
    assert report(tmp_path)

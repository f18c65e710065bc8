"""Tests that the exit step writes the report, and reports a training job that it cannot end."""

from pathlib import Path

import pytest
from kfp import dsl

from flotilla.components import finish
from flotilla.components.records import run_store
from flotilla.trainer import storage
from tests.components.called_steps import RUN, ended, refused
from tests.trainer.page import Page

pytestmark = pytest.mark.usefixtures("emitted")
LOCAL = {"cluster": {"launcher": "local"}}


@pytest.fixture
def artifacts(tmp_path):
    return dsl.HTML(uri=str(tmp_path / "report")), dsl.Markdown(uri=str(tmp_path / "summary"))


def page(root):
    return Page(storage.read_bytes(storage.join(root, RUN, "report.html")).decode())


def test_the_report_is_published_with_the_run_in_the_ui_and_on_this_machine(
    root, artifacts, tmp_path, emitted
):
    finish.finish.python_func(ended("SUCCEEDED"), root, LOCAL, RUN, *artifacts)
    uri = storage.join(root, RUN, "report.html")
    assert emitted()[-1].uri == uri
    written = storage.read_bytes(uri)
    assert written == Path(artifacts[0].path).read_bytes()
    assert written == (tmp_path / "folder" / "report.html").read_bytes()
    assert page(root).verdict == "done"
    text = Path(artifacts[1].path).read_text(encoding="utf-8")
    assert text.startswith(f"# {RUN}: done\n")
    assert f"Full report: `{uri}`" in text


def test_a_pod_leaves_nothing_in_the_temporary_folder(root, artifacts, tmp_path, monkeypatch):
    monkeypatch.delenv(run_store.RUN_FOLDER)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    finish.finish.python_func(ended("SUCCEEDED"), root, LOCAL, RUN, *artifacts)
    assert page(root).verdict == "done"
    assert not list((tmp_path / "temporary").iterdir())


def test_a_failure_before_there_is_a_root_is_not_hidden(artifacts, emitted):
    finish.finish.python_func(ended("FAILED"), "", LOCAL, RUN, *artifacts)
    assert emitted()[-1].status == "done"
    assert Page(Path(artifacts[0].path).read_text(encoding="utf-8")).verdict == "failed"


def test_a_root_that_cannot_be_written_is_one_line(artifacts, tmp_path, capsys):
    (tmp_path / "root").write_text("", encoding="utf-8")
    root = storage.uri_of(tmp_path / "root")
    given = (ended("FAILED"), root, LOCAL, RUN, *artifacts)
    code, line = refused(finish.finish.python_func, *given, capsys=capsys)
    assert code == 1
    assert line.startswith("cannot write ")
    assert Page((tmp_path / "folder" / "report.html").read_text(encoding="utf-8")).words


def test_a_store_that_is_out_for_too_long_fails_no_run_that_is_done(
    root, artifacts, tmp_path, monkeypatch, caplog
):
    real = storage.write_bytes

    def write(uri, data):
        if uri.endswith("report.html") and uri.startswith(root):
            raise storage.Unavailable("the store has not been available for 300 s")
        real(uri, data)

    monkeypatch.setattr(storage, "write_bytes", write)
    monkeypatch.setenv(run_store.RUN_ID, RUN)
    finish.finish.python_func(ended("SUCCEEDED"), root, LOCAL, RUN, *artifacts)
    page = tmp_path / "folder" / "report.html"
    assert f"the report could not be published and remains at {page}: the store has" in caplog.text
    assert Page(page.read_text(encoding="utf-8")).verdict == "done"


def test_a_job_that_cannot_be_ended_fails_the_step_and_leaves_a_report(
    root, artifacts, monkeypatch, emitted
):
    monkeypatch.setenv("KUBECONFIG", str(Path("/nowhere")))
    with pytest.raises(SystemExit) as stopped:
        finish.finish.python_func(
            ended("FAILED"), root, {"cluster": {"launcher": "tfjob"}}, RUN, *artifacts
        )
    assert stopped.value.code == 1
    assert emitted()[-1].error.startswith("cannot find a Kubernetes API")
    assert page(root)


def test_settings_that_were_refused_have_launched_nothing(root, artifacts, emitted):
    refused = {"cluster": {"launcher": "tfjobs"}}
    finish.finish.python_func(ended("FAILED"), root, refused, RUN, *artifacts)
    assert emitted()[-1].status == "done"
    assert page(root)

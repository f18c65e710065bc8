"""Tests the records of a step: its events, its one-line errors and its exit codes."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from kfp import dsl

from flotilla.components import export_model, finish
from flotilla.components.records import record, run_store
from flotilla.components.records.record import STOPPING, record_stage, run_stage
from flotilla.components.records.step_record import PublishedRecord, read, step_records
from flotilla.trainer import events, storage
from flotilla.trainer.evaluation import evaluate
from flotilla.trainer.events import StepBegin, StepEnd, WorkProgress
from flotilla.trainer.events.run_state import reduce_events
from flotilla.trainer.runtime.errors import (
    ClusterLostError,
    ConfigError,
    RunInterruptedError,
    UserError,
)
from tests.components.called_steps import RUN, artifact_in, ended, gated, text_of
from tests.trainer.page import Page

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ROOT = Path(__file__).parents[3]
BEGINS = """
import sys
from flotilla.components.records.record import record_stage

with record_stage(sys.argv[1]):
    print("at work", flush=True)
    {body}
print("went on", flush=True)
"""
# `signal.pause` would miss a signal that arrives just before the call.
WORKS = "while True: pass"


@pytest.fixture
def emitted(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))
    return lambda: list(events.read(path))


@pytest.fixture
def start(tmp_path):
    started = []

    def begin(step, body, **environment):
        env = {**os.environ, events.VARIABLE: str(tmp_path / "events.jsonl"), **environment}
        process = subprocess.Popen(
            [sys.executable, "-c", BEGINS.format(body=body), step],
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_step_that_is_done(emitted, capsys):
    with record_stage("train_model") as record:
        # The event of the start is emitted before the work begins.
        assert [type(event) for event in emitted()] == [StepBegin]
        record.output.done("file:///c", {"global_step": 7})
    begin, end = emitted()
    assert begin == StepBegin(step="train_model")
    assert end == StepEnd(
        step="train_model",
        status="done",
        seconds=end.seconds,
        metrics={"global_step": 7},
        uri="file:///c",
        output="checkpoint",
    )
    assert end.seconds >= 0
    assert not "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (UserError("no space"), "failed", 1),
        (ConfigError("no such key"), "failed", 2),
        (RunInterruptedError("interrupted at 7"), "interrupted", 130),
        (ClusterLostError("worker-0 is gone"), "failed", 138),
    ],
)
def test_an_error_of_the_user_is_one_line_and_a_code(emitted, capsys, error, status, code):
    def work():
        with record_stage("train_model") as record:
            record.output.metrics = {"so far": 1}
            raise error

    with pytest.raises(SystemExit) as ended:
        work()
    assert ended.value.code == code
    assert ended.value.__suppress_context__
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"flotilla: train_model: {error}\n")
    end = emitted()[-1]
    assert (end.status, end.exit_code, end.error) == (status, code, str(error))
    assert end.metrics == {"so far": 1}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/kfp/page"),
            "cannot write /kfp/page: No space left on device; free some space, or set TMPDIR",
        ),
        # An error about an already open file contains no file name.
        (
            OSError(errno.EDQUOT, "Disk quota exceeded"),
            "cannot write below /t: Disk quota exceeded; free some space, or set TMPDIR",
        ),
    ],
)
def test_a_full_disk_is_one_line_wherever_a_stage_writes(emitted, capsys, monkeypatch, error, line):
    def work(_output):
        raise error

    monkeypatch.setattr(record.tempfile, "gettempdir", lambda: "/t")
    # This test file would otherwise count as user code.
    monkeypatch.setattr(record, "find_traceback", lambda _error: "")
    with pytest.raises(SystemExit) as ended:
        run_stage("check_gate", "", work)
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"flotilla: check_gate: {line}\n"
    assert (emitted()[-1].status, emitted()[-1].error) == ("failed", line)


def test_a_bug_is_recorded_and_raised(emitted, capsys, tmp_path):
    at = storage.uri_of(tmp_path)
    step, bug = record_stage("prepare_data", at), ZeroDivisionError("by\nzero")
    step.__enter__()
    # Without a traceback, no frame of this test file can count as user code.
    assert not step.__exit__(ZeroDivisionError, bug, None)
    end = emitted()[-1]
    assert (end.status, end.exit_code, end.traceback) == ("failed", 1, "")
    assert end.error == written(at)["error"] == "bug in prepare_data: ZeroDivisionError: by zero"
    assert not "".join(capsys.readouterr())


def test_an_error_in_the_users_code_is_a_line_with_its_place_and_a_traceback(
    emitted, capsys, caplog
):
    with pytest.raises(SystemExit) as ended, record_stage("evaluate_model"):
        raise ZeroDivisionError("by\nzero")
    assert ended.value.code == 1
    end = emitted()[-1]
    assert re.fullmatch(
        r"your code raised ZeroDivisionError: by \(.*test_record\.py:\d+\)", end.error
    )
    assert capsys.readouterr().err == f"flotilla: evaluate_model: {end.error}\n"
    assert end.traceback.startswith("Traceback (most recent call last):\n")
    assert end.traceback in caplog.text


@pytest.mark.parametrize("given", [0, 3, None, "no such class"])
def test_sys_exit_in_the_users_code_is_an_error_of_the_users_code(emitted, capsys, given):
    with pytest.raises(SystemExit) as ended, record_stage("export_model"):
        sys.exit(given)
    # The given exit code is ignored, because nothing was exported.
    assert ended.value.code == 1
    end = emitted()[-1]
    assert (end.status, end.exit_code) == ("failed", 1)
    assert re.fullmatch(r"your code raised SystemExit.* \(.*test_record\.py:\d+\)", end.error)
    assert capsys.readouterr().err == f"flotilla: export_model: {end.error}\n"


def test_a_sys_exit_that_is_not_the_users_is_an_end_too(emitted):
    step = record_stage("check_gate")
    step.__enter__()
    with pytest.raises(SystemExit) as ended:
        step.__exit__(SystemExit, SystemExit(0), None)
    assert ended.value.code == 1
    assert emitted()[-1].error == "bug in check_gate: SystemExit: 0"


def test_a_message_on_a_full_disk_hides_neither_the_record_nor_the_exit_code(tmp_path):
    at = (tmp_path / "root" / "0b7c").as_uri()
    body = (
        "import sys\nfrom flotilla.components.records.record import record_stage\n"
        "from flotilla.trainer.runtime.errors import UserError\n"
        "with record_stage('train_model', sys.argv[1]): raise UserError('no space')\n"
    )
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-c", body, at], cwd=ROOT, stderr=full, check=False
        )
    # A traceback or a failed flush must not change the exit code.
    assert process.returncode == 1
    (found,) = read(at, well=False)
    assert (found.status, found.error) == ("failed", "no space")


def test_signals_are_as_they_were_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with record_stage("prepare_data"):
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


def test_without_a_file_the_events_go_to_the_log(monkeypatch, caplog):
    monkeypatch.delenv(events.VARIABLE, raising=False)
    with caplog.at_level("INFO"), record_stage("prepare_data"):
        pass
    assert [record.name for record in caplog.records] == ["flotilla.trainer.events"] * 2


# A library may catch every exception and go on.
CATCHES = "while True:\n        try: len(str(10**999))\n        except Exception: pass"


@pytest.mark.parametrize(
    ("body", "number"),
    [(WORKS, signal.SIGTERM), (CATCHES, signal.SIGTERM), (CATCHES, signal.SIGINT)],
)
def test_a_signal_interrupts_the_step(start, emitted, body, number):
    process = start("prepare_data", body)
    assert process.stdout.readline().endswith("at work\n")
    process.send_signal(number)
    out, err = process.communicate()
    assert process.returncode == 130
    assert err == "flotilla: prepare_data: interrupted before the step was finished\n"
    assert not out
    assert emitted()[-1].status == "interrupted"
    assert emitted()[-1].error == "interrupted before the step was finished"


def test_a_step_that_is_killed_leaves_its_begin_alone(start, emitted):
    process = start("prepare_data", WORKS)
    assert process.stdout.readline().endswith("at work\n")
    process.kill()
    process.communicate()
    assert [type(event) for event in emitted()] == [StepBegin]
    assert step_records(reduce_events(emitted()))[0].error.startswith(
        "the step was killed, or user code "
    )


BETWEEN = """
import os, signal
from flotilla.components import prepare_data
from flotilla.components.records import record

def begin(step):
    step.stage("resolve_config", lambda _stage: None)
    os.kill(os.getpid(), signal.SIGTERM)
    while True: pass

begin.__module__ = "flotilla.components.prepare_data"
record.run(begin, {"root": "", "run_id": ""})
"""


def test_a_request_that_comes_between_two_stages_is_on_record_as_the_end_of_the_next(
    tmp_path, emitted
):
    env = {**os.environ, events.VARIABLE: str(tmp_path / "events.jsonl")}
    ended = subprocess.run(
        [sys.executable, "-c", BETWEEN], cwd=ROOT, env=env, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 130
    assert ended.stderr == "flotilla: prepare_data: interrupted before the step was finished\n"
    ends = [each for each in emitted() if isinstance(each, StepEnd)]
    assert [(each.step, each.status) for each in ends] == [
        ("resolve_config", "done"), ("prepare_data", "interrupted"),
    ]  # fmt: skip


@pytest.mark.parametrize(("step", "code"), [("train_model", 130), ("finish", 0)])
def test_an_end_that_was_asked_for_between_two_steps_stops_all_but_the_exit_step(
    start, emitted, step, code
):
    process = start(step, "pass", **{STOPPING: "1"})
    out, _ = process.communicate()
    assert process.returncode == code
    assert out.endswith("at work\nwent on\n") == (code == 0)
    assert bool(out) == (code == 0)
    assert [type(event) for event in emitted()] == [StepBegin, StepEnd]
    assert emitted()[-1].status == ("interrupted" if code else "done")


NO_SPACE = "no space is left on the node"


class Run:
    """A run in which every step has its own pod; a step fails and is retried."""

    def __init__(self, trained, root, folder):
        self.trained, self.root, self._folder = trained, root, folder

    def judged(self, accuracy=0.1):
        return gated(self.trained, self.root, self._folder, accuracy)

    def exported(self, decision):
        given = (text_of(self.trained, accuracy=0.1), self.root, RUN)
        inputs = (self.trained.dataset, self.trained.checkpoint, decision, "our/image:2")
        outputs = (artifact_in(self._folder, dsl.Model), artifact_in(self._folder, dsl.Model))
        return export_model.export_model.python_func(*given, *inputs, *outputs)

    def finished(self):
        """Run the exit step once, after the first failure, as KFP does."""
        artifacts = [
            SimpleNamespace(uri=storage.uri_of(self._folder / name), path=str(self._folder / name))
            for name in ("report", "summary")
        ]
        finish.finish.python_func(ended("FAILED"), self.root, {}, RUN, *artifacts)

    def page(self):
        published = storage.read_bytes(storage.join(self.root, RUN, "report.html"))
        assert (self._folder / "report").read_bytes() == published
        page = Page(published.decode())
        assert f"{RUN}: {page.verdict}" in (self._folder / "summary").read_text(encoding="utf-8")
        return page


@pytest.fixture
def failed(run, root, tmp_path, monkeypatch):
    """Return a run whose evaluation failed and whose report says so."""
    for name in (run_store.RUN_ID, run_store.RUN_FOLDER, events.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    made = Run(run, root, tmp_path)

    def fail(*_):
        raise UserError(NO_SPACE)

    with monkeypatch.context() as broken:
        broken.setattr(evaluate, "evaluate", fail)
        with pytest.raises(SystemExit):
            made.judged()
    made.finished()
    page = made.page()
    assert page.verdict == "failed"
    assert f"evaluate_model: {NO_SPACE}" in page.text
    return made


@pytest.mark.slow
def test_a_run_that_is_promoted_then_has_a_report_that_says_so(failed):
    word, decision = failed.judged(0.1)
    assert word == "blessed"
    assert failed.page().verdict == "running"
    assert failed.exported(decision) == "promoted"
    page = failed.page()
    assert page.verdict == "blessed"
    assert NO_SPACE not in page.text
    assert "in 1 earlier try" in page.text


def test_both_tries_are_on_the_time_line(failed):
    failed.judged(0.1)
    page = failed.page()
    assert [each for each in page.words if each.startswith("evaluate_model, try")] == [
        "evaluate_model, try 1", "evaluate_model, try 2",
    ]  # fmt: skip
    assert page.attributes.count(("class", "bad")) == 1


def test_the_report_is_that_of_the_running_try_and_then_of_its_failure(failed):
    def work():
        with record_stage("evaluate_model", run_store.find_run(failed.root, RUN)):
            page = failed.page()
            assert page.verdict == "running"
            assert NO_SPACE not in page.text
            raise UserError("no memory")

    with pytest.raises(SystemExit):
        work()
    page = failed.page()
    assert page.verdict == "failed"
    assert "evaluate_model: no memory" in page.text
    assert NO_SPACE not in page.text


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_refusal_is_an_end_even_if_the_report_cannot_be_written(failed, capsys, is_writable):
    page = storage.local_path(storage.join(failed.root, RUN, "report.html"))
    if not is_writable:
        page.unlink()
        page.mkdir()
    assert failed.judged(1.0)[0] == "refused"
    said = "flotilla: the report could not be published: cannot write "
    assert (said in capsys.readouterr().err) is not is_writable
    if is_writable:
        assert failed.page().verdict == "refused"


def test_in_a_run_that_goes_on_no_step_writes_a_report(failed):
    other = f"{RUN}-2"
    with record_stage("evaluate_model", run_store.find_run(failed.root, other)):
        pass
    assert storage.names(storage.join(failed.root, other)) == ["steps"]


@pytest.mark.parametrize(("error", "code"), [(ConfigError, 2), (UserError, 1)])
def test_the_pod_ends_with_the_cause_where_no_record_can_be_written(
    tmp_path, monkeypatch, error, code
):
    left = tmp_path / "termination-log"
    left.touch()
    monkeypatch.setattr(record, "TERMINATION_LOG", left)
    with pytest.raises(SystemExit) as ended, record_stage("train_model"):
        raise error("s3://b: no credentials,\nor wrong ones at https://me:hush@store")
    assert ended.value.code == code
    [line] = left.read_text().splitlines()
    assert line.startswith("train_model: s3://b: no credentials")
    assert "hush" not in line


def test_outside_of_a_container_there_is_no_message(tmp_path, monkeypatch):
    absent = tmp_path / "termination-log"
    monkeypatch.setattr(record, "TERMINATION_LOG", absent)
    with pytest.raises(SystemExit), record_stage("train_model"):
        raise UserError("no room")
    assert not absent.exists()


def written(at):
    return json.loads(storage.read_bytes(storage.join(at, "steps", "prepare_data.json")))


def test_a_stage_that_goes_on_says_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "PROGRESS_SECONDS", 0.01)
    seen, write = threading.Event(), PublishedRecord.progress

    def progress(published, metrics):
        write(published, metrics)
        seen.set()

    monkeypatch.setattr(PublishedRecord, "progress", progress)
    at = storage.uri_of(tmp_path)
    with record_stage("prepare_data", at) as course:
        events.emit(WorkProgress(what="reading", unit="rows", done=3, total=4, share=0.75))
        assert seen.wait(10)
        found = written(at)
        course.output.done("gs://b/d", {"train": 4})
    assert (found["status"], found["ended"]) == ("running", None)
    assert found["metrics"] == {
        "progress": "reading: 75 %  3/4 rows", "share": 0.75, "seconds_left": -1.0,
    }  # fmt: skip
    assert written(at)["metrics"] == {"train": 4}

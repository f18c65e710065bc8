"""Tests that Ctrl-C while waiting for a run ends the command but not the run."""

import json
import os
import signal
import subprocess
import threading

import pytest

from flotilla.pipelines.runs import kfp_outcome, kfp_watch
from flotilla.pipelines.runs.kfp_client import READ_SECONDS
from flotilla.pipelines.runs.kfp_run import Nodes, RemoteRun, Step
from tests.pipelines.called import FLOTILLA

SECONDS = 120
# A time limit in seconds that is shorter than the client's timeout for a hung instance.
SOON = READ_SECONDS - 1
SECRET = "ey-secret-0123456789"


@pytest.fixture
def calling(instance, tmp_path):
    """Return a function that starts `flotilla` on the instance; its processes end with the test."""
    processes = []

    def start(*words):
        process = subprocess.Popen(
            [FLOTILLA, *words],
            cwd=tmp_path,
            env={**os.environ, "KF_PIPELINES_ENDPOINT": instance.url, "KFP_EXISTING_TOKEN": SECRET},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def submit(tmp_path):
    """Return the words of a submission; with a program, no model is tried, which takes seconds."""
    (tmp_path / "own.yaml").write_text("program: {command: [python3]}\n")
    return "submit", "own.yaml", "--wait"


def begun(instance):
    looked = threading.Event()

    def look(workflow, run):
        if run["state"] == "PENDING":
            run["state"] = "RUNNING"
            workflow.begin("train_model")
            workflow.write("train_model", "a line\n")
        looked.set()

    instance.store.play = [look] * 1000
    return looked


@pytest.mark.usefixtures("uploaded")
def test_of_submit_that_waits(instance, calling, submit):
    looked = begun(instance)
    process = calling(*submit, "--json")
    assert looked.wait(SECONDS)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    [run_id] = instance.store.runs
    cancel = f"flotilla cancel {run_id} --endpoint {instance.url}"
    words = f"interrupted; the run {run_id} continues; cancel it with: {cancel}"
    assert err.splitlines()[-1] == f"flotilla: {words}"
    answer = json.loads(out.splitlines()[-1])
    assert (answer["status"], answer["message"]) == ("interrupted", words)
    assert answer["run_id"] == run_id
    assert instance.store.runs[run_id]["state"] == "RUNNING"
    assert not instance.asked("terminate")
    assert SECRET not in out + err
    assert "Traceback" not in err


@pytest.mark.usefixtures("uploaded")
def test_of_logs(instance, calling, remote):
    assert remote("submit").code == 0
    looked = begun(instance)
    [run_id] = instance.store.runs
    process = calling("logs", run_id, "-f")
    assert looked.wait(SECONDS)
    assert process.stdout.readline().split(None, 1) == ["train_model", "a line\n"]
    # All commands that wait handle SIGINT and SIGTERM in the same way.
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert f"the run {run_id} continues; cancel it with: flotilla cancel {run_id}" in err
    assert instance.store.runs[run_id]["state"] == "RUNNING"


@pytest.mark.parametrize(
    ("request_that_hangs", "said"),
    [
        ("GET .*/runs/[^/]+$", "continues; cancel it with"),
        ("POST .*/runs$", "the run may have started; check with `flotilla runs`"),
    ],
)
@pytest.mark.usefixtures("uploaded")
def test_while_the_instance_hangs(instance, calling, submit, request_that_hangs, said):
    instance.faults.add(request_that_hangs, -1, late=True)
    process = calling(*submit)
    while not instance.asked(request_that_hangs):
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SOON)
    assert process.returncode == 130
    assert said in err.splitlines()[-1]


@pytest.mark.slow
def test_retries_are_not_printed_one_by_one(instance, calling, uploaded):
    instance.faults.add("GET .*/pipelines", 503, times=2)
    instance.has_ui = True
    process = calling("submit")
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, uploaded
    [run_id] = instance.store.runs
    [version] = instance.store.versions
    link = f"run {run_id}\n{instance.url}/#/runs/details/{run_id}\n"
    assert err == f"{link}version {uploaded} ({version}) of flotilla-training\n"


@pytest.mark.slow
@pytest.mark.usefixtures("uploaded")
def test_a_reader_that_goes_away(instance, calling, remote):
    assert remote("submit").code == 0
    [run_id] = instance.store.runs
    workflow = instance.store.workflows[run_id]
    workflow.begin("train_model")
    workflow.write("train_model", "line\n" * 100000)
    instance.store.end_run(run_id, "SUCCEEDED")
    process = calling("logs", run_id)
    assert process.stdout.readline().endswith("  line\n")
    process.stdout.close()
    err = process.stderr.read()
    assert process.wait(SECONDS) == 0
    assert "Traceback" not in err


def test_records_that_cannot_be_read_for_now_are_read_later(monkeypatch):
    record, now = object(), [0.0]
    found = [None, {"train_model": record}]
    monkeypatch.setattr(kfp_outcome, "find_running_stages", lambda _client, _run: found.pop(0))
    monkeypatch.setattr(kfp_watch.time, "monotonic", lambda: now[0])
    step = Step(name="train_model", state="RUNNING", began=None, ended=None)
    run = RemoteRun(
        run_id="r", name="r", state="RUNNING", created=None, finished=None, error="",
        nodes=Nodes(steps=(step,)),
    )  # fmt: skip
    stages, seen = kfp_watch._Stages(None), []
    for now[0] in (0.0, kfp_watch.STAGE_SECONDS, kfp_watch.UNREAD_SECONDS):
        seen.append(stages.look(run).doing)
    assert seen == [{}, {}, {"train_model": record}]

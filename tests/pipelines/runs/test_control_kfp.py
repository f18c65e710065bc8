"""Tests `flotilla runs`, `status`, `logs`, `open` and `cancel` on a KFP instance."""

import re

import pytest

from flotilla.pipelines.cli import runs as commands

pytestmark = pytest.mark.usefixtures("uploaded")


@pytest.fixture
def started(instance, remote, uploaded):
    assert uploaded
    assert remote("submit", "--name", "mine").code == 0
    [run_id] = instance.store.runs
    instance.store.runs[run_id]["state"] = "RUNNING"
    instance.requests.clear()
    return run_id


@pytest.fixture
def workflow(instance, started):
    return instance.store.workflows[started]


def test_runs_newest_first_over_pages(instance, remote):
    remote("submit", "--name", "first")
    [run] = instance.store.runs.values()
    for number in range(130):
        more = {**run, "run_id": f"id-{number}", "display_name": f"n{number}"}
        more["created_at"] = f"2026-02-01T{number // 60:02}:{number % 60:02}:00Z"
        instance.store.runs[f"id-{number}"] = more
    answer = remote("runs", "--limit", "125", "--json")
    assert answer.code == 0
    names = [row["name"] for row in answer.json["runs"]]
    assert names == [f"n{number}" for number in range(129, 4, -1)]
    sizes = [re.search(r"page_size=(\d+)", each)[1] for each in instance.asked("GET .*/runs")]
    assert sizes == ["100", "25"]
    instance.requests.clear()
    assert len(remote("runs", "--json").json["runs"]) == 20
    [request] = instance.asked("GET .*/runs")
    assert "page_size=20&" in request
    assert remote("runs", "--limit", "200", "--json").json["runs"][-1]["name"] == "first"


def test_runs_are_reported_whole_and_by_experiment(remote, started):
    [line] = [line for line in remote("runs").out.splitlines() if started in line]
    assert {"running", "mine"} <= set(line.split())
    remote("submit", "--name", "other", "--experiment", "others")
    answer = remote("runs", "--experiment", "others", "--json")
    assert [row["name"] for row in answer.json["runs"]] == ["other"]
    answer = remote("runs", "--experiment", "other")
    assert (answer.code, answer.err.count("\n")) == (1, 1)
    assert "has no experiment 'other'; did you mean 'others'?" in answer.err


def test_no_runs_and_runs_of_a_namespace(instance, remote):
    assert remote("runs").out == f"no runs at {instance.url}\n"
    instance.multi_user = True
    assert "--namespace" in remote("runs").err
    assert remote("runs", "-n", "me").code == 0
    assert "namespace=me" in instance.requests[-1]


def test_status_of_a_run_that_goes_on(remote, started, workflow):
    for stage in ("prepare_data", "validate_data"):
        workflow.begin(stage)
        workflow.end(stage)
    workflow.begin("train_model")
    answer = remote("status", started, "--json")
    assert answer.code == 0
    assert answer.json["status"] == "running"
    assert answer.json["steps"] == {"prepare_data": "SUCCEEDED", "train_model": "RUNNING"}
    lines = [line.split()[:3] for line in answer.err.splitlines()]
    assert ["prepare_data", "prepare_data", "done"] in lines
    assert ["train_model", "train_model", "running"] in lines
    assert f"run {started}: running" in answer.err


def test_status_by_name_or_id(remote, started):
    assert started in remote("status", "mine").out
    remote("submit", "--name", "mine")
    for run, code, said in (
        ("mine", 2, "2 runs are named 'mine': use the id"),
        ("your", 2, "has no run 'your'; see `flotilla runs`"),
        ("00000000-0000-0000-0000-000000000000", 1, "answered 404"),
    ):
        answer = remote("status", run)
        assert (answer.code, answer.err.count("\n"), said in answer.err) == (code, 1, True)


def test_a_run_that_never_began_has_no_steps(instance, remote, started):
    instance.store.workflows[started].nodes.clear()
    assert remote("status", started).code == 0
    instance.store.end_run(started, "FAILED")
    answer = remote("status", started, "--json")
    said = "KFP gives no reason for the failure; the storage root of the run is unknown"
    assert (answer.json["status"], answer.json["message"]) == ("failed", said)


@pytest.mark.parametrize("has_ui", [False, True])
def test_logs_of_all_steps_in_order(instance, remote, has_ui):
    instance.has_ui = has_ui
    remote("submit")
    [run_id] = instance.store.runs
    workflow = instance.store.workflows[run_id]
    for step in ("prepare_data", "train_model"):
        workflow.begin(step)
        workflow.write(step, f"words of {step}\n")
        workflow.end(step)
    instance.store.end_run(run_id, "SUCCEEDED")
    answer = remote("logs", run_id)
    assert answer.code == 0
    lines = [line.split(None, 1) for line in answer.out.splitlines() if "words of" in line]
    assert lines == [[step, f"words of {step}"] for step in ("prepare_data", "train_model")]
    assert answer.err == ""
    answer = remote("logs", run_id, "--step", "train-model")
    assert "words of train_model" in answer.out
    assert "prepare_data" not in answer.out


def test_logs_are_followed_without_saying_anything_twice(instance, remote, started):
    def begin(workflow, _run):
        workflow.begin("train_model")

    def write(text):
        return lambda workflow, _run: workflow.write("train_model", text)

    def end(workflow, run):
        workflow.end("train_model")
        run["state"] = "SUCCEEDED"

    instance.store.play = [
        begin, write("one\n"), write("tw"), write("o\nthree\n"), write("four"), end,
    ]  # fmt: skip
    answer = remote("logs", started, "-f")
    assert answer.code == 0
    lines = [line.split()[1] for line in answer.out.splitlines() if "train_model" in line]
    assert lines[:3] == ["one", "two", "three"]
    assert lines[3].startswith("four")


@pytest.mark.slow
def test_a_log_that_is_gone_is_reported_and_the_others_are_printed(
    instance, remote, started, workflow
):
    for step in ("prepare_data", "train_model"):
        workflow.begin(step)
        workflow.end(step)
    gone = workflow.pod("prepare_data")
    del workflow.logs[gone]
    instance.store.end_run(started, "SUCCEEDED")
    answer = remote("logs", started)
    assert answer.code == 0
    assert "error_message" not in answer.out
    assert "train_model     done in 1.5 s" in answer.out
    [line] = [line for line in answer.err.splitlines() if "read the log of prepare_data" in line]
    records = f"{workflow.root}/{started}/steps"
    assert f'pods "{gone}" not found' in line
    assert line.endswith(f"the step's records are below {records}")


def test_a_log_that_is_not_there_yet_has_a_command(instance, remote, started, workflow):
    workflow.begin("train_model")
    instance.has_logs = False
    answer = remote("logs", started)
    pod = workflow.pod("train_model")
    assert (answer.code, answer.out) == (1, "")
    assert f"read it with `kubectl logs -n kubeflow {pod} -c main`" in answer.err.splitlines()[-1]


def test_logs_a_day_later_are_those_of_the_archive(instance, remote, started, workflow):
    workflow.begin("train_model")
    workflow.write("train_model", "a word\n")
    workflow.end("train_model")
    instance.store.end_run(started, "SUCCEEDED")
    workflow.lose_pods()
    assert "  a word\n" in remote("logs", started).out


def test_without_an_archive_it_is_one_line_where_the_record_is(instance, remote, started, workflow):
    instance.has_ui = True
    workflow.begin("train_model")
    workflow.end("train_model")
    instance.store.end_run(started, "FAILED")
    workflow.lose_pods()
    answer = remote("logs", started)
    assert (answer.code, answer.out) == (1, "")
    records = f"{workflow.root}/{started}/steps"
    assert answer.err.splitlines()[-1] == (
        f"flotilla: {instance.url} returns no log of the run {started}; KFP removes the pods and "
        f"logs of a run some time after the run ends; the step's records are below {records}"
    )


def test_the_log_of_a_driver_that_failed_is_that_of_its_step(remote, started, workflow):
    workflow.fail_driver("train_model")
    answer = remote("logs", started, "--step", "train-model")
    assert (answer.code, "failed: no such bucket" in answer.out) == (0, True)


def test_a_log_that_is_forbidden_or_not_there(instance, remote, started, workflow):
    workflow.begin("train_model")
    answer = remote("logs", started, "--step", "train_modle")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert "no step 'train_modle'; did you mean 'train_model'?" in answer.err
    instance.faults.add("/log$", 403)
    answer = remote("logs", started)
    assert (answer.code, "answered 403" in answer.err) == (1, True)


def test_cancel_ends_it_once_and_says_where_to_look(instance, remote, started):
    instance.faults.add(":terminate", 403, times=1)
    answer = remote("cancel", started)
    assert (answer.code, answer.err.count("\n"), "answered 403" in answer.err) == (1, 1, True)
    answer = remote("cancel", started, "--json")
    assert (answer.code, answer.json["status"]) == (0, "canceling")
    assert instance.store.runs[started]["state"] == "CANCELING"
    assert f"flotilla status {started} --endpoint {instance.url}" in answer.err
    answer = remote("cancel", started, "--json")
    assert (answer.code, answer.json["status"]) == (0, "canceling")
    assert f"run {started} is already ending; check with: flotilla status {started}" in answer.err
    instance.store.end_run(started, "SUCCEEDED")
    answer = remote("cancel", started, "--json")
    assert (answer.code, answer.json["status"]) == (0, "ended")
    assert "has already ended: succeeded" in answer.err
    # Only the refused request and the first accepted one were sent.
    assert len(instance.asked("terminate")) == 2


@pytest.mark.parametrize(
    ("state", "words"),
    [("CANCELING", "is already ending"), ("SUCCEEDED", "has already ended: succeeded")],
)
def test_a_cancel_that_comes_too_late_is_no_error(instance, remote, started, state, words):
    def late(_workflow, _run):
        # The run ends between the query for it and the request to terminate it.
        instance.store.play = []
        body = b'{"message": "Failed to terminate a run. Row not found"}'
        instance.faults.add(":terminate", 400, body=body)
        instance.store.play = [lambda _w, run: run.update(state=state)]

    instance.store.play = [late]
    answer = remote("cancel", started)
    assert (answer.code, words in answer.err) == (0, True), answer.err


def test_a_run_neither_here_nor_there(remote, monkeypatch):
    monkeypatch.delenv("KF_PIPELINES_ENDPOINT")
    for verb in ("status", "logs", "open", "cancel"):
        answer = remote(verb, "nothing")
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert "no run 'nothing' below runs, and no KFP instance is given" in answer.err


def test_open_shows_the_page_of_a_run(instance, remote, started, monkeypatch):
    opened = []
    monkeypatch.setattr(commands, "open_page", lambda uri: not opened.append(uri))
    answer = remote("open", started)
    assert (answer.code, answer.out, opened) == (1, "", [])
    assert f"no link: {instance.url} serves only the API; set the URL of" in answer.err
    page = f"https://ui.example.com/#/runs/details/{started}"
    answer = remote("open", started, "--ui", "https://ui.example.com", "--json")
    assert (answer.code, answer.json["artifacts"], opened) == (0, {"run": page}, [page])
    assert (answer.json["run_id"], answer.json["opened"]) == (started, True)

"""Tests the states of the stages of a run on a KFP instance."""

import itertools
from types import SimpleNamespace

import pytest

from flotilla.components.records import step_record
from flotilla.pipelines.runs import control, kfp_outcome
from tests.pipelines.runs.test_kfp_outcome import PULL, begin, over


@pytest.fixture
def remote(remote, uploaded):  # noqa: ARG001
    return remote


@pytest.fixture
def run_id(instance, remote, tmp_path):
    root = (tmp_path / "mine").as_uri()
    assert remote("submit", "--set", f"storage.root={root}").code == 0
    [run_id] = instance.store.runs
    return run_id


@pytest.fixture
def workflow(instance, run_id):
    instance.store.runs[run_id]["state"] = "RUNNING"
    return instance.store.workflows[run_id]


@pytest.fixture
def rows(instance, remote, run_id):
    """Return a function that reads a run's status and stages; `state` ends the run first."""

    def read(state=""):
        if state:
            instance.store.end_run(run_id, state)
        found = control.status(run_id)
        return found.status, [(each.step, each.status) for each in found.steps]

    assert remote
    return read


def do(workflow, *stages):
    for stage in stages:
        workflow.begin(stage)
        workflow.end(stage, metrics={"decision": DECISIONS.get(stage)})


@pytest.fixture
def ended(instance, remote, run_id, workflow):
    """Return a function that completes stages of a run and returns the outcome of the run."""

    def end(stages, word, *, has_nodes=True):
        do(workflow, *stages[:-1])
        workflow.begin(stages[-1])
        workflow.end(stages[-1], metrics={"decision": word, "reasons": ["why"]})
        workflow.skip()
        do(workflow, "finish")
        instance.store.end_run(run_id, "SUCCEEDED")
        instance.has_v1beta1 = has_nodes
        return control.status(run_id)

    assert remote
    return end


DECISIONS = {"validate_data": "accepted", "check_gate": "blessed", "register_model": "promoted"}
PREPARED = ("resolve_config", "prepare_data", "validate_data")
EVALUATED = (*PREPARED, "train_model", "evaluate_model", "check_gate")
ALL = (*EVALUATED, "export_model", "register_model", "finish")


@pytest.mark.parametrize("has_old_steps", [False, True])
def test_a_run_of_four_or_nine_steps_shows_all_stages(workflow, rows, has_old_steps):
    workflow.has_old_steps = has_old_steps
    do(workflow, *ALL)
    assert rows("SUCCEEDED") == ("blessed", [(stage, "done") for stage in ALL])


def test_a_step_that_runs_shows_the_stage_that_it_is_at(remote, run_id, workflow, rows):
    do(workflow, "resolve_config")
    workflow.say_begin("prepare_data")
    workflow.say_progress("prepare_data", progress="reading the files: 43 %")
    assert rows() == ("running", [("resolve_config", "done"), ("prepare_data", "running")])
    [running] = [each for each in control.status(run_id).steps if each.status == "running"]
    assert running.metrics == {"progress": "reading the files: 43 %"}
    assert running.seconds > 0
    answer = remote("status", run_id, "--json")
    assert answer.json["steps"] == {"prepare_data": "RUNNING"}
    assert "reading the files: 43 %" in answer.err


def test_a_step_without_a_record_or_whose_pod_cannot_start_is_one_row(workflow, rows):
    workflow.begin("check_gate")
    assert rows() == ("running", [("evaluate_model", "running")])
    workflow.wait("train_model", PULL)
    assert rows()[1][-1] == ("train_model", "waiting")
    workflow.stop("check_gate", "FAILED", "main: OOMKilled (exit code 137)")
    assert ("evaluate_model", "failed") in rows("FAILED")[1]


def test_a_stage_without_an_end_has_failed_with_its_pod(remote, run_id, workflow, rows):
    do(workflow, "resolve_config", "prepare_data")
    workflow.say_begin("validate_data")
    workflow.stop("validate_data", "FAILED", "main: OOMKilled (exit code 137)")
    _, found = rows("FAILED")
    assert found == [
        ("resolve_config", "done"), ("prepare_data", "done"), ("validate_data", "failed"),
    ]  # fmt: skip
    message = remote("status", run_id, "--json").json["message"]
    assert message.startswith("validate_data: its pod failed (main: OOMKilled (exit code 137))")


def test_a_pod_that_was_lost_between_two_stages_has_failed_in_the_next(workflow, rows):
    do(workflow, *PREPARED, "train_model", "evaluate_model")
    workflow.stop("evaluate_model", "FAILED", "pod deleted")
    assert rows("FAILED")[1][-2:] == [("evaluate_model", "done"), ("check_gate", "failed")]


@pytest.mark.parametrize("stages", [(*EVALUATED[:4],), PREPARED])
def test_a_pod_that_failed_after_its_last_stage_has_failed_in_it(workflow, rows, stages):
    do(workflow, *stages[:-1])
    workflow.begin(stages[-1])
    workflow.say_begin(stages[-1])
    workflow.end(stages[-1], "FAILED", status="done", exit_code=0)
    assert rows("FAILED")[1][-1] == (stages[-1], "failed")


def test_a_pod_that_was_made_again_begins_with_the_first_stage(workflow, rows, monkeypatch):
    # In reality, a pod is never replaced within one millisecond, the time resolution of records.
    monkeypatch.setattr(step_record, "now", map(float, itertools.count(1)).__next__)
    do(workflow, "resolve_config", "prepare_data")
    workflow.say_begin("validate_data")
    workflow.lose_pod("prepare_data")
    workflow.try_again("prepare_data")
    workflow.say_begin("resolve_config")
    assert rows() == ("running", [("resolve_config", "running")])
    workflow.end("resolve_config")
    workflow.say_begin("prepare_data")
    assert rows() == ("running", [("resolve_config", "done"), ("prepare_data", "running")])


def test_a_mistake_of_the_user_is_2(instance, remote):
    def mistaken(workflow, _run):
        workflow.end("resolve_config", "FAILED", exit_code=2, error="no such column")

    instance.store.play = [begin("resolve_config"), mistaken, over("FAILED")]
    answer = remote("submit", "--wait", "--json")
    assert (answer.code, answer.json["status"]) == (2, "failed")
    assert answer.json["message"] == "resolve_config: no such column"


@pytest.mark.parametrize(
    ("stages", "word", "expected"),
    [
        (PREPARED[:1], "unchanged", ("unchanged", "why")),
        (PREPARED, "refused", ("refused", "why")),
        (PREPARED, "accepted", ("failed", "the data was accepted, but train_model did not run")),
        (EVALUATED[:4], "", ("done", "")),
        (EVALUATED, "refused", ("refused", "why")),
        (EVALUATED, "blessed",
         ("failed", "the model was blessed, but register_model did not run")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("has_nodes", [True, False])
def test_the_words_of_the_stages_say_what_became_of_a_run(ended, has_nodes, stages, word, expected):
    found = ended(stages, word, has_nodes=has_nodes)
    assert (found.status, found.message) == expected


def test_a_root_that_is_a_default_of_the_version_is_read(instance, workflow, rows, run_id):
    # A run's parameters contain only settings that differ from the defaults.
    del instance.store.runs[run_id]["runtime_config"]["parameters"]["storage_root"]
    do(workflow, *PREPARED)
    assert rows()[1] == [(stage, "done") for stage in PREPARED]


def test_a_run_of_nine_steps_that_goes_on(remote, run_id, workflow, rows):
    workflow.has_old_steps = True
    do(workflow, "resolve_config")
    workflow.begin("prepare_data")
    workflow.say_begin("prepare_data")
    assert rows() == ("running", [("resolve_config", "done"), ("prepare_data", "running")])
    workflow.end("prepare_data")
    workflow.begin("validate_data")
    workflow.stop("validate_data", "FAILED", "pod deleted")
    answer = remote("status", run_id, "--json")
    assert answer.json["steps"] == {
        "resolve_config": "SUCCEEDED", "prepare_data": "SUCCEEDED", "validate_data": "FAILED",
    }  # fmt: skip
    workflow.write("validate_data", "words of validate_data\n")
    assert "words of validate_data" in remote("logs", run_id, "--step", "validate-data").out


@pytest.mark.parametrize(
    ("stages", "word"),
    [(PREPARED[:1], "unchanged"), *((each, "refused") for each in (PREPARED, EVALUATED, ALL[:8]))],
)
def test_what_became_of_a_run_of_nine_steps(workflow, ended, stages, word):
    workflow.has_old_steps = True
    found = ended(stages, word)
    assert (found.status, found.message) == (word, "why")
    assert [each.step for each in found.steps] == [*stages, "finish"]


def test_the_exit_step_of_a_sweep_shows_the_record_and_the_report_of_finish():
    record = step_record.StepRecord(step="finish", status="done", began=1.0, ended=2.0, uri="r")
    step = SimpleNamespace(name="finish_sweep", state="SUCCEEDED", began=None, ended=None)
    published = kfp_outcome._Published(records={"finish": record})
    run = SimpleNamespace(steps=[step])
    assert kfp_outcome._rows(run, published) == {"finish_sweep": [record]}

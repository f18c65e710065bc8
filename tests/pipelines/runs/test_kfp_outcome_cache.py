"""A step that KFP took from its cache: what `submit`, `status` and `logs` say of it."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.usefixtures("uploaded")

DATASET = "gs://bucket/flotilla/datasets/digits-0123"
LINE = "flotilla: prepare_data was taken from KFP's cache: it did not run and has no log\n"


def cached(workflow, run):
    run["state"] = "RUNNING"
    workflow.take_from_cache("prepare_data")


def done(step, **record):
    def happen(workflow, _run):
        workflow.begin(step)
        workflow.write(step, f"words of {step}\n")
        workflow.end(step, **record)

    return happen


def over(state="SUCCEEDED"):
    def happen(_workflow, run):
        run["state"] = state

    return happen


BLESSED = (
    cached,
    done("train_model", inputs={"dataset": DATASET}, metrics={"global_step": 9}, uri="gs://b/c"),
    done("check_gate", metrics={"decision": "blessed", "reasons": []}),
    done("register_model", metrics={"decision": "promoted", "version": 3}),
    over(),
)


@pytest.fixture
def run_id(instance, remote):
    """A run that goes on."""
    assert remote("submit").code == 0
    [run_id] = instance.store.runs
    return run_id


@pytest.fixture
def play(instance, run_id):
    """Have things happen in the run."""

    def happen(*things):
        for thing in things:
            thing(instance.store.workflows[run_id], instance.store.runs[run_id])

    return happen


def test_the_dataset_is_what_later_steps_took(instance, remote):
    instance.store.play = [*BLESSED]
    answer = remote("submit", "--wait", "--json")
    assert (answer.code, answer.json["status"]) == (0, "blessed")
    assert answer.json["artifacts"]["dataset"] == DATASET
    assert answer.json["artifacts"]["checkpoint"] == "gs://b/c"
    assert answer.json["global_step"] == 9
    lines = answer.err.splitlines()
    [trained] = [line for line in lines if line.startswith("train_model done in ")]
    assert lines.index("prepare_data cached") < lines.index(trained)
    [row, *_] = [line for line in answer.out.splitlines() if line.startswith("prepare_data")]
    assert row.split()[:2] == ["prepare_data", "cached"]


def test_status_of_a_run_that_has_ended(remote, run_id, play):
    play(*BLESSED)
    answer = remote("status", run_id, "--json")
    assert answer.json["artifacts"]["dataset"] == DATASET
    assert any(line.split()[:2] == ["prepare_data", "cached"] for line in answer.out.splitlines())


def test_status_of_a_run_that_goes_on(remote, run_id, play):
    play(cached, lambda workflow, _run: workflow.begin("train_model"))
    answer = remote("status", run_id, "--json")
    words = [line.split()[:2] for line in answer.out.splitlines()]
    assert ["prepare_data", "cached"] in words
    assert ["train_model", "running"] in words
    assert answer.json["steps"] == {"prepare_data": "SUCCEEDED", "train_model": "RUNNING"}


def test_on_a_terminal_it_is_in_the_table(instance, remote, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    instance.store.play = [*BLESSED]
    answer = remote("submit", "--wait")
    assert answer.code == 0
    assert "cached" in answer.err


def test_a_dataset_that_no_step_names_is_not_made_up(remote, run_id, play):
    play(cached, done("train_model"), done("check_gate", metrics={"decision": "refused"}), over())
    answer = remote("status", run_id, "--json")
    assert "dataset" not in answer.json["artifacts"]
    [*_, row] = [line for line in answer.out.splitlines() if line.startswith("prepare_data")]
    assert "KFP's cache does not say" in row


def test_a_step_that_was_killed_has_said_what_it_took(remote, run_id, play):
    def killed(workflow, _run):
        workflow.begin("train_model")
        workflow.say_begin("train_model", {"dataset": DATASET})
        workflow.stop("train_model", "FAILED", "main: OOMKilled (exit code 137)")

    play(cached, killed, over("FAILED"))
    answer = remote("status", run_id, "--json")
    assert (answer.json["status"], answer.json["artifacts"]) == ("failed", {"dataset": DATASET})
    assert answer.json["message"].startswith("train_model: its pod failed (main: OOMKilled")


def test_logs_say_so_and_go_on_with_the_others(instance, remote):
    remote("submit")
    [run_id] = instance.store.runs
    for thing in BLESSED:
        thing(instance.store.workflows[run_id], instance.store.runs[run_id])
    answer = remote("logs", run_id)
    assert answer.code == 0
    assert answer.err == f"{LINE}--- train_model\n--- check_gate\n--- register_model\n"
    assert "words of train_model" in answer.out


def test_logs_that_are_followed_say_so_once(instance, remote, run_id):
    instance.store.play = [lambda _workflow, _run: None, *BLESSED]
    answer = remote("logs", run_id)
    assert (answer.code, answer.err.count(LINE)) == (0, 1)
    assert answer.err.splitlines()[1:] == [
        "--- train_model",
        "--- check_gate",
        "--- register_model",
    ]


def test_logs_of_that_step_alone(remote, run_id, play):
    play(*BLESSED)
    answer = remote("logs", run_id, "--step", "prepare-data", "--json")
    assert (answer.code, answer.err) == (0, LINE)
    assert len(answer.out.splitlines()) == 1
    assert answer.json["status"] == "succeeded"


def test_it_is_looked_for_only_until_its_pod_is_skipped(instance, remote, run_id):
    def on_its_way(workflow, run):
        cached(workflow, run)
        # Argo has looked at the group, and at no node in it.
        held.append(workflow.nodes.pop())
        for node in workflow.nodes[-2:]:
            node.update(phase="Running", finishedAt=None)

    def skipped(workflow, _run):
        for node in workflow.nodes[-2:]:
            node.update(phase="Succeeded", finishedAt=held[0]["finishedAt"])
        workflow.nodes.append(held.pop())

    held = []
    instance.store.play = [lambda _workflow, _run: None, on_its_way, skipped, *BLESSED[1:]]
    answer = remote("logs", run_id)
    assert answer.code == 0
    assert "no log of" not in answer.err
    assert answer.err.startswith(LINE)


def test_an_instance_without_logs_is_an_error_all_the_same(instance, remote, run_id, play):
    instance.has_logs = False
    play(*BLESSED)
    answer = remote("logs", run_id)
    assert answer.code == 1
    assert LINE in answer.err
    assert "no log of prepare_data" not in answer.err
    assert "gives no log of the run" in answer.err.splitlines()[-1]


def test_a_group_that_a_condition_skipped_is_no_cache(remote, run_id, play):
    play(
        done("check_gate", metrics={"decision": "refused", "reasons": ["too low"]}),
        lambda workflow, _run: workflow.skip(),
        over(),
    )
    answer = remote("status", run_id, "--json")
    assert answer.json["status"] == "refused"
    assert "cached" not in answer.out

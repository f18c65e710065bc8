"""Tests that a report is made from the records that exist, and never changes a run's outcome."""

import json
from dataclasses import replace

import pytest

from flotilla.components.records import gather_report
from flotilla.components.records.gather_report import cost, count_resources
from flotilla.components.records.step_record import StepRecord, Try
from flotilla.trainer import storage
from flotilla.trainer.checkpoints.history import VALIDATIONS_FILE
from flotilla.trainer.config.load import parse_config
from flotilla.trainer.config.schema import Config
from flotilla.trainer.events import (
    AttemptBegin,
    CheckpointPublished,
    Interrupted,
    Progress,
    Restart,
    RunBegin,
    TaskFailed,
    UserCodeFailed,
)
from flotilla.trainer.report.views import time_line
from tests.pipelines.step_events import begun, done, ended, write
from tests.trainer.page import Page

RUN = "digits-1"
METRICS = {"loss": 0.125, "accuracy": 0.9625}
RULES = {"metric": "accuracy", "bound": "min", "threshold": 0.95, "value": 0.9625, "passed": True}
ROWS = [{"global_step": 20 * i, "loss": 1 / i, "seconds": i} for i in range(1, 4)]


class Run:
    """The files that a run's steps leave: published directories, events and a configuration."""

    def __init__(self, folder):
        self.folder = folder / RUN
        self.folder.mkdir()
        self.root = storage.uri_of(folder / "röot")
        self.page_path = folder / "report.html"

    def events(self, *emitted):
        write(self.folder, emitted)

    def config(self, text):
        (self.folder / "config.json").write_text(text, encoding="utf-8")

    def publish(self, kind, name, tree, directory="step-00000060"):
        source = self.folder / f"{kind}-{directory}"
        source.mkdir()
        (source / name).write_text(json.dumps(tree), encoding="utf-8")
        uri = storage.join(self.root, RUN, kind, directory)
        storage.publish(source, uri, kind=kind)
        return storage.local_path(uri) / name

    def evaluated(self):
        return self.publish("evaluation", "metrics.json", {"metrics": METRICS, "split": "test"})

    def decided(self, word, rules=(RULES,), directory="step-00000060"):
        tree = {"decision": word, "rules": list(rules), "reasons": []}
        return self.publish("decision", "decision.json", tree, directory)

    def trained(self, rows=ROWS):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        uri = storage.join(self.root, RUN, "checkpoints", "history.jsonl")
        storage.write_bytes(uri, text.encode())

    def uri_of(self, path):
        return storage.uri_of(path.parent)

    def report(self, state):
        gather_report.write(state, self.root, RUN, self.folder, self.page_path)
        return Page(self.page_path.read_text(encoding="utf-8"))


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def verdict(page):
    assert page.words[0] == f"{RUN}: {page.verdict}"
    return page.verdict


def test_a_blessed_run(run):
    run.config(Config().model_dump_json())
    run.trained()
    run.events(
        *done("train_model", uri="file:///c", metrics={"global_step": 60}),
        *done("evaluate_model", uri=run.uri_of(run.evaluated())),
        *done("check_gate", uri=run.uri_of(run.decided("blessed"))),
        Restart(task="worker-1", cause="signal SIGKILL", restarts=1),
        AttemptBegin(global_step=0, steps=60, resumed=False),
        AttemptBegin(global_step=40, steps=60, resumed=True),
        Progress(global_step=40, steps=60, loss=1.0, steps_per_second=1.0, seconds_left=20.0),
        *done("export_model", uri="file:///m"),
        begun("finish"),
    )
    page = run.report("SUCCEEDED")
    assert verdict(page) == "blessed"
    assert page.heads() == [
        "Test metrics", "Rules of the gate", "Training", "Incidents", "Steps and lineage",
        "Configuration",
    ]  # fmt: skip
    for word in ("0.9625", "0.125", "at least", "file:///c", "signal SIGKILL"):
        assert word in page.text
    assert "async_parameter_server" in page.text
    assert "progress" not in page.words
    assert "attempt 2 begins" in page.words
    assert "attempt 3 begins" not in page.words


def test_a_task_that_was_given_up_is_named_with_its_end_and_its_last_lines(run):
    failed = TaskFailed(task="ps-0", cause="signal SIGSEGV", last_lines=("first <b>", "last"))
    run.events(
        begun("train_model"),
        failed,
        ended("train_model", "failed", 1, error="ps-0 ended with signal SIGSEGV"),
    )
    page = run.report("FAILED")
    assert "task ps-0, cause signal SIGSEGV" in page.text
    assert "first <b>\nlast" in page.text


@pytest.mark.parametrize("of_record", [False, True])
def test_the_traceback_of_the_users_code_is_folded(run, of_record):
    error, traceback = "bad shape (blocks.py:14)", "Traceback <b>\n  line"
    run.events(
        begun("train_model"),
        *([] if of_record else [UserCodeFailed(error=error, traceback=traceback)]),
        ended("train_model", "failed", 1, error=error, traceback=traceback if of_record else ""),
    )
    page = run.report("FAILED")
    assert "Traceback of train_model" in page.text
    assert "Traceback <b>\n  line" in page.text
    html = run.page_path.read_text(encoding="utf-8")
    assert html.index("<details><summary>Traceback of") < html.index("Traceback &lt;b&gt;")


def test_a_run_that_was_resumed_after_an_hour_has_the_tries_and_the_cost_of_both_starts(run):
    run.config(Config().model_dump_json())
    run.events(
        RunBegin(time=100.0, run_id=RUN, number=1),
        *done("prepare_data", time=110.0, seconds=10.0),
        begun("train_model", time=110.0),
        AttemptBegin(time=111.0, global_step=0, steps=60, resumed=False),
        CheckpointPublished(time=150.0, uri="file:///c", global_step=20),
        ended("train_model", "interrupted", 130, time=170.0, seconds=60.0, error="at step 20"),
        *done("finish", time=171.0),
        RunBegin(time=3700.0, run_id=RUN, number=2),
        *done("prepare_data", time=3701.0, seconds=1.0),
        begun("train_model", time=3701.0),
        AttemptBegin(time=3702.0, global_step=20, steps=60, resumed=True),
        CheckpointPublished(time=3730.0, uri="file:///d", global_step=60),
        ended("train_model", time=3731.0, seconds=30.0, uri="file:///d"),
        begun("finish", time=3731.0),
    )
    facts = gather_report.gather_facts("SUCCEEDED", run.root, RUN, run.folder)
    assert facts["verdict"] == "done"
    prepared, trained = facts["steps"]
    assert (prepared["tries"], prepared["earlier_seconds"]) == (2, 10.0)
    found = (trained["status"], trained["seconds"], trained["uri"])
    assert found == ("done", 30.0, "file:///d")
    assert (trained["tries"], trained["earlier_seconds"]) == (2, 60.0)
    assert facts["cost"]["task_hours"] == pytest.approx(4 * 90 / 3600)
    assert facts["cost"]["seconds_of_all_steps"] == 101.0
    bars, _idle = time_line(facts["tries"], facts["checkpoints"])
    marked = [(bar.step, bar.status, len(bar.marks)) for bar in bars if bar.marks]
    assert marked == [("train_model, try 1", "interrupted", 1), ("train_model, try 2", "done", 1)]
    assert [incident["event"] for incident in facts["incidents"]] == ["attempt_begin"]
    assert "30 s + 1 min 00 s in 1 earlier try" in run.report("SUCCEEDED").text


def test_what_only_an_earlier_start_reached_is_skipped_and_costs_what_it_took(run):
    run.config(Config().model_dump_json())
    run.events(
        RunBegin(time=0.0, run_id=RUN, number=1),
        begun("train_model", time=10.0),
        # The step was killed, so this is its last event.
        AttemptBegin(time=46.0, global_step=0, steps=60, resumed=False),
        RunBegin(time=900.0, run_id=RUN, number=2),
        begun("prepare_data", time=901.0),
        ended("prepare_data", "failed", 1, time=902.0, seconds=1.0, error="no space"),
    )
    facts = gather_report.gather_facts("FAILED", run.root, RUN, run.folder)
    assert facts["verdict"] == "failed"
    prepared, trained = facts["steps"]
    assert (prepared["status"], prepared["error"]) == ("failed", "no space")
    assert (trained["status"], trained["error"], trained["seconds"]) == ("skipped", "", 0.0)
    assert facts["cost"]["task_hours"] == pytest.approx(4 * 36 / 3600)
    page = run.report("FAILED")
    assert "prepare_data: no space" in page.text
    assert "train_model:" not in page.text


def test_the_evaluator_s_metrics_are_drawn_with_those_of_training(run):
    run.trained()
    uri = storage.join(run.root, RUN, "checkpoints")
    row = {"global_step": 40, "created": "now", "validation_loss": 0.4}
    storage.write_bytes(storage.join(uri, VALIDATIONS_FILE), f"{json.dumps(row)}\n".encode())
    run.events(*done("train_model"))
    assert "validation" in run.report("SUCCEEDED").text


def test_the_exit_step_is_not_reported_as_one_that_died(run):
    run.events(*done("train_model"), begun("finish"))
    page = run.report("SUCCEEDED")
    assert "finish" not in page.words
    assert "killed" not in page.text


def test_a_step_that_was_killed_is_named(run):
    run.events(*done("prepare_data"), begun("train_model"), begun("finish"))
    page = run.report("FAILED")
    assert verdict(page) == "failed"
    assert "train_model: the step was killed, or user code ended" in page.text


def test_a_refused_run(run):
    uri = run.uri_of(run.decided("refused", [{**RULES, "threshold": 0.99, "passed": False}]))
    run.events(*done("check_gate", uri=uri, metrics={"decision": "refused"}))
    page = run.report("SUCCEEDED")
    assert verdict(page) == "refused"
    assert "Accuracy is 0.9625; it must be at least 0.99 (gate.min)." in page.text


def test_a_run_that_failed_before_training(run):
    run.config(Config().model_dump_json())
    run.events(
        *done("resolve_config"),
        begun("prepare_data"),
        ended("prepare_data", "failed", 1, error="no dataset of this name"),
        begun("finish"),
    )
    page = run.report("FAILED")
    assert verdict(page) == "failed"
    assert "prepare_data: no dataset of this name" in page.text
    assert page.heads() == ["Steps and lineage", "Configuration"]


def test_an_interrupted_run(run):
    run.events(begun("train_model"), ended("train_model", "interrupted", 130, error="at step 7"))
    page = run.report("FAILED")
    assert verdict(page) == "interrupted"
    assert "train_model: at step 7" in page.text


def test_a_run_that_was_interrupted_after_the_last_stage_of_a_step(run):
    run.events(begun("train_model"), ended("train_model"), Interrupted())
    page = run.report("FAILED")
    assert verdict(page) == "interrupted"
    assert "has no record" not in page.text
    # An interruption before the last start of the run no longer matters.
    run.events(
        begun("train_model"), ended("train_model"), Interrupted(), RunBegin(run_id="r", number=2),
        begun("train_model"), ended("train_model"),
    )  # fmt: skip
    assert verdict(run.report("SUCCEEDED")) == "done"


@pytest.mark.parametrize(
    ("state", "word"),
    [
        ("SUCCEEDED", "done"),
        ("SUCCESS", "done"),
        ("COMPLETE", "done"),
        ("", "done"),
        ("FAILED", "failed"),
        ("CANCELED", "interrupted"),
        ("RUNNING", "failed"),
    ],
)
def test_a_run_that_left_nothing(run, state, word):
    page = run.report(state)
    assert verdict(page) == word
    assert page.heads() == []


def test_on_a_cluster_the_state_tells_what_events_do_not(run):
    run.evaluated()
    run.decided("blessed")
    assert verdict(run.report("FAILED")) == "failed"
    # Different versions of KFP report different states for a successful run.
    for state in ("SUCCEEDED", "COMPLETE", "RUNNING"):
        assert verdict(run.report(state)) == "blessed"


def test_of_several_decisions_the_last_one_counts(run):
    run.decided("refused", directory="step-00000060-ffff")
    newer = run.decided("blessed", directory="step-00000060-0000").parent / "MANIFEST.json"
    manifest = json.loads(newer.read_text(encoding="utf-8"))
    newer.write_text(json.dumps({**manifest, "created": "2999-01-01T00:00:00Z"}), encoding="utf-8")
    assert verdict(run.report("SUCCEEDED")) == "blessed"


def test_the_decision_of_this_try_counts_and_not_a_later_one_of_another_policy(run):
    uri = run.uri_of(run.decided("refused", [{**RULES, "passed": False}], directory="step-60-a"))
    run.decided("blessed", directory="step-60-b")
    run.events(*done("check_gate", uri=uri, metrics={"decision": "refused"}))
    assert verdict(run.report("SUCCEEDED")) == "refused"


def test_a_failed_try_shows_no_metrics_of_the_one_before(run):
    run.evaluated()
    run.decided("blessed")
    run.events(begun("train_model"), ended("train_model", "failed", 1, error="no space"))
    assert run.report("FAILED").heads() == ["Steps and lineage"]


@pytest.mark.parametrize("damage", [b"{", b"", b"[1, 2]", None])
def test_a_damaged_decision_is_left_out(run, caplog, damage):
    evaluation = run.uri_of(run.evaluated())
    path = run.decided("blessed")
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    run.events(
        *done("evaluate_model", uri=evaluation),
        *done("check_gate", uri=run.uri_of(path)),
        begun("export_model"),
        ended("export_model", "failed", 1, error="no space"),
    )
    page = run.report("FAILED")
    assert verdict(page) == "failed"
    assert "export_model: no space" in page.text
    assert page.heads() == ["Test metrics", "Steps and lineage"]
    assert "the report is incomplete: " in caplog.text
    assert "decision.json" in caplog.text


def test_what_was_published_as_no_json_is_left_out(run, caplog):
    run.publish("decision", "decision.json", ["not", "a mapping"])
    run.publish("evaluation", "metrics.json", {"metrics": None})
    assert run.report("FAILED").heads() == []
    assert "the report is incomplete: " in caplog.text


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00"])
def test_a_damaged_configuration_is_left_out(run, text):
    run.config(text)
    run.evaluated()
    assert run.report("SUCCEEDED").heads() == ["Test metrics"]


def test_a_damaged_line_of_the_history_leaves_the_others(run, caplog):
    run.trained()
    path = storage.local_path(storage.join(run.root, RUN, "checkpoints", "history.jsonl"))
    path.write_text(path.read_text(encoding="utf-8") + '{"global_step": 8\n', encoding="utf-8")
    run.evaluated()
    assert run.report("FAILED").heads() == ["Test metrics", "Training"]
    assert "skipped invalid rows of " in caplog.text


def test_without_a_root_there_is_a_report_of_the_events(run):
    run.root = ""
    run.events(begun("resolve_config"), ended("resolve_config", "failed", 1, error="no root"))
    page = run.report("FAILED")
    assert verdict(page) == "failed"
    assert "resolve_config: no root" in page.text


def test_a_store_that_cannot_be_read_is_left_out(run, caplog):
    run.config(Config().model_dump_json())
    run.root = storage.uri_of(run.folder / "config.json")
    assert verdict(run.report("FAILED")) == "failed"
    assert "the report is incomplete: " in caplog.text


def test_damaged_events_are_left_out(run):
    run.evaluated()
    (run.folder / "events.jsonl").write_text('{"event": "step_b{"event"\n', encoding="utf-8")
    assert run.report("FAILED").heads() == ["Test metrics"]


TRAIN = StepRecord(step="train_model", status="failed", began=200.0, seconds=1800.0)
PREPARE = StepRecord(step="prepare_data", status="done", began=0.0, seconds=200.0)


def config(**sections):
    return parse_config(sections).model_dump()


PROGRAM = {"command": ["python"], "roles": {"evaluator": 1, "worker": 2, "chief": 1}}


@pytest.mark.parametrize(
    ("sections", "gpus", "held"),
    [
        ({}, 2, {"tasks": {"ps": 1, "worker": 3, "chief": 1}, "gpus": 6}),
        (
            {"training": {"strategy": "multi_worker_mirrored"}},
            1,
            {"tasks": {"worker": 3}, "gpus": 3},
        ),
        # The single process gets the GPUs of one worker.
        ({"training": {"strategy": "single"}}, 4, {"tasks": {"chief": 1}, "gpus": 4}),
        ({"program": PROGRAM}, 2, {"tasks": {"worker": 2, "chief": 1}, "gpus": 4}),
    ],
)
def test_what_a_cluster_holds(sections, gpus, held):
    cluster = (
        {"gpus_per_worker": gpus}
        if "program" in sections
        else {"workers": 3, "gpus_per_worker": gpus}
    )
    assert count_resources(config(**sections, cluster=cluster)) == held


def test_a_failed_training_costs_what_it_held_in_all_its_tries():
    found = cost(config(cluster={"workers": 2, "gpus_per_worker": 1}), [PREPARE, TRAIN])
    assert found == {
        "tasks": {"ps": 1, "worker": 2, "chief": 1},
        "task_hours": 2.0,
        "gpu_hours": 1.0,
        "seconds_of_all_steps": 2000.0,
    }
    again = replace(TRAIN, earlier=(Try(began=0.0, seconds=1800.0, status="failed"),))
    found = cost(config(), [PREPARE, again])
    assert (found["task_hours"], found["seconds_of_all_steps"]) == (4.0, 3800.0)
    # Without a configuration, the record of training says what it held.
    held = {"tasks": {"chief": 1, "worker": 1}, "gpus": 8}
    found = cost({}, [replace(TRAIN, held=held)])
    assert (found["task_hours"], found["gpu_hours"]) == (1.0, 4.0)


@pytest.mark.parametrize("steps", [[], [PREPARE]])
def test_a_run_that_never_trained_has_no_cost_to_tell(steps):
    assert cost(config(), steps) == {}
    assert cost({}, [PREPARE, TRAIN]) == {}

"""Tests how a run's outcome follows from its events and the runner's exit code."""

import subprocess
from contextlib import suppress
from datetime import UTC, datetime

import pytest

from flotilla.components.records.step_record import StepRecord, Try
from flotilla.pipelines.runs.local import add_full_disk
from flotilla.pipelines.runs.outcome import RunResult, judge_outcome, measure_duration
from flotilla.trainer.events import RunBegin, WarmStart
from flotilla.trainer.events.run_state import reduce_events
from tests.pipelines.step_events import STEPS, begun, done, ended, judged, promoted

FINISHED = done("finish", uri="file:///r/report.html")


def judge(events, returncode=0, *, interrupted=False):
    outcome = judge_outcome(reduce_events(events), returncode, interrupted=interrupted)
    return outcome.status, outcome.exit_code, outcome.message


def failed(step, message, code=1):
    return [begun(step), ended(step, "failed", code, error=message)]


BLESSED = judged("blessed", "accuracy 1.0")
UNCHANGED = {"decision": "unchanged", "reasons": ["those of digits-1, which has finished"]}
TRAINED = {"decision": "trained", "reasons": ["program.after_training is stop"]}
NOT_PROMOTED = {"decision": "refused", "reasons": ["megabytes 9.0 is above", "labelled 0"]}
KILLED = "the step was killed, or user code ended the process; see pipeline.log"
INTERRUPTED = "interrupted at global step 70; checkpoint file:///r/step-00000070"
STOPPED = [begun("train_model"), ended("train_model", "interrupted", 130, error=INTERRUPTED)]
RESOLVED = done("resolve_config")
NOT_RUN = "the model was blessed, but {} did not run; see pipeline.log"
LOST = "the run did not finish: its process ended before {} started; see pipeline.log"
RUNNER = "the local runner ended with exit code {}; see pipeline.log"


@pytest.mark.parametrize(
    ("events", "returncode", "expected"),
    [
        ([*BLESSED, *promoted(), *FINISHED], 0, ("blessed", 0, "")),
        (
            [*BLESSED, *done("export_model"), *FINISHED],
            0, ("failed", 1, NOT_RUN.format("register_model")),
        ),
        ([*BLESSED, *FINISHED], 0, ("failed", 1, NOT_RUN.format("export_model"))),
        (
            [*BLESSED, *done("export_model"), *done("register_model", metrics=NOT_PROMOTED)],
            0, ("refused", 3, "megabytes 9.0 is above; labelled 0"),
        ),
        (
            [*judged("refused", "accuracy is below", "loss is above"), *FINISHED],
            0, ("refused", 3, "accuracy is below; loss is above"),
        ),
        # If the decision cannot be read, the model is not blessed.
        ([*done("check_gate"), *FINISHED], 0, ("refused", 3, "check_gate reported no decision")),
        (
            [*RESOLVED, *done("train_model", metrics=TRAINED), *FINISHED],
            0, ("trained", 0, "program.after_training is stop"),
        ),
        (
            [*done("resolve_config", metrics=UNCHANGED), *FINISHED],
            0, ("unchanged", 0, UNCHANGED["reasons"][0]),
        ),
        # A command for single steps runs them even if there is no new data.
        ([*done("resolve_config", metrics=UNCHANGED), *done("prepare_data")], 0, ("done", 0, "")),
        ([*RESOLVED, *done("prepare_data")], 0, ("done", 0, "")),
        # The runner may have missed a failure.
        (failed("train_model", "no"), 0, ("failed", 1, "train_model: no")),
        (
            [*failed("train_model", "diverged"), *failed("finish", "no space")],
            1, ("failed", 1, "train_model: diverged"),
        ),
        (
            [*judged("blessed"), *promoted(), *failed("finish", "no space")],
            1, ("failed", 1, "finish: no space"),
        ),
        (
            [begun("train_model"), *failed("finish", "no space")],
            1, ("failed", 1, f"train_model: {KILLED}"),
        ),
        # A process that is killed between two stages leaves no record.
        (RESOLVED, 1, ("failed", 1, LOST.format("prepare_data"))),
        (
            [*judged("blessed")[:-2], *FINISHED],
            1, ("failed", 1, LOST.format("check_gate")),
        ),
        (
            [*judged("blessed"), *done("export_model"), *FINISHED],
            1, ("failed", 1, LOST.format("register_model")),
        ),
        # All stages of this step have ended; the missing stage belongs to another step.
        ([*judged("blessed"), *FINISHED], 1, ("failed", 1, RUNNER.format(1))),
        ([*judged("blessed"), *promoted()], 1, ("failed", 1, RUNNER.format(1))),
        ([], 1, ("failed", 1, RUNNER.format(1))),
        # The platform may have asked only this step to stop.
        ([*done("prepare_data"), *STOPPED, *FINISHED], 1, ("interrupted", 130, INTERRUPTED)),
        # If a step runs again, its last end counts.
        ([*failed("train_model", "lost"), *done("train_model")], 0, ("done", 0, "")),
        (
            [*failed("train_model", "lost", 2), begun("train_model")],
            1, ("failed", 1, f"train_model: {KILLED}"),
        ),
    ],
)  # fmt: skip
def test_events_and_the_exit_code_of_the_runner_are_an_outcome(events, returncode, expected):
    assert judge(events, returncode) == expected


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([*done("prepare_data"), *STOPPED, *FINISHED], INTERRUPTED),
        ([], "interrupted"),
        (done("prepare_data"), "interrupted"),
        (judged("blessed"), "interrupted"),
        # The step was stopped so early that it did not record its end.
        ([*RESOLVED, begun("prepare_data")], KILLED),
    ],
)
def test_an_interrupt_is_the_outcome(events, message):
    assert judge(events, 1, interrupted=True) == ("interrupted", 130, message)


@pytest.mark.parametrize(("code", "exit_code"), [(1, 1), (2, 2), (3, 1), (138, 1)])
def test_a_step_has_failed(code, exit_code):
    events = [*RESOLVED, *failed("prepare_data", "no such set", code), *FINISHED]
    assert judge(events, 1) == ("failed", exit_code, "prepare_data: no such set")


# User code may end a step's process with exit code 0. Other events do not matter.
@pytest.mark.parametrize("returncode", [1, 0])
def test_a_step_that_died_without_a_word_has_failed(returncode):
    events = [WarmStart(uri="file:///c"), *RESOLVED, begun("train_model"), *FINISHED]
    assert judge(events, returncode) == ("failed", 1, f"train_model: {KILLED}")
    outcome = judge_outcome(reduce_events(events), returncode, interrupted=False)
    assert [(each.step, each.status) for each in outcome.steps] == [
        ("resolve_config", "done"), ("train_model", "failed"), ("finish", "done"),
    ]  # fmt: skip


def test_metrics_and_artifacts():
    uris = {step: f"file:///{step}" for step in (*STEPS[1:], "export_model", "finish")}
    metrics = {"check_gate": {"decision": "blessed"}, "evaluate_model": {"accuracy": 0.5}}
    events = [*RESOLVED]
    for step, uri in uris.items():
        events += done(step, uri=uri, metrics=metrics.get(step, {}))
    outcome = judge_outcome(reduce_events(events), 0, interrupted=False)
    assert outcome.find_metrics("evaluation") == {"accuracy": 0.5}
    assert outcome.find_metrics("checkpoint") == {}
    named = {
        "dataset": "prepare_data", "checkpoint": "train_model", "evaluation": "evaluate_model",
        "decision": "check_gate", "model": "export_model", "report": "finish",
    }  # fmt: skip
    assert outcome.artifacts == {name: uris[step] for name, step in named.items()}
    events = [*done("prepare_data", uri="file:///d"), *failed("train_model", "no")]
    outcome = judge_outcome(reduce_events(events), 1, interrupted=False)
    assert outcome.artifacts == {"dataset": "file:///d"}


def test_a_resumed_run_is_judged_by_its_newest_start():
    first = [RunBegin(run_id="r", number=1), *failed("train_model", "no space"), *FINISHED]
    again = [RunBegin(run_id="r", number=2), *done("train_model", uri="file:///c"), *FINISHED]
    assert judge([*first, *again]) == ("done", 0, "")
    assert judge([*again, *first], 1) == ("failed", 1, "train_model: no space")
    # A step that only an earlier start reached is not part of the outcome.
    again[1:] = failed("resolve_config", "no root", 2)
    events = [first[0], *judged("blessed"), *promoted(), *FINISHED, *again]
    outcome = judge_outcome(reduce_events(events), 1, interrupted=False)
    assert (outcome.status, outcome.exit_code, outcome.artifacts) == ("failed", 2, {})
    assert [step.step for step in outcome.steps] == ["resolve_config"]


def test_the_duration_is_without_idle_time_and_without_the_exit_step():
    def step(name, began, seconds, *earlier):
        tries = tuple(Try(began=at, seconds=took, status="failed") for at, took in earlier)
        return StepRecord(
            step=name, status="done", began=began, seconds=seconds, ended=began + seconds,
            earlier=tries,
        )  # fmt: skip

    steps = (
        step("prepare_data", 5000.0, 1.0, (1000.0, 10.0)),
        step("train_model", 5003.0, 17.0, (1012.0, 8.0)),
        step("finish", 5020.0, 5.0, (1020.0, 5.0)),
    )
    run = RunResult(status="done", exit_code=0, message="", steps=steps)
    assert measure_duration(run) == (datetime.fromtimestamp(1000.0, UTC), 20.0 + 20.0)


FAILED = RunResult(status="failed", exit_code=1, message="train_model: killed", steps=())


@pytest.fixture
def disk(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_named(disk):
    assert add_full_disk(FAILED, disk) == FAILED
    with (disk / "filler").open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(b"." * 4096)
    answer = add_full_disk(FAILED, disk)
    assert answer.message == f"train_model: killed; there is no space left at {disk}"
    assert (answer.status, answer.exit_code) == ("failed", 1)
    done = RunResult(status="done", exit_code=0, message="", steps=())
    assert add_full_disk(done, disk) == done

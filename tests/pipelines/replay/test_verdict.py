"""Whether a replay ended as the step did: the same failure, the same figures, or how it differs."""

import pytest

from components.records.step_record import StepRecord
from pipelines.replay.verdict import compare
from trainer.events import StepEnd


def recorded(step="evaluate_model", status="done", *, ended=2.0, **more):
    return StepRecord(step=step, status=status, began=1.0, ended=ended, **more)


def replayed(step="evaluate_model", status="done", **more):
    return StepEnd(step=step, status=status, **more)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("it is wrong", "it is wrong"),
        ("cannot read /tmp/flotilla-a1b2c3d4/x.txt: gone", "cannot read /var/y/x.txt: gone"),
        ("no answer of 127.0.0.1:4040 in 12.5 s", "no answer of 127.0.0.1:9 in 13 s"),
    ],
)
def test_the_same_failure_at_another_place(before, now):
    failed = {"status": "failed", "exit_code": 1}
    found = compare(recorded(**failed, error=before), replayed(**failed, error=now))
    assert (found.same, found.words) == (True, f"the same failure: {now}")


def test_a_launcher_has_words_of_its_own_around_an_error_of_the_user():
    trace = "Traceback (most recent call last):\n  File x\nValueError: no width\n"
    found = compare(
        recorded(status="failed", error="the job failed: chief-0", traceback=trace),
        replayed(status="failed", error="chief-0: no width", traceback=trace),
    )
    assert found.same


TASK = "(chief-0, log /my runs/digits (1)/cluster/chief-0/log.txt)"
RAISED = "model blocks:tower: KeyError: 'width' (blocks.py:8)"


@pytest.mark.parametrize(
    "error",
    [f"{RAISED} {TASK}", f"the job f-1 failed: BackoffLimit; chief-0: exit code 1: {RAISED}"],
)
def test_a_debugger_has_no_task_and_no_launcher(error):
    failed = {"step": "train_model", "status": "failed"}
    assert compare(recorded(**failed, error=error), replayed(**failed, error=RAISED)).same
    other = RAISED.replace("width", "depth")
    assert not compare(recorded(**failed, error=error), replayed(**failed, error=other)).same


def test_another_failure_differs():
    found = compare(
        recorded(status="failed", error="a is 3"), replayed(status="failed", error="a is 4")
    )
    assert (found.same, found.words) == (False, "differs: on record a is 3; here a is 4")


def test_a_failure_that_does_not_come_again_differs():
    found = compare(recorded(status="failed", error="no memory"), replayed())
    assert not found.same
    assert found.words == "differs: on record it failed: no memory; here it was done"


@pytest.mark.parametrize("here", [True, False])
def test_a_step_that_was_killed(here):
    found = compare(recorded(status="failed", ended=None), None if here else replayed())
    assert found.same is here
    assert "killed" in found.words or "ended from within" in found.words


def test_a_step_that_is_killed_here_alone():
    found = compare(recorded(), None)
    assert (found.same, found.words) == (False, "differs: it was done; here it was killed")


def test_numbers_may_differ_in_the_last_digits():
    before = {"accuracy": 0.91, "loss": 0.3000001, "reasons": [], "matrix": {"a": [1, 2]}}
    now = {**before, "loss": 0.3}
    found = compare(recorded(metrics=before), replayed(metrics=now))
    assert found.same
    assert found.words == "the same figures: accuracy 0.91, loss 0.3"


def test_the_speed_of_training_is_not_compared():
    before = {"global_step": 9, "loss": 0.5, "seconds": 2.7, "steps_per_second": 566.5}
    now = {**before, "seconds": 1.1, "steps_per_second": 639.8}
    found = compare(recorded("train_model", metrics=before), replayed("train_model", metrics=now))
    assert (found.same, found.words) == (True, "the same figures: global_step 9, loss 0.5")
    slow = {**now, "loss": 0.6, "workers": {"worker-0": {"examples": 3}}}
    found = compare(recorded("train_model", metrics=before), replayed("train_model", metrics=slow))
    words = "as far as on record; training is not repeatable: loss 0.6 and not 0.5"
    assert (found.same, found.words) == (True, words)


def test_numbers_that_differ_are_named():
    found = compare(
        recorded(metrics={"accuracy": 0.91, "auc": 0.5}), replayed(metrics={"accuracy": 0.9})
    )
    assert not found.same
    assert found.words == "differs: accuracy 0.9 and not 0.91, auc None and not 0.5"
    assert found.differs == {"accuracy": (0.91, 0.9), "auc": (0.5, None)}


def test_a_decision_is_compared_with_its_reasons():
    before = {"decision": "refused", "reasons": ["accuracy 0.5 is below 0.9"]}
    found = compare(recorded("check_gate", metrics=before), replayed("check_gate", metrics=before))
    assert found.words == "the same decision, refused: accuracy 0.5 is below 0.9"
    other = {**before, "reasons": ["accuracy 0.4 is below 0.9"]}
    assert not compare(recorded(metrics=before), replayed(metrics=other)).same


def test_training_has_come_as_far_with_another_loss():
    before, now = {"global_step": 9, "loss": 0.3}, {"global_step": 9, "loss": 0.4}
    found = compare(recorded("train_model", metrics=before), replayed("train_model", metrics=now))
    assert found.same
    assert found.words == "as far as on record; training is not repeatable: loss 0.4 and not 0.3"
    now["global_step"] = 8
    assert not compare(
        recorded("train_model", metrics=before), replayed("train_model", metrics=now)
    ).same

"""Each invariant finds its violation; a plan is the same for the same seed."""

from __future__ import annotations

import pytest

from tests.chaos import job_plan
from tests.chaos.invariants import INVARIANTS, Outcome, repeated, violations_of
from tests.chaos.job_faults import OF_THE_RUN
from tests.chaos.job_plan import draw_job_plan
from tests.chaos.plan import STEPS, STRATEGIES, draw_plan
from trainer import storage
from trainer.events import AttemptBegin, Progress


def publish(folder, step):
    source = folder / f"source-{step}"
    source.mkdir()
    (source / "data").write_bytes(b"0123456789")
    uri = storage.uri_of(folder / "checkpoints" / f"step-{step:08d}")
    storage.publish(source, uri, kind="checkpoint", fields={"global_step": step})
    return storage.local_path(uri)


@pytest.fixture
def sound(tmp_path):
    publish(tmp_path, 3000)
    return Outcome(
        checkpoints=storage.uri_of(tmp_path / "checkpoints"),
        steps=3000,
        every=250,
        ends=[(1, "failed | when that is fixed, resume with: flotilla run"), (0, "")],
        events=[attempt(0), progress(700), attempt(500), progress(3000)],
        losses=1,
    )


def attempt(step):
    return AttemptBegin(global_step=step, steps=3000, resumed=step > 0)


def progress(step):
    return Progress(global_step=step, steps=3000, loss=1.0, steps_per_second=1.0, seconds_left=0.0)


def test_a_sound_run_violates_none(sound):
    assert violations_of(sound) == []
    assert repeated(sound) == 200


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"ends": [(1, "x")]}, "it did not end blessed: exit code 1"),
        ({"ends": [(1, "no more"), (0, "")]}, "a try ended with exit code 1 and no way to resume"),
        ({"ends": [(130, "resume with: flotilla run"), (0, "")]}, "a try ended with exit code 130"),
        ({"most_failures": 0}, "1 tries failed, and 0 may: failed | when that is fixed"),
        ({"tracebacks": 2}, "2 tracebacks were shown"),
        ({"steps": 3001}, "the last checkpoint is of step 3000, and 3001 were asked for"),
        ({"steps": 2999}, "the last checkpoint is of step 3000, and 2999 were asked for"),
        ({"losses": 0}, "200 steps were repeated, and 0 are the most"),
        ({"left": ["python -m trainer task"]}, "a process is left: python -m trainer task"),
    ],
)
def test_a_violation_is_described(sound, change, expected):
    for name, value in change.items():
        setattr(sound, name, value)
    (violation,) = violations_of(sound)
    assert violation.startswith(expected)


def test_a_try_that_was_cancelled_is_resumed(sound):
    sound.ends = [(130, "interrupted | resume with: flotilla run"), (0, "")]
    sound.cancels = 1
    assert violations_of(sound) == []


def test_a_torn_checkpoint_is_found_unless_a_fault_has_torn_it(sound, tmp_path):
    path = publish(tmp_path, 2750)
    (path / "data").write_bytes(b"0123456780")
    (violation,) = violations_of(sound)
    assert violation.startswith(f"a checkpoint is torn: {storage.uri_of(path)} is damaged")
    sound.torn.add(path)
    assert violations_of(sound) == []


def test_every_invariant_is_documented():
    assert all(each.__doc__ for each in INVARIANTS)


def test_a_seed_is_a_plan_of_a_job():
    plans = [draw_job_plan(seed) for seed in range(200)]
    assert plans == [draw_job_plan(seed) for seed in range(200)]
    assert {plan.strategy for plan in plans} == set(job_plan.STRATEGIES)
    faults = [(plan, fault) for plan in plans for fault in plan.faults]
    assert {fault.kind for _, fault in faults} == {*job_plan.OF_TASKS, *job_plan.OF_THE_RUN}
    for plan, fault in faults:
        assert (fault.task in plan.tasks()) == (fault.kind in job_plan.OF_TASKS)
        assert 0 < fault.step < plan.steps
        assert (fault.seconds > 0) == (fault.kind in job_plan.LASTING)
    assert set(OF_THE_RUN) == set(job_plan.OF_THE_RUN)


def test_a_seed_is_a_plan():
    plans = [draw_plan(seed) for seed in range(200)]
    assert plans == [draw_plan(seed) for seed in range(200)]
    assert {plan.strategy for plan in plans} == set(STRATEGIES)
    faults = [(plan, fault) for plan in plans for fault in plan.faults]
    assert {fault.kind for _, fault in faults} == {
        "kill",
        "stop",
        "pause",
        "full disk",
        "torn file",
    }
    assert {fault.task.partition("-")[0] for _, fault in faults} == {
        "", "chief", "ps", "worker", "evaluator",
    }  # fmt: skip
    for plan, fault in faults:
        assert not fault.task or fault.task in plan.tasks()
        assert 0 < fault.step < STEPS

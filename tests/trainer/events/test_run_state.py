"""Tests the state of a run, computed from its events."""

import pytest

from flotilla.trainer.events import (
    AttemptBegin,
    CheckpointPublished,
    HandedOn,
    Interrupted,
    Progress,
    Restart,
    RunBegin,
    StepBegin,
    StepEnd,
    Suspension,
    UserCodeFailed,
    WorkProgress,
)
from flotilla.trainer.events.run_state import RunState, reduce_events


def progress(step, time):
    return Progress(
        time=time, global_step=step, steps=9, loss=0.5, steps_per_second=1.0, seconds_left=1.0
    )


def ended(step, time, **more):
    return StepEnd(time=time, step=step, status="done", seconds=2.0, **more)


def test_before_the_first_event_nothing_is_known():
    state = RunState()
    assert (state.start, state.moved, state.traceback) == (0, 0.0, "")
    assert state.newest(Progress) is None
    assert not state.interrupted
    assert state.suspension is None


def test_what_is_newest_is_of_the_newest_start_and_counts_are_of_all():
    restart = Restart(task="ps-0", cause="x", restarts=1)
    state = reduce_events(
        [RunBegin(run_id="r", number=1), progress(5, 3.0), restart, Interrupted(),
         UserCodeFailed(error="e", traceback="t")]
    )  # fmt: skip
    assert (state.start, state.global_step, state.moved) == (0, 5, 3.0)
    assert state.interrupted
    assert state.traceback == "t"
    state.take(RunBegin(run_id="r", number=2))
    assert (state.start, state.interrupted, state.traceback) == (1, False, "")
    assert state.newest(Progress) is None
    assert state.counts[Restart] == 1
    assert list(state.incidents) == [restart]


def test_an_attempt_moves_the_step_and_is_an_incident_where_it_resumes():
    first = AttemptBegin(time=1.0, global_step=0, steps=9, resumed=False)
    again = AttemptBegin(time=9.0, global_step=4, steps=9, resumed=True)
    state = reduce_events([first, progress(6, 2.0), again])
    assert (state.global_step, state.moved) == (4, 9.0)
    assert list(state.incidents) == [again]


def test_a_job_is_suspended_until_it_may_run():
    waits = Suspension(is_over=False, was_running=False)
    assert reduce_events([waits]).suspension == waits
    assert reduce_events([waits, Suspension(is_over=True, was_running=False)]).suspension is None


def test_tries_are_of_their_start_and_end_in_order():
    state = reduce_events(
        [StepBegin(time=1.0, step="a"), RunBegin(time=5.0, run_id="r", number=2),
         StepBegin(time=6.0, step="a"), StepBegin(time=7.0, step="b"), ended("a", 8.0)]
    )  # fmt: skip
    assert [(each.step, each.began, each.start, bool(each.end)) for each in state.tries] == [
        ("a", 1.0, 0, False), ("a", 6.0, 1, True), ("b", 7.0, 1, False),
    ]  # fmt: skip
    assert state.seen_until == {0: 1.0, 1: 8.0}


def test_an_end_whose_beginning_is_lost_says_when_it_was():
    (only,) = reduce_events([ended("a", 8.0)]).tries
    assert (only.began, only.end.status) == (6.0, "done")


def test_what_is_handed_on_and_published_is_known():
    saved = CheckpointPublished(uri="file:///c", global_step=7)
    handed = HandedOn(uri="file:///c", global_step=7, trained=9, why="best")
    state = reduce_events([saved, handed])
    assert (list(state.checkpoints), state.handed_on_step) == ([saved], 7)
    assert reduce_events([ended("t", 1.0, metrics={"handed_on_step": 8})]).handed_on_step == 8


READING = {"what": "reading", "unit": "rows", "done": 3, "share": 0.5, "seconds_left": 7.0}
TRAINING = {
    "global_step": 5, "steps": 9, "loss": 0.5, "seconds_left": 1.0, "epoch": 0, "epochs": 0,
}  # fmt: skip
IN_WORDS = "reading: 50 %  3 rows  7.0 s left"


@pytest.mark.parametrize(
    ("happened", "found"),
    [
        # Events before this time belong to an earlier step.
        ([progress(5, 1.0), WorkProgress(time=2.0, **READING)], {}),
        ([progress(5, 3.0)], TRAINING),
        ([progress(5, 1.0), WorkProgress(time=3.0, **READING)],
         {"progress": IN_WORDS, "share": 0.5, "seconds_left": 7.0}),
        ([WorkProgress(time=3.0, **READING),
          WorkProgress(time=4.0, what="reading", is_over=True)], {}),
        ([progress(5, 3.0), WorkProgress(time=3.5, **READING)], {**TRAINING, "progress": IN_WORDS}),
    ],
)  # fmt: skip
def test_the_progress_since_a_step_began(happened, found):
    assert reduce_events(happened).progress_since(2.5) == found

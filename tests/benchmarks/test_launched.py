"""How fast a run was: by the clock, after its first tenth, without what checkpoints take."""

from __future__ import annotations

import pytest

from benchmarks import training
from benchmarks.launched import _local_steps, _speed, clocked
from trainer.events import Progress, RunBegin, Saved


def progress(step, time, **metrics):
    return Progress(
        time=time,
        global_step=step,
        steps=90,
        loss=1.0,
        steps_per_second=0.0,
        seconds_left=0.0,
        metrics=metrics,
    )


def test_the_clock_stops_for_checkpoints_only():
    rows = clocked(
        [
            RunBegin(time=90.0, run_id="bench", number=1),
            progress(10, 100.0),
            Saved(time=103.0, uri="", global_step=10, seconds=3.0),
            progress(20, 105.0),
            progress(30, 107.0),
        ]
    )
    assert [row.seconds for row in rows] == [100.0, 102.0, 104.0]
    assert [row.global_step for row in rows] == [10, 20, 30]


def test_speed_is_that_after_the_first_tenth():
    rows = clocked([progress(5, 10.0), progress(10, 20.0), progress(50, 24.0), progress(90, 28.0)])
    assert _speed(rows, lambda row: row.global_step) == pytest.approx(10.0)


def test_local_steps_are_those_of_all_workers():
    workers = {"worker-0": {"local_steps": 40}, "worker-1": {"local_steps": 60}}
    assert _local_steps(progress(10, 0.0, workers=workers)) == 100
    # One process does not count them.
    assert _local_steps(progress(10, 0.0)) == 10


@pytest.mark.parametrize(
    ("measure", "theirs"),
    [
        (training.asynchronous, "baseline"),
        (training.synchronous, "baseline"),
        (training.one_process, "fit"),
        (training.one_process_compiled, "fit"),
    ],
)
def test_a_ratio_is_ours_over_theirs(monkeypatch, measure, theirs):
    class Trained:
        steps_per_second = 30.0

    monkeypatch.setattr(training._Bench, "train", lambda *_args, **_settings: Trained())
    monkeypatch.setattr(training._Bench, theirs, lambda *_args, **_settings: 10.0)
    found = measure()
    assert found.ratio == pytest.approx(3.0)
    assert len(found.rounds) >= 3
    assert found.more["steps_per_second"] == [[30.0, 10.0]] * len(found.rounds)

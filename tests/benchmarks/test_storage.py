"""What a checkpoint took of training is read from the events of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.storage import WINDOW, taken
from trainer.events import Progress, Saved


def saving(saved, *, stall, drift=0.0):
    """Return the events of a minute of training at 100 steps/s that pauses to save."""
    events, step, time = [], 0.0, 0.0
    for second in range(60):
        step, time = step + 100 + drift * second, time + 1
        events.append(progress(time, step))
        if second + 1 in saved:
            time += stall
            events.append(Saved(time=time, uri="", global_step=0, seconds=stall))
    return events


def progress(time, step):
    return Progress(
        time=time, global_step=step, steps=6000, loss=1.0, steps_per_second=0.0, seconds_left=0.0
    )


@pytest.mark.parametrize("stall", [0.0, 0.25, 1.0])
def test_the_seconds_of_a_stall_are_what_it_took(stall):
    (found,) = taken(saving([30], stall=stall))
    assert found.seconds == pytest.approx(stall, abs=1e-6)
    assert found.stall == stall


def test_what_drifts_falls_out():
    (found,) = taken(saving([30], stall=0.25, drift=2.0))
    assert found.seconds == pytest.approx(0.25, abs=0.05)


def test_slow_seconds_after_it_count_too():
    events = [
        replace(each, global_step=each.global_step - 50 * min(2.0, max(0.0, each.time - 30)))
        for each in saving([30], stall=0.0)
    ]
    (found,) = taken(events)
    assert found.seconds == pytest.approx(1.0)


def test_only_those_count_that_have_windows_around_them():
    whole = [10, 30, 45]
    assert len(taken(saving([1, 2, *whole, 46 + WINDOW, 60], stall=0.0))) == len(whole)

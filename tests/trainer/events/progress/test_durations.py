"""Tests how durations are formatted and summed."""

import math

import pytest

from flotilla.trainer.events.progress.durations import duration, join_tries, time_at_work


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"), (0.04, "0.0 s"), (7.25, "7.2 s"), (9.94, "9.9 s"), (9.96, "10 s"),
        (59.4, "59 s"), (59.6, "1 min 00 s"), (63.0, "1 min 03 s"), (3599.7, "1 h 00 min"),
        (3900, "1 h 05 min"), (172_800, "2 d 0 h"), (200_000, "2 d 7 h"),
    ],
)  # fmt: skip
def test_each_unit_is_rounded_to_the_next_one(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("seconds", [-1, None, math.nan, math.inf, "7", True])
def test_what_is_no_time_is_a_dash(seconds):
    assert duration(seconds) == "-"


def test_the_time_before_a_step_is_tried_again_is_idle():
    tries = [
        ("prepare_data", 0.0, 10.0),
        # The long time after this step is the wait for its retry.
        ("train_model", 100.0, 130.0),
        ("prepare_data", 1000.0, 1001.0),
        ("train_model", 1002.0, 1020.0),
    ]
    assert join_tries(reversed(tries)) == [(0.0, 130.0), (1000.0, 1020.0)]
    assert time_at_work(tries) == 150.0
    assert time_at_work([]) == 0.0

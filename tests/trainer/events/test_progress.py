"""Tests the format of durations and progress, and that only long work reports progress."""

import logging
import math
import threading

import pytest

from flotilla.trainer import events
from flotilla.trainer.events import WorkProgress, progress
from flotilla.trainer.events.progress import (
    Work,
    duration,
    format_line,
    format_parts,
    join_tries,
    time_at_work,
)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class NoLoop:
    """Replaces the loop that regularly checks the time. Tests call `look` instead."""

    def __init__(self, *_, **__):
        pass

    def start(self):
        pass

    def stop(self):
        pass


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    monkeypatch.setenv(events.VARIABLE, str(path))
    monkeypatch.setattr(progress, "Loop", NoLoop)
    monkeypatch.setattr(Work, "_ended_at", -math.inf)
    return path


def course(work, clock, seconds, rows, size=0.0):
    """Report this number of rows every half second."""
    for _ in range(int(seconds * 2)):
        clock.now += 0.5
        work.add(rows, size)
        work.look()


def reported(file):
    return list(events.read(file)) if file.exists() else []


def test_short_work_reports_nothing(file, clock):
    with Work("reading", "rows", 100, clock=clock) as work:
        course(work, clock, 2.5, 20)
    assert not reported(file)


def test_what_follows_long_work_at_once_is_reported_at_once(file, clock):
    with Work("reading", "rows", clock=clock) as work:
        course(work, clock, 4, 20)
    with Work("encoding", "rows", clock=clock) as work:
        course(work, clock, 1, 20)
    assert [each.seconds for each in reported(file) if each.what == "encoding"] == [0.5, 1.0, 1.0]
    clock.now += 5
    with Work("writing", "rows", clock=clock) as work:
        course(work, clock, 1, 20)
    assert not [each for each in reported(file) if each.what == "writing"]


def test_long_work_reports_twice_a_second_and_that_it_is_over(file, clock):
    with Work("reading", "rows", 1000, clock=clock) as work:
        course(work, clock, 10, 50)
    found = reported(file)
    assert [each.seconds for each in found[:3]] == [3.0, 3.5, 4.0]
    first, last = found[0], found[-1]
    assert (first.done, first.total, first.share) == (300, 1000, 0.3)
    assert (first.rate, first.seconds_left) == (100.0, 7.0)
    assert (last.done, last.share, last.is_over) == (1000, 1.0, True)
    assert [each.is_over for each in found].count(True) == 1


def test_the_time_before_the_first_row_is_no_part_of_the_speed(file, clock):
    with Work("encoding", "rows", 10_000, clock=clock) as work:
        course(work, clock, 20, 0)
        assert reported(file)[-1].seconds_left == -1
        course(work, clock, 2, 500)
    assert reported(file)[-2].rate == 1000
    assert reported(file)[-2].seconds_left == 8


def test_the_speed_is_that_of_the_last_seconds(file, clock):
    with Work("encoding", "rows", clock=clock) as work:
        course(work, clock, 60, 500)
        course(work, clock, 60, 5)
    assert 10 <= reported(file)[-1].rate < 15


def test_a_share_by_another_measure_is_the_whole_only_at_the_end(file, clock):
    with Work("reading", "rows", size=1000.0, clock=clock) as work:
        course(work, clock, 5, 10, size=120.0)
    found = reported(file)
    assert found[0].share == 0.72
    assert {each.share for each in found[3:]} == {0.999}
    assert found[0].total == 0


def test_without_a_total_there_are_counts_and_a_rate_alone(file, clock):
    with Work("reading", "rows", clock=clock) as work:
        course(work, clock, 4, 25_000)
    assert format_parts(reported(file)[0]) == ["150,000 rows", "50,000 rows/s"]


def test_an_error_ends_the_work(file, clock):
    def fail():
        with Work("reading", "rows", 10, clock=clock) as work:
            course(work, clock, 4, 1)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert reported(file)[-1].is_over
    assert reported(file)[-1].share == 0.8


def test_threads_of_work_that_is_interrupted_end(clock):
    work = Work("reading", "rows", clock=clock)

    def interrupted():
        with work:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(InterruptedError, match="abandoned"):
        work.add(1)


@pytest.mark.usefixtures("file")
def test_the_log_has_a_plain_line_every_half_minute(clock, monkeypatch, caplog):
    monkeypatch.delenv(events.VARIABLE)
    caplog.set_level(logging.INFO)
    with Work("reading the files", "rows", 8000, clock=clock) as work:
        course(work, clock, 80, 50)
    assert caplog.messages == [
        "reading the files: 37 %  3,000/8,000 rows  100 rows/s  50 s left",
        "reading the files: 75 %  6,000/8,000 rows  100 rows/s  20 s left",
        "reading the files: done, 8,000/8,000 rows in 1 min 20 s",
    ]


def test_the_thread_looks_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    monkeypatch.setattr(progress, "QUIET_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LIVE_SECONDS", 0.001)
    seen = threading.Event()
    with events.listen(lambda _event: seen.set()), Work("reading"):
        assert seen.wait(10)


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"done": 43_000_000, "total": 1_000_000_000, "unit": "bytes", "share": 0.043},
         "uploading: 4 %  43/1,000 MB"),
        ({"done": 9_500, "total": 12_000, "unit": "bytes", "share": 0.79, "rate": 400.0},
         "uploading: 79 %  9.5/12 kB  400 B/s"),
        ({"seconds": 42.0}, "uploading: 42 s"),
        ({"done": 3, "total": 5, "unit": "tasks", "detail": "worker-1 has no node"},
         "uploading: 3/5 tasks  worker-1 has no node"),
        ({"seconds": 42.0, "is_over": True}, "uploading: done, 42 s"),
        ({"share": 0.9999, "done": 9, "unit": "rows", "rate": 0.5},
         "uploading: 99 %  9 rows  0.5 rows/s"),
    ],
)  # fmt: skip
def test_a_line_has_what_is_known(event, line):
    assert format_line(WorkProgress(what="uploading", **event)) == line


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

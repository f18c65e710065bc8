"""Tests when a kill happens, and when a run counts as recovered."""

import argparse
import itertools
from unittest import mock

import numpy as np
import pytest

from flotilla.trainer import events
from flotilla.trainer.events import AttemptBegin, Progress, ServersLost
from tests.chaos import accuracy_after_losses, followed, kills, task_kills
from tests.chaos.accuracy_after_losses import EvenKills


def progress(step):
    return Progress(global_step=step, steps=400, loss=0.0, steps_per_second=1.0, seconds_left=0.0)


def begin(step):
    return AttemptBegin(global_step=step, steps=400, resumed=True)


def lost(step, back_to):
    return ServersLost(servers=("ps-1",), recovery="partial", global_step=step, back_to=back_to)


@pytest.fixture
def struck_at(tmp_path, monkeypatch):
    """Return a function that sends events to a run and returns the steps of its kills."""
    monkeypatch.setattr(accuracy_after_losses, "SPREAD_SECONDS", 0.0)

    def play(losses, *events):
        options = argparse.Namespace(config="c.yaml", set=[], steps=400, limit=1.0)
        run = EvenKills(options, tmp_path, "run", seed=1, losses=losses)
        server = mock.Mock()
        monkeypatch.setattr(run, "_tasks", lambda: {"ps-0": server, "chief-0": mock.Mock()})
        monkeypatch.setattr(kills, "_megabytes", lambda _tasks: 1)
        process = mock.Mock(**{"poll.return_value": None, "wait.return_value": 0})

        def started(*_args, **_named):
            folder = run.workdir / "r"
            folder.mkdir(parents=True)
            (folder / "config.json").touch()
            return process

        monkeypatch.setattr(kills.subprocess, "Popen", started)
        monkeypatch.setattr(kills, "newest_checkpoint", lambda _uri: ("uri", 400))
        steps = []
        server.kill.side_effect = lambda: steps.append(run.step)
        monkeypatch.setattr(kills, "events_of", lambda *_args: iter(events))
        return steps, run.course()

    return play


def test_servers_are_killed_at_even_steps(struck_at):
    each = ([progress(step), begin(step)] for step in range(20, 401, 20))
    steps, course = struck_at(3, *itertools.chain.from_iterable(each))
    assert steps == [100, 200, 300]
    assert len(course.returns["ps"]) == 3


def test_a_kill_waits_until_the_run_has_gone_on_after_the_one_before(struck_at):
    steps, course = struck_at(
        3,
        progress(210),
        # This progress is from the attempt that lost its server.
        progress(220),
        lost(220, 200),
        begin(220),
        progress(220),
        progress(230),
        begin(230),
        progress(320),
    )
    assert steps == [210, 220, 320]
    assert [each.back_to for each in course.losses] == [200]


def drifting_progress(cost, between):
    """Return the progress of 600 s of a slowing run, with a pause of `cost` s after each kill."""
    times = np.arange(0, 600, 0.05)
    moves = (times < 60) | (times % 60 >= cost)
    steps = np.cumsum(np.linspace(60, 30, len(times)) * 0.05 * moves)
    seen = slice(None, None, round(between / 0.05))
    return [(1000 + at, int(step)) for at, step in zip(times[seen], steps[seen], strict=True)]


@pytest.mark.parametrize("between", [0.3, 1.2])
@pytest.mark.parametrize("cost", [0.0, 1.0, 5.0])
def test_the_cost_of_a_loss_is_not_that_of_a_machine_that_becomes_slower(cost, between):
    costs = task_kills.lost_seconds(drifting_progress(cost, between), 60.0)
    assert len(costs) == 8
    assert costs == pytest.approx([cost] * 8, abs=0.25)


def test_a_loss_without_a_speed_around_it_is_left_out():
    progress = [(float(second), 50 * min(second, 50)) for second in range(400)]
    assert task_kills.lost_seconds(progress, 60.0) == []


def test_progress_for_which_the_events_have_no_room_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(followed.time, "sleep", lambda _seconds: None)
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    path.write_bytes(b" " * events.PROGRESS_BYTES)
    steps = iter([10, 10, 20])

    def poll():
        step = next(steps, None)
        if step is None:
            return 0
        events.append(path, progress(step))
        return None

    process = mock.Mock(poll=poll)
    found = followed.events_of(process, tmp_path, {})
    assert [each.global_step for each in found] == [10, 20]

"""The outer loop with workers that go on while it reports: they rest before anything else."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.trainer.counting import Counting, Run
from trainer import events
from trainer.errors import RunInterruptedError
from trainer.strategies.strategy import Report
from trainer.training import recovery


class GoingOn(Counting):
    """It applies three updates an inner loop, goes on, and has two more when it rests."""

    def __init__(self, *, each: int = 3, more: int = 2):
        super().__init__()
        self.each, self.more = each, more
        self.goes_on, self.boundaries, self.rests = False, [], []

    def advance(self, steps, boundary):
        assert steps <= boundary - self.global_step()
        self.boundaries.append(boundary)
        self.run(min(self.each, boundary - self.global_step()))
        self.goes_on = self.global_step() < boundary
        self.boundary = boundary
        return Report(loss=1.0, global_step=self.global_step() if self.goes_on else None)

    def rest(self):
        assert self.goes_on
        self.goes_on = False
        self.run(min(self.more, self.boundary - self.global_step()))
        self.rests.append(self.global_step())
        return Report(loss=2.0)

    def variables(self):
        """Only of workers at rest."""
        assert not self.goes_on
        return super().variables()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setenv(events.VARIABLE, str(tmp_path / "events.jsonl"))
    return Run(tmp_path)


def test_they_go_on_up_to_each_boundary_and_no_further(run):
    strategy = GoingOn()
    reached = run.train(strategy, steps=25, keep=100, validate=lambda of: {"loss": 1 - of.goes_on})
    assert reached == 25
    assert run.steps() == [0, 10, 20, 25]
    assert [run.weight(step) for step in run.steps()] == [0, 5, 10, 12.5]
    assert strategy.boundaries == [10] * 4 + [20] * 4 + [25] * 2
    assert run.rows() == [3, 6, 9, 10, 13, 16, 19, 20, 23, 25]
    assert run.rows("validation_loss") == [1, 1, 1]
    assert strategy.rests == []


def test_the_edges_of_a_profile_are_boundaries_too(run):
    strategy = GoingOn()
    run.train(strategy, steps=30, checkpoint_every=30, validate_every=0, profile=[8, 12])
    assert sorted(set(strategy.boundaries)) == [7, 12, 30]


def test_they_rest_before_the_checkpoint_of_an_interrupt(run):
    strategy = GoingOn()
    with pytest.raises(RunInterruptedError, match="global step 8;"):
        run.train(strategy, steps=25, should_stop=lambda: strategy.global_step() >= 6)
    assert strategy.rests == [8]
    assert run.steps()[-1] == run.rows()[-1] == 8
    assert run.weight(8) == 4
    assert run.rows("loss")[-1] == 2.0


def test_what_is_applied_until_they_rest_may_be_all_that_was_left(run):
    strategy = GoingOn(each=24)
    assert (
        run.train(
            strategy,
            steps=25,
            checkpoint_every=1000,
            validate_every=0,
            should_stop=lambda: strategy.global_step() >= 24,
        )
        == 25
    )
    assert run.steps() == [0, 25]


def test_they_rest_before_a_checkpoint_by_the_clock(run):
    strategy = GoingOn()
    run.train(
        strategy,
        steps=12,
        keep=100,
        checkpoint_every=1000,
        validate_every=0,
        checkpoint_seconds=1e-9,
    )
    assert run.steps() == [0, 5, 10, 12]
    assert strategy.rests == [5, 10]


def test_they_rest_where_training_stops_early(run):
    strategy = GoingOn()
    reached = run.train(
        strategy, steps=90, validate_every=0, should_stop_early=lambda: strategy.global_step() >= 10
    )
    assert reached == 10
    assert not strategy.goes_on


def test_the_seconds_of_rows_go_on_with_them(run):
    run.train(GoingOn(), steps=25)
    seconds = run.rows("seconds")
    assert all(before <= after for before, after in pairwise(seconds))
    assert all(value > 0 for value in run.rows("steps_per_second"))


def test_what_was_reached_is_noted_between_inner_loops_and_not_at_the_end(run, monkeypatch):
    noted = []
    monkeypatch.setattr(recovery.Recovery, "note", lambda _self, step: noted.append(step))
    run.train(GoingOn(), steps=16, checkpoint_every=10, validate_every=0)
    assert noted == [3, 6, 9, 10, 13]

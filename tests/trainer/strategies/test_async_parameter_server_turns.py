"""Which closures of asynchronous training are made of turns, and when that graph is made."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trainer.strategies.async_parameter_server import LONG_RUN, TURN, AsyncParameterServer, turn_of
from trainer.strategies.parameter_server import Tally


@pytest.mark.parametrize(
    ("steps", "whole", "turn"),
    [(LONG_RUN, True, TURN), (LONG_RUN - 1, True, 1), (10 * LONG_RUN, False, 1)],
)
def test_long_runs_of_what_is_pulled_whole_make_turns(steps, whole, turn):
    assert turn_of(steps, whole=whole) == turn


class Handed(AsyncParameterServer):
    """Two workers that apply what they are handed; it is kept by the name of the function."""

    def __init__(self, turn):
        self._turn, self._has_turned = turn, False
        self._one_by_one, self._in_turns, self._iterator = "one by one", "in turns", None
        self._tally = Tally(batch_size=1)
        self.cluster = SimpleNamespace(count=lambda _role: 2)
        self.config = SimpleNamespace(training=SimpleNamespace(pull_every=1, accumulate=1))
        self.stream, self.towers = None, ["CPU:0"]
        self.handed, self.warmed = [], []

    def dispatch(self, calls):
        self.warmed.append(self.warming)
        sizes = [int(args[1]) * (TURN if name == "in turns" else 1) for name, args in calls]
        self.handed.append([(name, n) for (name, _), n in zip(calls, sizes, strict=True)])
        return [(0.0, index % 2, n) for index, n in enumerate(sizes)]


@pytest.mark.parametrize("steps", [1, TURN, 4 * TURN, 5 * TURN, 8 * TURN - 1])
def test_a_short_stretch_goes_one_by_one_also_where_a_portion_is_a_turn(steps):
    strategy = Handed(TURN)
    strategy.run(steps)
    assert {name for name, _ in strategy.handed[0]} == {"one by one"}
    assert strategy.warmed == [False]


def test_a_long_stretch_goes_in_turns_and_what_is_left_one_by_one():
    strategy = Handed(TURN)
    strategy.run(8 * TURN + 3)
    *turns, last = strategy.handed[0]
    assert {name for name, _ in turns} == {"in turns"}
    assert last == ("one by one", 3)
    assert sum(n for _, n in strategy.handed[0]) == 8 * TURN + 3


def test_only_the_first_stretch_in_turns_makes_their_graph():
    strategy = Handed(TURN)
    for steps in (5 * TURN, 8 * TURN, 3, 8 * TURN):
        strategy.run(steps)
    assert strategy.warmed == [False, True, False, False]
    assert not strategy.warming


def test_a_short_run_makes_no_turns():
    strategy = Handed(1)
    strategy.run(100 * TURN)
    assert {name for name, _ in strategy.handed[0]} == {"one by one"}
    assert strategy.warmed == [False]

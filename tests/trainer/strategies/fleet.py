"""Simulates asynchronous workers without TensorFlow: they take turns, make updates and may die."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace

import keras
import numpy as np

from flotilla.trainer.strategies.async_parameter_server import TURN, AsyncParameterServer, Seen
from flotilla.trainer.strategies.input_position import Tally

LOSS = 2.0


class Fleet:
    """Simulates the counters on the server, TensorFlow's coordinator, and the workers.

    In each round, every worker that has a closure takes one turn. `dies` maps the number of a turn
    to the number of updates after which its worker dies, or to None. The closure of a dead worker
    goes to the end of the queue.
    """

    def __init__(self, workers: int, dies: Callable[[int], int | None] = lambda _turn: None):
        self.workers, self.dies = workers, dies
        self.applied = self.turns_made = 0
        self.next = self.end = self.refused = 0
        self.reports = np.zeros((workers, 3))
        self.queue: deque[int] = deque()
        self.units: list[int] = []
        self.most = 0

    def deal(self, turns: int) -> None:
        assert not self.queue, "dealt while workers take turns"
        self.next = self.refused = 0
        self.end = turns

    def extend(self, turns: int) -> None:
        self.end = turns

    def look(self) -> Seen:
        return Seen(
            applied=self.applied, taken=self.next, refused=self.refused, reports=self.reports.copy()
        )

    def schedule(self, unit: int, args: object) -> None:
        del args
        self.units.append(unit)
        self.queue.append(unit)

    def done(self) -> bool:
        return not self.queue

    def join(self) -> None:
        while self.queue:
            self.round()

    def round(self) -> None:
        for worker in range(min(self.workers, len(self.queue))):
            unit = self.queue.popleft()
            if self.next >= self.end:
                self.refused += 1
                continue
            self.queue.append(unit)
            self.next += 1
            died = self.dies(self.turns_made)
            self.turns_made += 1
            self.applied += unit if died is None else min(died, unit)
            if died is None:
                self.reports[worker] += (LOSS * unit, unit, 0)
        self.most = max(self.most, self.applied)


class Led(AsyncParameterServer):
    """The strategy with a simulated fleet instead of a cluster."""

    def __init__(self, fleet: Fleet, turn: int = TURN):
        self.fleet = fleet
        self._turns = self.coordinator = fleet
        self._workers, self._turn, self._has_turned = fleet.workers, turn, False
        self._closures, self._iterator = {1: 1, TURN: TURN}, None
        self._tally = Tally(batch_size=1)
        self.model = keras.Sequential()
        self._seen = fleet.look()
        self._reported = self._seen.reports
        self.config = SimpleNamespace(training=SimpleNamespace(pull_every=1, accumulate=1))
        self.cluster = SimpleNamespace(count=lambda _role: fleet.workers)
        self.stream, self.towers = None, ["CPU:0"]

    def global_step(self) -> int:
        return self.fleet.applied

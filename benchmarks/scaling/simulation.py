"""A discrete-event simulation of a fleet that trains on parameter servers.

A worker pulls from all servers, computes, pushes to all servers, and begins again. Processors and
network cards are queues, first come first served, with the service times of `Work`. Asynchronous
updates are taken in turns from the first server, in a stretch that the chief begins (`Dispatch`); a
synchronous update is the mean of the first gradients of its step, and later ones are dropped.

If every task has a machine, a message to all servers is over when the fullest one is done, so that
only this one is simulated. Of tasks that share the cores of one machine, every server is.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import inf, log, sqrt

# What works for so much of the time is what keeps a fleet from being faster.
BUSY = 0.85
# Updates of a stretch that is simulated, and those of a worker; a longer one is cut.
MOST_STEPS, MOST_OF_WORKER = 100_000, 400
_PULL, _COMPUTE, _PUSH, _APPLY, _END = range(5)


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one update costs, in seconds of a core; a server is a place in the tuples.

    Attributes:
        compute: of the worker, between pull and push.
        aside: of the worker's other threads, which read batches and send, next to `compute`.
        pull: of each server, to send its variables.
        push: of each server, to take a gradient.
        apply: of each server, for a synchronous update; an asynchronous one is in `push`.
        wire: seconds that a network card needs for the part of each server, one way.
        loop: further seconds of the worker, and of each server, outside of turns.
    """

    compute: float
    aside: float = 0.0
    pull: tuple[float, ...] = (0.0,)
    push: tuple[float, ...] = (0.0,)
    apply: tuple[float, ...] = (0.0,)
    wire: tuple[float, ...] = (0.0,)
    loop: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """How asynchronous updates are handed out; that of the strategy, as data.

    Attributes:
        seconds: of a stretch, from a checkpoint or a validation to the next, where workers wait
            for each other.
        closure: seconds of the chief to send a worker into a stretch.
        look: seconds of the chief for each worker, in every second. Nobody waits for it.
        turn: updates that are unrolled in a graph, and taken at once.
        turns_from: updates of a worker in a second, one by one, from which on turns are taken.
        turns_until: updates of a worker in a second, below which no more turns are taken.
    """

    seconds: float = 20.0
    closure: float = 0.0
    look: float = 0.0
    turn: int = 20
    turns_from: int = 40
    turns_until: int = 20

    def steps(self, rate: float) -> int:
        """Return the updates of a stretch at so many updates a second."""
        return max(1, int(rate * self.seconds / self.turn)) * self.turn

    def unit(self, rate: float, workers: int, now: int) -> int:
        """Return how many updates a worker takes at once, who took `now` at this rate."""
        fewest = self.turns_from if now == 1 else self.turns_until
        return self.turn if rate >= fewest * workers else 1


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The machines, and what goes wrong on them.

    Attributes:
        workers: how many.
        cores: of the one machine that all tasks share; 0 where each task has its own.
        server_cores: of each server's own machine.
        round_trip: seconds.
        needed: gradients of a synchronous update; 0 for asynchronous ones.
        spread: standard deviation of `Work.compute`, as a share of it.
        slow: share of the workers that are slow.
        slow_by: how much longer they compute.
        kill_every: mean seconds until a worker is killed; 0: never.
        restart: seconds until it works again.
    """

    workers: int
    cores: int = 0
    server_cores: int = 4
    round_trip: float = 0.0
    needed: int = 0
    spread: float = 0.1
    slow: float = 0.0
    slow_by: float = 1.0
    kill_every: float = 0.0
    restart: float = 30.0


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a fleet did, without its first stretch.

    Attributes:
        rate: updates a second.
        seconds: that were simulated.
        updates: that were applied.
        gradients: pushed by each worker, all of them.
        dropped: gradients that came too late.
        kills: of workers.
        cycle: mean seconds from a worker's pull to the end of its push.
        busy: share of its time that each resource works.
    """

    rate: float
    seconds: float
    updates: int
    gradients: tuple[int, ...]
    dropped: int
    kills: int
    cycle: float
    busy: Mapping[str, float]

    @property
    def limit(self) -> str:
        """What keeps the fleet from being faster; of servers, that of the fullest one.

        `waiting for workers`: they wait for each other, at the end of a stretch or of a step.
        """
        name = max(self.busy, key=lambda each: self.busy[each])
        if self.busy[name] >= BUSY:
            return name
        working = sum(self.gradients) * self.cycle / (self.seconds * len(self.gradients))
        return "workers" if working >= BUSY else "waiting for workers"


class _Cores:
    """Some equal cores with one queue; requests come in the order of their time."""

    def __init__(self, count: int) -> None:
        self.free = [0.0] * count
        self.used = 0.0

    def take(self, now: float, seconds: float) -> float:
        """Return when a piece of work ends."""
        return self.take_each(now, (seconds,))[0]

    def take_each(self, now: float, pieces: Sequence[float]) -> list[float]:
        """Return when each piece of work ends, of those that come at once."""
        free, ends, replaced = self.free, [], heapq.heapreplace
        for seconds in pieces:
            end = (now if now > free[0] else free[0]) + seconds
            replaced(free, end)
            ends.append(end)
        self.used = sum(pieces, self.used)
        return ends

    def busy(self, seconds: float) -> float:
        return min(1.0, self.used / (seconds * len(self.free))) if seconds else 0.0


@dataclass
class _Worker:
    index: int
    factor: float
    left: int = 0
    done: int = 0
    ready: float = 0.0
    began: float = 0.0
    step: int = -1
    dies: float = inf


@dataclass
class _Counts:
    updates: int = 0
    dropped: int = 0
    kills: int = 0
    cycles: float = 0.0
    since: float = 0.0
    gradients: list[int] = field(default_factory=list)


def simulated(
    work: Work, fleet: Fleet, dispatch: Dispatch, *, stretches: int = 3, seed: int = 0
) -> Outcome:
    """Return what a fleet does in so many stretches, after a first one that is not counted."""
    return _Simulation(work, fleet, dispatch, seed).run(stretches)


class _Simulation:
    def __init__(self, work: Work, fleet: Fleet, dispatch: Dispatch, seed: int) -> None:
        self.fleet, self.dispatch = fleet, dispatch
        self.random = random.Random(seed)
        self.work = work if fleet.cores else _fullest(work)
        if fleet.cores:
            self.machine = _Cores(fleet.cores)
            self.servers = self.chief = self.machine
        else:
            self.servers, self.chief = _Cores(fleet.server_cores), _Cores(1)
        self.cards = {way: _Cores(len(self.work.wire)) for way in ("in", "out")}
        slow = round(fleet.slow * fleet.workers)
        self.workers = [
            _Worker(index=i, factor=fleet.slow_by if i < slow else 1.0)
            for i in range(fleet.workers)
        ]
        for worker in self.workers:
            worker.dies = self._next_kill(0.0)
        # Of a lognormal distribution with mean 1.
        self.sigma = sqrt(log(1 + fleet.spread**2))
        self.events: list[tuple[float, int, int, int]] = []
        self.number = 0
        self.now = 0.0
        self.counts = _Counts(gradients=[0] * fleet.workers)
        self.step = self.announced = 0
        self.waiting: list[_Worker] = []
        self.pool = self.out = 0
        self.unit = 1
        # Of updates in turns, and outside of them.
        self.pulls = [[each + loop for each in self.work.pull] for loop in (0.0, work.loop[1])]

    def run(self, stretches: int) -> Outcome:
        work, fleet = self.work, self.fleet
        alone = work.compute + max(work.pull) + max(work.push) + 2 * max(work.wire)
        rate = (fleet.workers if not fleet.needed else 1) / max(1e-9, alone + 2 * fleet.round_trip)
        if not fleet.needed:
            rate = min(rate, self._most(work))
        for stretch in range(stretches + 1):
            if stretch == 1:
                self._begin_counting()
            began, before = self.now, self.counts.updates
            self._stretch(rate)
            rate = (self.counts.updates - before) / max(1e-9, self.now - began)
            self.unit = self.dispatch.unit(rate, fleet.workers, self.unit)
        return self._outcome()

    def _most(self, work: Work) -> float:
        """Return the updates a second that the queues can serve."""
        serving = sum(work.pull) + sum(work.push)
        if self.fleet.cores:
            return self.fleet.cores / max(1e-9, serving + work.compute + work.aside)
        return min(self.fleet.server_cores / max(1e-9, serving), 1 / max(1e-9, *work.wire))

    def _begin_counting(self) -> None:
        self.counts = _Counts(since=self.now, gradients=[0] * self.fleet.workers)
        for each in {id(each): each for each in self._resources().values()}.values():
            each.used = 0.0

    def _resources(self) -> dict[str, _Cores]:
        if self.fleet.cores:
            return {"cores": self.machine}
        found = {
            "server processor": self.servers,
            "server network, in": self.cards["in"],
            "server network, out": self.cards["out"],
        }
        return found if self.fleet.needed else {**found, "chief": self.chief}

    def _outcome(self) -> Outcome:
        counts = self.counts
        seconds = self.now - counts.since
        return Outcome(
            rate=counts.updates / seconds,
            seconds=seconds,
            updates=counts.updates,
            gradients=tuple(counts.gradients),
            dropped=counts.dropped,
            kills=counts.kills,
            cycle=counts.cycles / max(1, sum(counts.gradients)),
            busy={name: each.busy(seconds) for name, each in self._resources().items()},
        )

    def _next_kill(self, now: float) -> float:
        every = self.fleet.kill_every
        return now + self.random.expovariate(1 / every) if every else inf

    def _put(self, time: float, phase: int, worker: _Worker) -> None:
        self.number += 1
        heapq.heappush(self.events, (time, self.number, phase, worker.index))

    def _stretch(self, rate: float) -> None:
        """Apply the updates of a stretch; nobody begins another one before all are applied."""
        steps = self.dispatch.steps(rate)
        self.pool = min(MOST_STEPS, MOST_OF_WORKER * self.fleet.workers, steps)
        closure = self.dispatch.closure * self.pool / steps
        self.last_step = self.step + self.pool
        idle, self.waiting = self.waiting or list(self.workers), []
        for worker in idle:
            begin = self.now
            if self.pool and not self.fleet.needed:
                begin = self.chief.take(self.now, closure)
            self._next(worker, begin)
        phases = {
            _PULL: self._pull,
            _COMPUTE: self._compute,
            _PUSH: self._push,
            _APPLY: self._apply,
            _END: self._end,
        }
        while self.events and not self._is_over():
            self.now, _, phase, index = heapq.heappop(self.events)
            phases[phase](self.workers[index], self.now)

    def _is_over(self) -> bool:
        if self.fleet.needed:
            return self.step >= self.last_step
        return not self.pool and not self.out

    def _next(self, worker: _Worker, now: float) -> None:
        """Let a worker begin its next update, or wait for one."""
        if self.fleet.needed:
            if worker.step < self.step < self.last_step:
                worker.step = self.step
                self._put(now, _PULL, worker)
            else:
                self.waiting.append(worker)
            return
        if not worker.left and self.pool:
            worker.left = min(self.pool, self.unit)
            self.pool -= worker.left
            self.out += worker.left
            # What it costs the server is in that of updates outside of turns.
            now += self.fleet.round_trip
        if worker.left:
            self._put(now, _PULL, worker)
        else:
            self.waiting.append(worker)

    def _passed(self, way: str, times: Iterable[float]) -> float:
        """Return when the last part is over; each has a card of its own, and comes at its time."""
        cards, wires = self.cards[way], self.work.wire
        cards.used += wires[0]
        queues = zip(times, cards.free, wires, strict=False)
        cards.free = [(time if time > free else free) + wire for time, free, wire in queues]
        return max(cards.free)

    def _pull(self, worker: _Worker, now: float) -> None:
        worker.began = now
        half = self.fleet.round_trip / 2
        sent = self.servers.take_each(now + half, self.pulls[self.unit == 1])
        self._put(max(now, self._passed("out", sent) + half), _COMPUTE, worker)

    def _compute(self, worker: _Worker, now: float) -> None:
        noise = self.random.lognormvariate(-(self.sigma**2) / 2, self.sigma) if self.sigma else 1.0
        factor = worker.factor * noise
        own = (self.work.compute + self.work.loop[0] * (self.unit == 1)) * factor
        aside = self.work.aside * factor
        if self.fleet.cores:
            # The batch after this one is read meanwhile, and has to be there for the next update.
            end = self.machine.take(max(now, worker.ready), own)
            worker.ready = self.machine.take(now, aside) if aside else now
        else:
            end = now + own + aside
        if end < worker.dies:
            self._put(end, _PUSH, worker)
            return
        self.counts.kills += 1
        back = max(now, worker.dies) + self.fleet.restart
        worker.dies = self._next_kill(back)
        # What is left of its turn is taken by others.
        self.pool += worker.left
        self.out -= worker.left
        worker.left = 0
        worker.step = -1
        self._put(back, _END, worker)
        self._wake(now)

    def _wake(self, now: float) -> None:
        idle, self.waiting = self.waiting, []
        for worker in idle:
            self._next(worker, now)

    def _push(self, worker: _Worker, now: float) -> None:
        half = self.fleet.round_trip / 2
        self._put(self._passed("in", repeat(now)) + half, _APPLY, worker)

    def _apply(self, worker: _Worker, now: float) -> None:
        done = max(self.servers.take_each(now, self.work.push))
        worker.done += 1
        self._put(done + self.fleet.round_trip / 2, _END, worker)

    def _end(self, worker: _Worker, now: float) -> None:
        if worker.done:
            worker.done = 0
            counts = self.counts
            counts.gradients[worker.index] += 1
            counts.cycles += now - worker.began
            if self.fleet.needed:
                self._announce(worker, now)
            else:
                counts.updates += 1
                worker.left -= 1
                self.out -= 1
        self._next(worker, now)

    def _announce(self, worker: _Worker, now: float) -> None:
        if worker.step != self.step:
            self.counts.dropped += 1
            return
        self.announced += 1
        if self.announced < self.fleet.needed:
            return
        self.announced = 0
        self.step += 1
        self.counts.updates += 1
        self._wake(max(self.servers.take_each(now, self.work.apply)))


def _fullest(work: Work) -> Work:
    """Return the work with the one server that is done last."""
    load = [sum(each) for each in zip(work.pull, work.push, work.wire, strict=True)]
    one = load.index(max(load))
    return Work(
        compute=work.compute,
        aside=work.aside,
        pull=(work.pull[one],),
        push=(work.push[one],),
        apply=(work.apply[one] if len(work.apply) > one else 0.0,),
        wire=(work.wire[one],),
        loop=work.loop,
    )

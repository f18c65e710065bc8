"""A discrete-event simulation of a cluster that trains on parameter servers.

A worker pulls from all servers, computes, pushes to all servers, and repeats. Processors and
network cards are first-come-first-served queues with the service times of `Work`. Asynchronous
updates are dispatched in stretches: the chief starts a stretch on all workers, which then take
updates in turns from the first server (`Dispatch`). A synchronous update is the mean of the first
gradients of its step; later ones are dropped.

If every task has its own machine, a message to all servers ends when the server with the highest
load is done, so only that server is simulated. If tasks share the cores of one machine, all servers
are simulated.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from math import inf, log, sqrt

# A resource that is busy for at least this share of the time counts as the bottleneck.
BUSY = 0.85
# Maximum number of updates in a simulated stretch, in total and per worker.
MOST_STEPS, MOST_OF_WORKER = 100_000, 400
_PULL, _COMPUTE, _PUSH, _APPLY, _END = range(5)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The cost of one update in CPU seconds. The tuples have one item per server.

    Attributes:
        compute: seconds of the worker between pull and push.
        aside: seconds of the worker's other threads, which read batches and send at the same time.
        pull: seconds of each server to send its variables.
        push: seconds of each server to receive a gradient and, if asynchronous, to apply it.
        apply: seconds of each server to apply a synchronous update.
        wire: seconds of a network card for the part of each server, in one direction.
        loop: additional seconds of the worker, and of each server, per update without turns.
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
    """How the chief dispatches asynchronous updates.

    Attributes:
        seconds: length of a stretch, after which workers wait for each other and a checkpoint or
            validation follows.
        closure: seconds of the chief per worker to start a stretch.
        look: seconds of the chief per worker in every second; no task waits for it.
        turn: number of updates in a turn.
        turns_from: updates per worker and second from which turns are used.
        turns_until: updates per worker and second below which turns are no longer used.
    """

    seconds: float = 20.0
    closure: float = 0.0
    look: float = 0.0
    turn: int = 20
    turns_from: int = 40
    turns_until: int = 20

    def steps(self, rate: float) -> int:
        """Return the number of updates in a stretch, for a rate in updates per second."""
        return max(1, int(rate * self.seconds / self.turn)) * self.turn

    def unit(self, rate: float, workers: int, now: int) -> int:
        """Return how many updates a worker takes at once, from the rate and the previous number."""
        fewest = self.turns_from if now == 1 else self.turns_until
        return self.turn if rate >= fewest * workers else 1


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The machines and their failures.

    Attributes:
        workers: number of workers.
        cores: cores of the machine that all tasks share; 0 if each task has its own.
        server_cores: cores of each server's own machine.
        round_trip: seconds of a round trip.
        needed: gradients per synchronous update; 0 for asynchronous updates.
        spread: standard deviation of `Work.compute`, relative to it.
        slow: share of slow workers.
        slow_by: factor by which slow workers compute longer.
        kill_every: mean seconds until a worker is killed; 0 means never.
        restart: seconds until a killed worker runs again.
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
    """The results of a simulation, without its first stretch.

    Attributes:
        rate: updates per second.
        seconds: simulated seconds.
        updates: applied updates.
        gradients: number of gradients that each worker pushed, including dropped ones.
        dropped: number of gradients that arrived too late.
        kills: number of killed workers.
        cycle: mean seconds from the start of a worker's pull to the end of its push.
        busy: share of the time that each resource is busy.
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
        """The bottleneck of the cluster.

        `waiting for workers` means that workers wait for each other at the end of a stretch or
        step.
        """
        name = max(self.busy, key=lambda each: self.busy[each])
        if self.busy[name] >= BUSY:
            return name
        working = sum(self.gradients) * self.cycle / (self.seconds * len(self.gradients))
        return "workers" if working >= BUSY else "waiting for workers"


class _Cores:
    """Equal cores with one queue. Requests must be in chronological order."""

    def __init__(self, count: int) -> None:
        self.free = [0.0] * count
        self.used = 0.0

    def take(self, now: float, seconds: float) -> float:
        """Return when a request that arrives at `now` ends."""
        return self.take_each(now, (seconds,))[0]

    def take_each(self, now: float, pieces: Sequence[float]) -> list[float]:
        """Return when each of several requests that arrive at `now` ends."""
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
    """Return the outcome of `stretches` simulated stretches, after a first one that is ignored."""
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
        # The parameter of a lognormal distribution with mean 1.
        self.sigma = sqrt(log(1 + fleet.spread**2))
        self.events: list[tuple[float, int, int, int]] = []
        self.number = 0
        self.now = 0.0
        self.counts = _Counts(gradients=[0] * fleet.workers)
        self.step = self.announced = 0
        self.waiting: list[_Worker] = []
        self.pool = self.out = 0
        self.unit = 1
        # Seconds of each server per pull, with and without turns.
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
        """Return the maximum rate that the queues can serve, in updates per second."""
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
        """Start the next update of a worker, or let the worker wait for one."""
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
            # The server's time for this request is part of `Work.loop`.
            now += self.fleet.round_trip
        if worker.left:
            self._put(now, _PULL, worker)
        else:
            self.waiting.append(worker)

    def _passed(self, way: str, times: Iterable[float]) -> float:
        """Return the end time of a transfer of all parts. Each part has its own network card."""
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
            # The next batch is read during this time, and must be ready for the next update.
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
        # Other workers take the rest of the killed worker's turn.
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

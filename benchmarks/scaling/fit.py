"""The constants of `benchmarks.scaling.costs` that fit measured runs best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from scipy.optimize import nnls

from benchmarks.scaling.costs import Costs, Model, sharing_cache, work_of
from benchmarks.scaling.simulation import Dispatch, Fleet, simulated

_COLD = np.linspace(0, 1, 21)
# What is tried: shares, seconds of a byte, and of a round trip.
_WAITING = {
    "aside": (0.2, 0.3, 0.4, 0.5, 0.6, 0.8),
    "loopback_byte": (0.0, 2e-10, 4e-10, 8e-10),
    "loopback": (0.0, 5e-5, 1e-4),
}
# Seconds of the chief to send a worker a closure, as measured when it sent many of them. A run of
# one stretch has too few to be fitted. `make bench ARGS=handout` found 3.2 ms with 64 workers.
CLOSURE = 2.7e-3
# Adam's slots, which all runs have, are twice the model.
_WITH_SLOTS = 3


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run that was measured; seconds are those of a core.

    Attributes:
        model: its name.
        held: bytes of its variables on each server.
        gradient: seconds of one batch, as `benchmarks.scaling.gradient` finds them.
        workers: how many there were.
        pull_every: local steps of an update.
        worker: seconds of the workers for an update.
        server: seconds of all servers for an update.
        chief: seconds of the chief for an update.
        rate: updates a second.
        memory: the most resident bytes of a task, by role.
        fitted: whether the constants are fitted to it.
        looped: whether it had too few steps for turns. It is over in seconds, and saves meanwhile:
            its costs count, and not its rate.
    """

    model: str
    held: tuple[int, ...]
    gradient: float
    workers: int
    pull_every: int
    worker: float
    server: float
    chief: float
    rate: float
    memory: Mapping[str, int] = field(default_factory=dict)
    fitted: bool = True
    looped: bool = False

    @property
    def servers(self) -> int:
        """Servers that hold a part of the model."""
        return sum(1 for each in self.held if each)


def fit(points: Sequence[Point], cores: int, dispatch: Dispatch | None = None) -> Costs:
    """Return the constants that fit best to the points that are marked.

    Args:
        points: several models and values of `pull_every`, numbers of workers and of servers.
        cores: of the machine.
        dispatch: how updates are handed out; the seconds of looks are fitted.
    """
    dispatch = dispatch or Dispatch(closure=CLOSURE)
    own = [point for point in points if point.fitted]
    worker, cold = _worker(own, cores, dispatch)
    server = _solved([_of_server(p, dispatch) for p in own], [p.server for p in own])
    # The kernel counts in hundredths of a second, of which a fast chief may have used none.
    paced = [p for p in own if not p.looped and p.chief]
    rows = [(1.0, float(p.workers)) for p in paced]
    chief = _solved(rows, [p.chief * p.rate for p in paced])
    costs = Costs(
        worker_update=worker[0],
        worker_message=worker[1],
        worker_byte=worker[2],
        batch=worker[3],
        gradient=worker[4],
        worker_loop=worker[5],
        server_message=server[0],
        server_byte=server[1],
        server_loop=server[2],
        server_share=server[3],
        chief_share=chief[0],
        system_share=_of_no_task(paced, cores),
        cold=cold,
        memory=_memory(own),
        dispatch=replace(dispatch, look=chief[1]),
    )
    return _of_one_machine(costs, paced, cores)


def rate(costs: Costs, point: Point, cores: int) -> float:
    """Return the updates a second of a run by simulation."""
    model = Model(gradient=point.gradient, held=point.held, pull_every=point.pull_every)
    fleet = Fleet(workers=point.workers, cores=cores, round_trip=costs.loopback)
    work = work_of(costs, model, workers=point.workers, cores=cores)
    # Its only checkpoint comes after what is measured.
    return simulated(work, fleet, replace(costs.dispatch, closure=0.0), stretches=2).rate


def _looped(point: Point, dispatch: Dispatch) -> float:
    # One by one, a run goes on so until it is fast enough for turns, which are faster.
    without_turns = dispatch.unit(point.rate, point.workers, 1) == 1
    return float(point.looped or without_turns)


def _of_server(point: Point, dispatch: Dispatch) -> tuple[float, ...]:
    servers = point.servers
    looped = servers * _looped(point, dispatch)
    return servers, sum(point.held), looped, servers / point.rate


def _worker(
    points: Sequence[Point], cores: int, dispatch: Dispatch
) -> tuple[Sequence[float], float]:
    """Return the worker's constants, and how much longer it takes on a core with others."""

    def solved(cold: float) -> tuple[float, Sequence[float]]:
        rows, sums = [], []
        for p in points:
            n, crowd = p.pull_every, sharing_cache(cold, p.workers, cores)
            looped = _looped(p, dispatch)
            row = (1.0, p.servers - 1, sum(p.held), n, n * p.gradient, looped)
            rows.append(tuple(crowd * each for each in row))
            sums.append(p.worker)
        found = _solved(rows, sums)
        errors = np.array(rows) @ np.array(found) / np.array(sums) - 1
        return float((errors**2).sum()), found

    _, found, cold = min(((*solved(cold), float(cold)) for cold in _COLD), key=lambda each: each[0])
    return found, cold


def _solved(rows: Sequence[Sequence[float]], sums: Sequence[float]) -> list[float]:
    """Return the factors, none below zero, with the least squares of relative errors."""
    matrix, right = np.array(rows, float), np.array(sums, float)
    scale = np.maximum(matrix.max(axis=0), 1e-30)
    found, _ = nnls(matrix / scale / right[:, None], np.ones(len(right)))
    return [float(each) for each in found / scale]


def _memory(points: Sequence[Point]) -> dict[str, tuple[float, float]]:
    """Return the bytes of a process of each role, and those for each byte that it holds."""
    found = {}
    for role in ("chief", "ps", "worker"):
        seen = [p for p in points if role in p.memory]
        if seen:
            held = {
                "chief": [_WITH_SLOTS * sum(p.held) for p in seen],
                "ps": [_WITH_SLOTS * max(p.held) for p in seen],
                "worker": [sum(p.held) for p in seen],
            }[role]
            rows = [(1.0, float(each)) for each in held]
            base, each = _solved(rows, [float(p.memory[role]) for p in seen])
            found[role] = (base, each)
    return found


def _of_no_task(points: Sequence[Point], cores: int) -> float:
    """Return the cores that no task has where there is always a worker that could use them."""
    used = [p.rate * (p.worker + p.server + p.chief) for p in points if p.workers > cores]
    return max(0.0, cores - sum(used) / len(used)) if used else 0.0


def _of_one_machine(costs: Costs, points: Sequence[Point], cores: int) -> Costs:
    """Return the constants with what tasks of one machine wait for, by the rates."""
    # Of more workers than cores another one works while one waits: their rates tell nothing.
    waiting = [p for p in points if p.workers <= cores]

    def error(found: Costs) -> float:
        return sum(math.log(rate(found, p, cores) / p.rate) ** 2 for p in waiting)

    # All of them, as they stand for one another: one after the other ends far from the best.
    tried = (dict(zip(_WAITING, each, strict=True)) for each in product(*_WAITING.values()))
    return min((replace(costs, **each) for each in tried), key=error)  # type: ignore[arg-type]

"""Fits the constants of `benchmarks.scaling.costs` to measured runs."""

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
# Candidate values: shares, seconds per byte, and seconds per round trip.
_WAITING = {
    "aside": (0.2, 0.3, 0.4, 0.5, 0.6, 0.8),
    "loopback_byte": (0.0, 2e-10, 4e-10, 8e-10),
    "loopback": (0.0, 5e-5, 1e-4),
}
# Seconds to send a closure to a worker, measured separately, because a run has too few closures for
# a fit. A later measurement with `make bench ARGS=handout` and 64 workers gave 3.2 ms.
CLOSURE = 2.7e-3
# All runs use Adam, whose slots take twice the size of the model.
_WITH_SLOTS = 3


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measured run. Seconds are CPU seconds.

    Attributes:
        model: name of the model.
        held: bytes of its variables on each server.
        gradient: seconds per batch, as measured by `benchmarks.scaling.gradient`.
        workers: number of workers.
        pull_every: local steps per update.
        worker: seconds of all workers per update.
        server: seconds of all servers per update.
        chief: seconds of the chief per update.
        rate: updates per second.
        memory: maximum resident bytes of a task, by role.
        fitted: whether the constants are fitted to this run.
        looped: whether the run had too few steps for turns. Such a run takes only seconds and saves
            checkpoints during the measurement, so its costs are used but not its rate.
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
        """The number of servers that hold a part of the model."""
        return sum(1 for each in self.held if each)


def fit(points: Sequence[Point], cores: int, dispatch: Dispatch | None = None) -> Costs:
    """Return the constants that best fit the points with `fitted`.

    Args:
        points: runs with several models, values of `pull_every`, and numbers of workers and
            servers.
        cores: cores of the machine.
        dispatch: how the chief dispatches updates; its `look` is fitted.
    """
    dispatch = dispatch or Dispatch(closure=CLOSURE)
    own = [point for point in points if point.fitted]
    worker, cold = _worker(own, cores, dispatch)
    server = _solved([_of_server(p, dispatch) for p in own], [p.server for p in own])
    # Skip chiefs that used less than the kernel's unit of CPU time, a hundredth of a second.
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
    """Return the simulated updates per second of a run."""
    model = Model(gradient=point.gradient, held=point.held, pull_every=point.pull_every)
    fleet = Fleet(workers=point.workers, cores=cores, round_trip=costs.loopback)
    work = work_of(costs, model, workers=point.workers, cores=cores)
    # The only checkpoint of a run comes after the measured part.
    return simulated(work, fleet, replace(costs.dispatch, closure=0.0), stretches=2).rate


def _looped(point: Point, dispatch: Dispatch) -> float:
    # Workers take updates one by one until the run is fast enough for turns (see `Dispatch`).
    without_turns = dispatch.unit(point.rate, point.workers, 1) == 1
    return float(point.looped or without_turns)


def _of_server(point: Point, dispatch: Dispatch) -> tuple[float, ...]:
    servers = point.servers
    looped = servers * _looped(point, dispatch)
    return servers, sum(point.held), looped, servers / point.rate


def _worker(
    points: Sequence[Point], cores: int, dispatch: Dispatch
) -> tuple[Sequence[float], float]:
    """Return the worker's constants, and the value of `cold` that fits best."""

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
    """Return the non-negative factors that minimize the squared relative errors."""
    matrix, right = np.array(rows, float), np.array(sums, float)
    scale = np.maximum(matrix.max(axis=0), 1e-30)
    found, _ = nnls(matrix / scale / right[:, None], np.ones(len(right)))
    return [float(each) for each in found / scale]


def _memory(points: Sequence[Point]) -> dict[str, tuple[float, float]]:
    """Return the fixed memory of each role's process, and its memory per byte of variables."""
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
    """Return the cores that no task uses although a worker is always waiting for one."""
    used = [p.rate * (p.worker + p.server + p.chief) for p in points if p.workers > cores]
    return max(0.0, cores - sum(used) / len(used)) if used else 0.0


def _of_one_machine(costs: Costs, points: Sequence[Point], cores: int) -> Costs:
    """Return the constants, with the waiting times on one machine fitted to the rates."""
    # With more workers than cores, waiting does not affect the rate, because another worker runs.
    waiting = [p for p in points if p.workers <= cores]

    def error(found: Costs) -> float:
        return sum(math.log(rate(found, p, cores) / p.rate) ** 2 for p in waiting)

    # Search all combinations, because the constants compensate for each other.
    tried = (dict(zip(_WAITING, each, strict=True)) for each in product(*_WAITING.values()))
    return min((replace(costs, **each) for each in tried), key=error)  # type: ignore[arg-type]

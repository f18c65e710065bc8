"""The cost of a step of asynchronous training, and how fast a cluster is by it.

An update of a worker is one message from each server, `pull_every` gradients, and one message to
each server. What that costs in seconds of a core is taken to be linear in the bytes that move:

    worker   worker_message + worker_byte * bytes + pull_every * gradient
    server   server_message + server_byte * bytes of this server
    chief    closure / steps of a closure

Where a worker makes too few updates in a stretch for turns (see decision 0032), each of them costs
worker and server `worker_loop` and `server_loop` more. Bytes are counted once for both ways: as
much is pulled as is pushed. The chief takes a share of a core, `chief_share`, whatever the workers
do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import log

import numpy as np

from trainer.strategies.async_parameter_server import MAX_PORTION, MIN_PORTION, TURN, unit_of
from trainer.strategies.placement import Sized, assign
from trainer.training.loop import INNER_LOOP_SECONDS

# Closures that a worker gets in a stretch, where they are neither the largest nor the smallest:
# half of the stretch in halves of what is left, and the rest in quarters of a worker's share.
OF_A_WORKER = 2 * log(2) + 2
_HALVINGS = 50
# Numbers that differ by less of the larger one yield no slope.
_SAME = 1e-6


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run that was measured, with one parameter server; seconds are those of a core.

    Attributes:
        model: its name.
        bytes: of all variables.
        workers: how many there were.
        pull_every: local steps of an update.
        worker: seconds of the workers for an update.
        server: seconds of the server for an update.
        chief: seconds of the chief for an update.
        rate: updates a second.
    """

    model: str
    bytes: int
    workers: int
    pull_every: int
    worker: float
    server: float
    chief: float
    rate: float


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The constants of the model, in seconds of a core; `gradient` is of one batch, by model.

    `chief_share` is a share of a core.
    """

    worker_message: float
    worker_byte: float
    worker_loop: float
    server_message: float
    server_byte: float
    server_loop: float
    closure: float
    chief_share: float
    gradient: Mapping[str, float]

    def worker(self, size: int, messages: int = 1, *, looped: bool) -> float:
        """Return what an update of so many bytes costs a worker, without its gradients."""
        loop = looped * self.worker_loop
        return messages * self.worker_message + self.worker_byte * size + loop

    def server(self, size: int, *, looped: bool) -> float:
        """Return what an update costs a server that holds so many bytes."""
        return self.server_message + self.server_byte * size + looped * self.server_loop


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A cluster whose tasks have machines of their own.

    Attributes:
        workers: how many.
        servers: how many.
        server_cores: of each server.
        bytes_per_second: of the network, each way, of each machine.
        round_trip: seconds.
    """

    workers: int
    servers: int
    server_cores: int
    bytes_per_second: float
    round_trip: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How fast a cluster is, in updates a second, and what keeps it from being faster."""

    rate: float
    limit: str


def fit(points: Sequence[Point], looped: Point) -> Costs:
    """Return the constants that fit best.

    Args:
        points: with as many workers as `looped` has, each model has to be there with two values of
            `pull_every`, and two models are needed at least. Of the others the chief's part counts
            alone, as it hardly differs where workers are as many.
        looped: the same as one of them, in which no update was made in a turn.

    Raises:
        ValueError: the points do not determine all of the constants.
    """
    (turned,) = (p for p in points if _same_case(p, looped))
    worker_loop = max(0.0, looped.worker - turned.worker)
    server_loop = max(0.0, looped.server - turned.server)
    of_turns = [
        replace(p, worker=p.worker - worker_loop, server=p.server - server_loop)
        if too_few_for_turns(p.rate, p.workers)
        else p
        for p in points
        if p.workers == looped.workers
    ]
    names = dict.fromkeys(p.model for p in of_turns)
    gradient = {name: _gradient(name, of_turns) for name in names}
    own = [(p.bytes, p.worker - p.pull_every * gradient[p.model]) for p in of_turns]
    worker_message, worker_byte = _line(own)
    # Where updates are seldom the server mostly waits, and that costs something too.
    busy = [p for p in of_turns if p.pull_every == 1]
    server_message, server_byte = _line([(p.bytes, p.server) for p in busy])
    chief_share, closure = _line([(_closures(p.rate, p.workers), p.chief * p.rate) for p in points])
    return Costs(
        worker_message=worker_message,
        worker_byte=worker_byte,
        worker_loop=worker_loop,
        server_message=server_message,
        server_byte=server_byte,
        server_loop=server_loop,
        closure=closure,
        chief_share=chief_share,
        gradient=gradient,
    )


def too_few_for_turns(rate: float, workers: int) -> bool:
    """Whether a stretch at so many updates a second is dispatched without turns."""
    return unit_of(int(rate * INNER_LOOP_SECONDS), workers, TURN) == 1


def _same_case(one: Point, other: Point) -> bool:
    return all(
        getattr(one, name) == getattr(other, name) for name in ("model", "workers", "pull_every")
    )


def shares(variables: Sequence[int], servers: int) -> list[int]:
    """Return the bytes on each server; a variable is on one server as a whole."""
    sized = [Sized(path=f"{index}", bytes=each) for index, each in enumerate(variables)]
    found = [0] * servers
    for each, server in zip(variables, assign(sized, servers, {}), strict=True):
        found[server] += each
    return found


def predicted(
    costs: Costs, fleet: Fleet, model: str, variables: Sequence[int], pull_every: int
) -> Prediction:
    """Return how fast a cluster trains a model whose variables have these sizes in bytes.

    A message costs a worker as much for each server as one has cost for a single one, which also
    holds what does not grow with the servers: workers are rather faster than this.
    """
    found = _predicted(costs, fleet, (model, variables, pull_every), looped=False)
    if not too_few_for_turns(found.rate, fleet.workers):
        return found
    return _predicted(costs, fleet, (model, variables, pull_every), looped=True)


def _predicted(
    costs: Costs, fleet: Fleet, trained: tuple[str, Sequence[int], int], *, looped: bool
) -> Prediction:
    model, variables, pull_every = trained
    total = sum(variables)
    held = shares(variables, fleet.servers)
    messages = sum(1 for each in held if each)
    gradients = pull_every * costs.gradient[model]
    computing = costs.worker(total, messages, looped=looped) + gradients
    # Pull and push follow each other; the servers' parts come side by side.
    travelling = 2 * (fleet.round_trip + total / fleet.bytes_per_second)
    serving = costs.server(max(held), looped=looped)
    limits = {
        "workers": fleet.workers / (computing + serving + travelling),
        "processor of the fullest server": fleet.server_cores / serving,
        "network of the fullest server": fleet.bytes_per_second / max(held),
        "chief": _most_of_chief(costs, fleet.workers),
    }
    limit = min(limits, key=lambda name: limits[name])
    return Prediction(rate=limits[limit], limit=limit)


def on_one_machine(costs: Costs, point: Point, cores: int) -> float:
    """Return the updates a second of a measured run by the model, where tasks share the cores."""
    turned = _shared(costs, point, cores, looped=False)
    if not too_few_for_turns(turned, point.workers):
        return turned
    return _shared(costs, point, cores, looped=True)


def _shared(costs: Costs, point: Point, cores: int, *, looped: bool) -> float:
    gradients = point.pull_every * costs.gradient[point.model]
    worker = costs.worker(point.bytes, looped=looped) + gradients
    both = worker + costs.server(point.bytes, looped=looped)

    def seconds_of_cores(rate: float) -> float:
        return rate * both + costs.closure * _closures(rate, point.workers) + costs.chief_share

    # A task works on one update at a time.
    low, high = 0.0, min(cores / both, point.workers / both)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds_of_cores(middle) <= cores else (low, middle)
    return low


def _closures(rate: float, workers: int) -> float:
    """Return the closures a second at a rate of updates, as the strategy cuts a stretch up."""
    share = rate * INNER_LOOP_SECONDS / workers
    size = min(MAX_PORTION, max(min(MIN_PORTION, share), share / OF_A_WORKER))
    return rate / max(1.0, size)


def _most_of_chief(costs: Costs, workers: int) -> float:
    """Return the updates a second that a chief can dispatch.

    Where it cannot give every worker its portions of a stretch, stretches become short and closures
    small, down to single steps.
    """
    closures = (1 - costs.chief_share) / costs.closure
    of_a_worker = closures * INNER_LOOP_SECONDS / workers
    return closures * (
        MAX_PORTION if of_a_worker >= OF_A_WORKER else MIN_PORTION if of_a_worker >= 1 else 1
    )


def _gradient(model: str, points: Sequence[Point]) -> float:
    own = [(p.pull_every, p.worker) for p in points if p.model == model]
    _, slope = _line(own)
    return slope


def _line(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope of the best line with neither below zero."""
    x, y = (np.array(each, float) for each in zip(*pairs, strict=True))
    if np.ptp(x) < _SAME * x.max():
        raise ValueError(f"a line through one place only: {pairs}")
    if y.max() <= 0:
        return 0.0, 0.0
    # Relative errors, within reason: the largest would decide alone otherwise, or the smallest.
    weight = 1 / np.maximum(y, y.max() / 100)
    slope, intercept = np.polyfit(x, y, 1, w=weight)
    if slope < 0:
        return max(0.0, float(np.average(y, weights=weight**2))), 0.0
    if intercept < 0:
        return 0.0, float(np.sum(weight**2 * x * y) / np.sum((weight * x) ** 2))
    return float(intercept), float(slope)

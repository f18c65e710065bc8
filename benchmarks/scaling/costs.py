"""The cost of an update for each role, as measured by `make scaling` on one machine.

`measured.json` has the values of the constants that this module defines. Seconds are CPU seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path

from benchmarks.scaling.simulation import Dispatch, Work

MEASURED = Path(__file__).parent / "measured.json"


@dataclass(frozen=True, kw_only=True)
class Costs:
    """The constants of the cost model.

    Bytes are bytes of the model, counted once for both directions.

    Attributes:
        worker_update: seconds of a worker per update, in addition to the items below.
        worker_message: seconds of a worker per server after the first.
        worker_byte: seconds of a worker per byte.
        batch: seconds of a worker per batch.
        gradient: a worker's time for a gradient, relative to `benchmarks.scaling.gradient`.
        worker_loop: additional seconds of a worker per update without turns.
        server_message: seconds of a server per update.
        server_byte: seconds of a server per byte of its part.
        server_loop: additional seconds of a server per update without turns.
        server_share: share of a core that a server always uses.
        chief_share: share of a core that the chief always uses.
        system_share: share of a core that is used by the launcher, and for network interrupts,
            which the kernel attributes to no task.
        cold: share of its seconds that a worker with its own core waits for memory.
        aside: share of a worker's seconds in threads other than the computing one.
        loopback_byte: seconds per byte between two tasks of one machine, without CPU time.
        loopback: seconds of a round trip between two tasks of one machine.
        memory: by role (`chief`, `ps`, `worker`): bytes of the process, and bytes per byte of the
            variables that it holds.
        dispatch: how the chief dispatches updates.
    """

    worker_update: float
    worker_message: float
    worker_byte: float
    batch: float
    gradient: float
    worker_loop: float
    server_message: float
    server_byte: float
    server_loop: float
    server_share: float
    chief_share: float
    system_share: float = 0.0
    cold: float = 0.0
    aside: float = 0.3
    loopback_byte: float = 0.0
    loopback: float = 0.0
    memory: dict[str, tuple[float, float]] = field(default_factory=dict)
    dispatch: Dispatch = field(default_factory=Dispatch)


@dataclass(frozen=True, kw_only=True)
class Model:
    """The properties of a model that determine its costs.

    Attributes:
        gradient: CPU seconds per batch, as measured by `benchmarks.scaling.gradient`.
        held: bytes on each server.
        pull_every: gradients per update.
    """

    gradient: float
    held: Sequence[int]
    pull_every: int = 1


def sharing_cache(cold: float, workers: int, cores: int) -> float:
    """Return the slowdown of workers that share the cores of a machine, or 1 without sharing.

    Workers on one core share its cache. Misses grow with the square root of the factor by which a
    cache shrinks (Hartstein et al. 2006, "Cache miss behavior: is it sqrt 2?").

    Args:
        cold: share of its seconds that a worker with its own core waits for memory.
        workers: number of workers.
        cores: cores of the machine; 0 if each worker has its own machine.
    """
    crowd = max(1.0, workers / cores) if cores else 1.0
    return 1 + cold * (sqrt(crowd) - 1)


def work_of(
    costs: Costs, model: Model, *, workers: int = 1, cores: int = 0, byte: float = 0.0
) -> Work:
    """Return the cost of an update.

    Args:
        costs: the measured constants.
        model: the model that is trained.
        workers: number of workers.
        cores: cores of the machine that all tasks share; 0 if each task has its own.
        byte: seconds per byte of a network card, if each task has its own machine.
    """
    held = [each for each in model.held if each] or [0]
    shares = costs.system_share + costs.chief_share + costs.server_share * len(held)
    slower = 1 / max(0.1, 1 - shares / cores) if cores else 1.0
    cold = slower * sharing_cache(costs.cold, workers, cores)
    worker = (
        costs.worker_update
        + costs.worker_message * (len(held) - 1)
        + costs.worker_byte * sum(held)
        + model.pull_every * (costs.batch + costs.gradient * model.gradient)
    ) * cold
    serving = tuple(slower * (costs.server_message + costs.server_byte * each) / 2 for each in held)
    byte = costs.loopback_byte if cores else byte
    return Work(
        compute=worker * (1 - costs.aside),
        aside=worker * costs.aside,
        pull=serving,
        push=serving,
        apply=serving,
        wire=tuple(byte * each for each in held),
        loop=(costs.worker_loop * cold, costs.server_loop * slower),
    )


def measured() -> Costs:
    """Return the constants that `make scaling` wrote."""
    tree = json.loads(MEASURED.read_text(encoding="utf-8"))["costs"]
    memory = {role: (float(a), float(b)) for role, (a, b) in tree["memory"].items()}
    return Costs(**{**tree, "memory": memory, "dispatch": Dispatch(**tree["dispatch"])})

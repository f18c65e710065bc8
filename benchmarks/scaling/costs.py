"""What an update costs each role, as `make scaling` has measured it on one machine.

The numbers are data, `measured.json`; what they mean is here. Seconds are those of a core.
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
    """The constants; bytes are those of the model, counted once for both ways.

    Attributes:
        worker_update: of a worker for an update, without what follows.
        worker_message: of a worker for each server after the first.
        worker_byte: of a worker for a byte.
        batch: of a worker for one batch.
        gradient: of a worker, over the seconds that `benchmarks.scaling.gradient` finds.
        worker_loop: of a worker for an update outside of turns.
        server_message: of a server for an update.
        server_byte: of a server for a byte of its part.
        server_loop: of a server for an update outside of turns.
        server_share: share of a core that a server takes whatever the others do.
        chief_share: the same of the chief.
        system_share: the same of the launcher, and of interrupts of the network, which the kernel
            counts for no task.
        cold: share of its seconds that a worker with a core of its own waits for memory.
        aside: share of a worker's seconds in threads next to the one that computes.
        loopback_byte: seconds for a byte between two tasks of one machine, without a core.
        loopback: seconds of a round trip between them.
        memory: bytes of a role (`chief`, `ps`, `worker`): of the process, and for each byte of the
            variables that it holds.
        dispatch: how the chief hands out updates.
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
    """A model as its costs see it.

    Attributes:
        gradient: seconds of a core for one batch, as `benchmarks.scaling.gradient` finds them.
        held: bytes on each server.
        pull_every: gradients of an update.
    """

    gradient: float
    held: Sequence[int]
    pull_every: int = 1


def sharing_cache(cold: float, workers: int, cores: int) -> float:
    """Return how much longer workers take that share a machine's cores; 1 with a core for each.

    A worker has a part of the cache of its core, and misses grow with the root of how much smaller
    a cache is (Hartstein et al. 2006, "Cache miss behavior: is it sqrt 2?").

    Args:
        cold: share of its seconds that a worker with a core of its own waits for memory.
        workers: how many.
        cores: of the machine; 0 where each worker has its own.
    """
    crowd = max(1.0, workers / cores) if cores else 1.0
    return 1 + cold * (sqrt(crowd) - 1)


def work_of(
    costs: Costs, model: Model, *, workers: int = 1, cores: int = 0, byte: float = 0.0
) -> Work:
    """Return what an update costs.

    Args:
        costs: measured.
        model: that is trained.
        workers: how many there are.
        cores: of the machine that all tasks share; 0 where each has its own.
        byte: seconds of a network card for a byte, where each has its own machine.
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
    """Return the constants that `make scaling` has written."""
    tree = json.loads(MEASURED.read_text(encoding="utf-8"))["costs"]
    memory = {role: (float(a), float(b)) for role, (a, b) in tree["memory"].items()}
    return Costs(**{**tree, "memory": memory, "dispatch": Dispatch(**tree["dispatch"])})

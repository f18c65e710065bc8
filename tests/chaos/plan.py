"""The plan of a run: drawn from a seed, so that it can be repeated."""

from __future__ import annotations

import random
from dataclasses import dataclass

STEPS = 3000
EVERY = 250
STALL_SECONDS = 15
CLUSTERED = ("async_parameter_server", "sync_parameter_server", "in_graph")
STRATEGIES = (*CLUSTERED, "multi_worker_mirrored", "single")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault of a run.

    Attributes:
        kind: a name of `tests.chaos.faults.FAULTS`.
        task: the task that it hits; empty for faults of the disk.
        step: the global step from which on it is injected.
        seconds: the length of a pause.
    """

    kind: str
    task: str
    step: int
    seconds: float = 0.0

    def __str__(self) -> str:
        """Describe it in a line of the log."""
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind}{f' {self.task}' if self.task else ''}{lasts} at step {self.step}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run and its faults."""

    seed: int
    strategy: str
    servers: int
    workers: int
    evaluator: bool
    faults: tuple[Fault, ...]
    steps: int = STEPS
    every: int = EVERY

    def __str__(self) -> str:
        """Describe strategy and cluster."""
        shape = f"{self.servers} ps, {self.workers} workers" if self.strategy != "single" else ""
        if self.strategy == "multi_worker_mirrored":
            shape = f"{self.workers} workers"
        parts = [self.strategy, shape, "evaluator" if self.evaluator else ""]
        return ", ".join(part for part in parts if part)

    def tasks(self) -> list[str]:
        """Return the names of all tasks."""
        counts = {"ps": 0, "worker": 0, "chief": 0, "evaluator": int(self.evaluator)}
        if self.strategy in CLUSTERED:
            counts |= {"ps": self.servers, "worker": self.workers, "chief": 1}
        elif self.strategy == "single":
            counts["chief"] = 1
        else:
            counts["worker"] = self.workers
        return [f"{role}-{index}" for role, count in counts.items() for index in range(count)]

    def settings(self) -> dict[str, object]:
        """Return the configuration, by `section.key`."""
        return {
            "training.strategy": self.strategy,
            "training.steps": self.steps,
            "training.checkpoint_every": self.every,
            "training.validate_every": 0,
            "training.stall_timeout": STALL_SECONDS,
            "cluster.parameter_servers": self.servers,
            "cluster.workers": self.workers,
            "cluster.evaluator": str(self.evaluator).lower(),
            "cluster.communication": "ring",
            # Each fault may cost a restart, and the limit is not what is tested.
            "cluster.max_restarts": 2 * len(self.faults) + 2,
            "gate.min.accuracy": 0.8,
        }


def draw_plan(seed: int) -> Plan:
    """Return the plan of a seed."""
    draw = random.Random(seed)
    shape = Plan(
        seed=seed,
        strategy=draw.choice(STRATEGIES),
        servers=draw.randint(1, 2),
        workers=draw.randint(2, 3),
        evaluator=draw.random() < 0.25,
        faults=(),
    )
    faults = [_fault(draw, shape) for _ in range(draw.randint(1, 3))]
    ordered = tuple(sorted(faults, key=lambda fault: fault.step))
    return Plan(**{**vars(shape), "faults": ordered})


def _fault(draw: random.Random, plan: Plan) -> Fault:
    kind = draw.choices(("kill", "stop", "pause", "full disk", "torn file"), (4, 2, 2, 1, 2))[0]
    task = "" if kind in ("full disk", "torn file") else draw.choice(plan.tasks())
    step = draw.randrange(1, STEPS - EVERY)
    seconds = draw.uniform(0.2, 5) if kind == "pause" else 0.0
    return Fault(kind=kind, task=task, step=step, seconds=seconds)
